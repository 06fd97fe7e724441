"""A release: the code to run and the models it runs, under one name that says exactly which.

The name ends in a hash of its content, so a release is never changed in place: another model or another version of the
code is another release, and switching between them is one symlink.

    releases/<name>/bin/atoll      starts the code
                    lib            -> ../../code/<tree>/lib, when the code came on a medium (code_tree.py)
                    release.json   what it is; written last, as the sign that it is complete
"""

import hashlib
import json
import os
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from installer.base import fs
from installer.base.layout import Layout, code_root
from installer.release import code_tree
from installer.release.replay_guard import raise_sequence

UNKNOWN_VERSION = "0.0.0"  # for code that was never installed as a package
# A checkout has no code tree: its releases run the checkout itself.
THIS_CODE = (sys.executable, "-s", "-P", "-m", "appliance.cli")

_WRAPPER = """\
#!/bin/sh
# Runs this release's atoll in a clean environment: no user packages, no model hub.
unset PYTHONHOME PYTHONSTARTUP
export PYTHONPATH={root} PYTHONNOUSERSITE=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
exec {command} "$@"
"""

# It is found through the symlink `lib`, so the text does not depend on where the tree lies.
_TREE_WRAPPER = """\
#!/bin/sh
# Runs this release's atoll, whatever symlink it was called by.
here=$(readlink -f "$0") && exec "${here%/bin/*}/lib/../bin/atoll" "$@"
"""


def code_version() -> str:
    try:
        return version("atoll")
    except PackageNotFoundError:
        return UNKNOWN_VERSION


@dataclass(frozen=True, slots=True)
class Release:
    """One release, before or after it is staged."""

    name: str
    info: dict[str, Any]     # content of release.json
    wrapper: str             # content of bin/atoll

    @classmethod
    def of(cls, bundles: list[dict[str, Any]], command: tuple[str, ...] = THIS_CODE) -> "Release":
        """`bundles`, one for each model: instance, name, version, sequence, digest, key_fingerprint, spdx."""
        tree = code_tree.code_tree() if command is THIS_CODE else None
        code: dict[str, Any] = {"atoll": code_version(), "code": None, "runtime": None}
        if tree is not None:
            wrapper = _TREE_WRAPPER
            code |= {"code": tree.name, "runtime": code_tree.runtime_facts(tree)}
        else:
            wrapper = _WRAPPER.format(root=shlex.quote(str(code_root())), command=shlex.join(command))
            code["command"] = list(command)
        info: dict[str, Any] = {"schema_version": 2, **code, "bundle": bundles[0], "bundles": bundles}
        name = _name_of(info, wrapper)
        return cls(name, {**info, "release": name}, wrapper)

    def files(self) -> list[tuple[str, str, int]]:
        """(path below the release, content, mode). release.json comes last, as the mark that it is complete."""
        return [("bin/atoll", self.wrapper, 0o755), ("release.json", json.dumps(self.info, indent=2) + "\n", 0o644)]

    def stage(self, layout: Layout) -> bool:
        """Write what is missing or different. Returns whether anything was written."""
        changed = False
        if self.info["code"] is not None:
            lib, target = layout.releases / self.name / "lib", f"../../code/{self.info['code']}/lib"
            if not lib.is_symlink() or os.readlink(lib) != target:
                fs.make_dir(lib.parent)
                fs.symlink_atomic(lib, target)
                changed = True
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
    """release.json of a staged release; empty if it does not exist."""
    try:
        info = json.loads((layout.releases / name / "release.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _name_of(info: dict[str, Any], wrapper: str) -> str:
    content = json.dumps([info, wrapper], sort_keys=True).encode()
    return f"{info['atoll']}-{hashlib.sha256(content).hexdigest()[:12]}"


def is_as_made(layout: Layout, name: str, info: dict[str, Any]) -> bool:
    """Whether the files of a release match its name, and start the code tree that it names."""
    home = layout.releases / name
    try:
        wrapper = fs.read_regular(home / "bin/atoll", 1 << 16)[0].decode()
        starts = (wrapper, os.readlink(home / "lib")) if info.get("code") is not None else None
        if starts not in (None, (_TREE_WRAPPER, f"../../code/{info['code']}/lib")):
            return False
        return _name_of({key: value for key, value in info.items() if key != "release"}, wrapper) == name
    except (OSError, ValueError, KeyError):
        return False


def bundles_of(info: dict[str, Any]) -> list[dict[str, Any]]:
    """The models of a release, one entry each. release.json of version 0.1 had one model without an instance name."""
    found = info.get("bundles") or [info["bundle"]] if info.get("bundle") else []
    return [{**facts, "instance": facts.get("instance", facts["name"])} for facts in found]


def prune_code(layout: Layout, kept: set[str]) -> int:
    """Remove unpacked code that none of the `kept` releases runs. Returns the bytes freed."""
    trees = {read_info(layout, name).get("code") for name in kept}
    return code_tree.prune(layout, {tree for tree in trees if tree})


def plan_code(layout: Layout) -> tuple[Path, int] | None:
    """Where the running code lies, or will lie after a dry run, and its bytes; None for a checkout."""
    tree = code_tree.code_tree()
    return (layout.code / tree.name, int(code_tree.read_facts(tree)["bytes"])) if tree is not None else None


def raise_runtime_sequence(layout: Layout) -> None:
    """Remember the sequence of the code that installs: from now on install.sh refuses an older medium."""
    tree = code_tree.code_tree()
    if tree is not None:
        raise_sequence(layout, code_tree.SEQUENCE_NAME, code_tree.read_facts(tree)["sequence"])
