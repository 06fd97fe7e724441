"""A release: the code to run and the model it runs, under one name that says exactly which.

The name ends in a hash of its content, so a release is never changed in place: another model or another version of the
code is another release, and switching between them is one symlink.
"""

import hashlib
import json
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from installer import fs
from installer.layout import Layout
from installer.service import code_root

# Until code travels in bundles of its own, a release runs the code that installed it.
THIS_CODE = (sys.executable, "-s", "-P", "-m", "appliance.cli")

_WRAPPER = """\
#!/bin/sh
# Runs this release's atoll in a clean environment: no user packages, no model hub.
unset PYTHONHOME PYTHONSTARTUP
export PYTHONPATH={root} PYTHONNOUSERSITE=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
exec {command} "$@"
"""


def code_version() -> str:
    try:
        return version("atoll")
    except PackageNotFoundError:
        return "0.0.0"


@dataclass(frozen=True, slots=True)
class Release:
    """One release before or after it is staged."""

    name: str
    info: dict[str, Any]     # the content of release.json
    wrapper: str             # the content of bin/atoll

    @classmethod
    def of(cls, bundle: dict[str, Any], command: tuple[str, ...] = THIS_CODE) -> "Release":
        """`bundle`: name, version, sequence, digest, key_fingerprint of the model's bundle."""
        wrapper = _WRAPPER.format(root=shlex.quote(str(code_root())), command=shlex.join(command))
        code = {"atoll": code_version(), "command": list(command)}
        info: dict[str, Any] = {"schema_version": 1, **code, "bundle": bundle}
        content = json.dumps([info, wrapper], sort_keys=True).encode()
        name = f"{info['atoll']}-{hashlib.sha256(content).hexdigest()[:12]}"
        return cls(name, {**info, "release": name}, wrapper)

    def files(self) -> list[tuple[str, str, int]]:
        """(path below the release, content, mode); release.json last, as the sign that it is complete."""
        return [("bin/atoll", self.wrapper, 0o755), ("release.json", json.dumps(self.info, indent=2) + "\n", 0o644)]

    def stage(self, layout: Layout) -> bool:
        """Write what is missing or different; returns whether anything was."""
        changed = False
        for name, content, mode in self.files():
            path = layout.releases / self.name / name
            if path.is_file() and path.read_text(errors="replace") == content and path.stat().st_mode & 0o777 == mode:
                continue
            fs.make_dir(path.parent)
            fs.write_atomic(path, content, mode)
            changed = True
        return changed


def live(layout: Layout) -> str | None:
    """The name of the release that `current` points at."""
    return Path(layout.current.readlink()).name if layout.current.is_symlink() else None


def read_info(layout: Layout, name: str) -> dict[str, Any]:
    """release.json of a staged release; empty if it is not there."""
    try:
        info = json.loads((layout.releases / name / "release.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}
