"""The code that travels on a medium, as install.sh unpacks it: opt/atoll/code/<version>-<12 hex>, never changed later.

    bin/atoll  start.py  lib/  share/{docs,licenses,setup,...}  runtime.json (what it is)  files.json (every hash)

Releases point into such a tree. Code that runs from a checkout has none, and every function here then says so.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from installer import fs
from installer.errors import ExitCode, InstallError
from installer.i18n import t
from installer.layout import Layout
from installer.service import code_root

SEQUENCE_NAME = "runtime/atoll"  # no bundle of a model can be called so


def code_tree() -> Path | None:
    """The tree that the running code comes from; None for a checkout or an ordinary site-packages."""
    root = code_root()
    return root.parent if root.name == "lib" and (root.parent / "runtime.json").is_file() else None


def read_facts(tree: Path) -> dict[str, Any]:
    """runtime.json: name, version, sequence, digest, key_fingerprint, requires, python, bytes."""
    try:
        facts = json.loads((tree / "runtime.json").read_bytes())
        if isinstance(facts, dict) and isinstance(facts["sequence"], int):
            return facts
        raise ValueError
    except (OSError, ValueError, KeyError) as error:
        raise InstallError(
            t("{tree} is not a whole release of Atoll.", tree=tree),
            exit_code=ExitCode.IO,
            why=t("Its runtime.json is missing or damaged."),
            hint=t("Install it again from the medium: sudo sh install.sh"),
        ) from error


def runtime_facts(tree: Path) -> dict[str, Any]:
    """What release.json says about the code."""
    facts = read_facts(tree)
    return {name: facts[name] for name in ("name", "version", "sequence", "digest", "key_fingerprint")}


def upgrade_command(medium: Path, layout: Layout) -> list[str] | None:
    """How to install from a medium with the install.sh that is here already: what the disk carries is not asked.

    None for a checkout, which has no install.sh to trust.
    """
    tree = code_tree()
    if tree is None:
        return None
    where = ["--prefix", str(layout.prefix)] if layout.prefix != Path("/") else []
    return ["/bin/sh", str(tree / "share/setup/install.sh"), "--medium", str(medium.resolve()), *where]


def prune(layout: Layout, kept: Iterable[str]) -> int:
    """Remove the trees that are not among `kept` (their names), and what killed installs left; the bytes freed.

    Does nothing while install.sh works there.
    """
    running = code_tree()
    names = {*kept, *([running.name] if running is not None else [])}
    if not layout.code.is_dir():
        return 0
    freed, fd = 0, os.open(layout.code, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for entry in sorted(layout.code.iterdir()):
            if entry.name not in names:
                freed += fs.tree_size(entry)
                fs.remove_tree(layout.prefix, entry)
    except BlockingIOError:
        return 0
    finally:
        os.close(fd)
    return freed


def verify_code(tree: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """Hash every file of a tree again; the paths that differ, are missing, or do not belong there.

    `progress(done, total)` is told in bytes. files.json lies on the same disk, so the packages are also held against
    the list that the vendor signed (share/requirements, by its hash in share/bundle.json, whose signature is the
    caller's to check); bytecode, which was made here, is in files.json alone.
    """
    try:
        listed: dict[str, dict[str, Any]] = json.loads((tree / "files.json").read_bytes())["files"]
        signed = _signed_list(tree)
    except (OSError, ValueError, KeyError, TypeError):
        return ["files.json"]
    wrong = [f"lib/{path}" for path, entry in signed.items() if listed.get(f"lib/{path}", entry) != entry]
    wrong += [path for path in listed if _is_code(path) and path.removeprefix("lib/") not in signed]
    seen, done = set(), 0
    total = sum(entry["size"] for entry in listed.values())
    for directory, names, files in os.walk(tree):
        here = Path(directory)
        for name in [*files, *(n for n in names if (here / n).is_symlink())]:
            path = here / name
            relative = path.relative_to(tree).as_posix()
            if relative in ("files.json", "runtime.json"):
                continue
            seen.add(relative)
            entry = listed.get(relative)
            if entry is None or not _holds(path, entry):
                wrong.append(relative)
            done += entry["size"] if entry else 0
            progress(min(done, total), total)
    return sorted({*wrong, *(listed.keys() - seen)})


def _signed_list(tree: Path) -> dict[str, dict[str, Any]]:
    """What the vendor found in the wheels: path below lib -> SHA-256 and size. Raises ValueError if it was changed."""
    path = f"requirements/{read_facts(tree)['abi']}.json"
    text = (tree / "share" / path).read_bytes()
    entries = json.loads((tree / "share/bundle.json").read_bytes())["files"]
    if [e["sha256"] for e in entries if e["path"] == path] != [hashlib.sha256(text).hexdigest()]:
        raise ValueError(path)
    return json.loads(text)["files"]


def _is_code(path: str) -> bool:
    """A file of a package that came with it: not bytecode made here, and not pip's notes."""
    notes = (".dist-info/RECORD", ".dist-info/INSTALLER", ".dist-info/REQUESTED")
    return path.startswith("lib/") and "/__pycache__/" not in path and not path.endswith(notes)


def _holds(path: Path, entry: dict[str, Any]) -> bool:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return os.fstat(file.fileno()).st_size == entry["size"] and digest == entry["sha256"]
    except OSError:
        return False
