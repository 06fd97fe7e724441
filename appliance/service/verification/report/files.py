"""Writes the files of a report, each completely or not at all, and records their hashes in the audit log."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from appliance.service.verification.report.html import page
from appliance.service.verification.report.markdown import text_of
from appliance.service.verification.run import Verification
from installer.audit import log
from installer.base import fs
from installer.base.layout import Layout


@dataclass(frozen=True, slots=True)
class Written:
    """File name → SHA-256, in `directory`."""

    directory: Path
    files: dict[str, str]

    @property
    def html(self) -> Path:
        return self.directory / next(name for name in self.files if name.endswith(".html"))


def write(found: Verification, directory: Path, *, layout: Layout | None = None, mode: int = 0o600) -> Written:
    """Raises OSError; none of the written files is incomplete then. `layout`: the installation whose audit log records
    them."""
    name = "verification-" + found.at.replace(":", "").replace("-", "")
    texts = {
        f"{name}.json": json.dumps({"passed": found.passed, **found.model_dump(mode="json")}, ensure_ascii=False,
                                   indent=1) + "\n",
        f"{name}.en.md": text_of(found, "en"),
        f"{name}.ko.md": text_of(found, "ko"),
        f"{name}.html": page(found),
    }  # fmt: skip
    if not directory.is_dir():
        fs.make_dir(directory, 0o700)
    hashes = {}
    for file, text in texts.items():
        fs.write_atomic(directory / file, text, mode)
        hashes[file] = hashlib.sha256(text.encode()).hexdigest()
    if layout is not None and layout.state.is_dir():
        log.append(layout.audit, "verification", passed=found.passed, release=found.release, directory=str(directory),
                   sha256=hashes)  # fmt: skip
    return Written(directory, hashes)
