"""The code that travels on a medium, as install.sh unpacks it: opt/atoll/code/<version>-<12 hex>, never changed later.

    bin/atoll  start.py  lib/  share/{docs,licenses,setup,...}  runtime.json (what it is)  files.json

Releases point into such a tree. Code that runs from a checkout has none, and every function here then says so.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.base.layout import Layout, code_root
from offline_bundle.medium.code_tree.bytecode import bytecode_path, make_bytecode
from offline_bundle.medium.code_tree.check import check_tree
from offline_bundle.medium.code_tree.tools import tag

SEQUENCE_NAME = "runtime/atoll"  # no model bundle can have this name


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
            t("{tree} is not a complete release of Atoll.", tree=tree),
            exit_code=ExitCode.IO,
            why=t("Its runtime.json is missing or damaged."),
            hint=t("Install it again from the medium: sudo sh install.sh"),
        ) from error


def runtime_facts(tree: Path) -> dict[str, Any]:
    """What release.json says about the code."""
    facts = read_facts(tree)
    return {name: facts[name] for name in ("name", "version", "sequence", "digest", "key_fingerprint")}


def upgrade_command(medium: Path, layout: Layout) -> list[str] | None:
    """How to install from a medium with the install.sh that is already installed: the one on the disk is not trusted.
    None for a checkout, which has no install.sh."""
    tree = code_tree()
    if tree is None:
        return None
    where = ["--prefix", str(layout.prefix)] if layout.prefix != Path("/") else []
    return ["/bin/sh", str(tree / "share/setup/install.sh"), "--medium", str(medium.resolve()), *where]


def prune(layout: Layout, kept: Iterable[str]) -> int:
    """Remove code trees whose names are not in `kept`, and leftovers of killed installs. Returns the bytes freed.

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
    """Compare every file of a tree with what the vendor signed. Returns the paths that differ, are missing, or do not
    belong.

    The caller has verified the signature over share/bundle.json, whose digest runtime.json repeats. Bytecode is
    compiled again from the verified sources and compared. `progress(done, total)` counts bytes.
    """
    facts = read_facts(tree)
    return check_tree(str(tree), facts.get("abi"), facts.get("digest"), progress)


def rebuild_bytecode(tree: Path) -> int:
    """Compile a tree's bytecode again from its sources, which must all be as signed. Returns how many files differed.

    Raises InstallError: the sources differ, or another Python is needed (11).
    """
    facts = read_facts(tree)
    if facts.get("abi") != tag():
        raise InstallError(
            t("The code in {tree} is for another version of Python.", tree=tree),
            exit_code=ExitCode.CONTENT_MISMATCH, changed=t("Nothing was changed."),
            hint=t("Install it again from the medium: sudo sh install.sh"),
        )
    wrong = verify_code(tree)
    others = [path for path in wrong if not is_bytecode(path)]
    if others:
        raise InstallError(
            t("Bytecode is compiled from the sources, and those of {tree} differ: {names}.", tree=tree,
              names=joined(others[:3])),
            exit_code=ExitCode.CONTENT_MISMATCH, changed=t("Nothing was changed."),
            hint=t("Install it again from the medium: sudo sh install.sh"),
        )
    sources = {bytecode_path(path.relative_to(tree).as_posix()): path.relative_to(tree).as_posix()
               for path in sorted((tree / "lib").rglob("*.py"))}
    for path in wrong:
        fs.remove_file(tree / path)
    lacking = [source for compiled, source in sources.items() if not (tree / compiled).is_file()]
    make_bytecode(str(tree), facts["place"], lacking)
    os.sync()
    return len(wrong)


def is_bytecode(path: str) -> bool:
    """Whether the import system takes this path of a tree for bytecode."""
    return path.endswith((".pyc", ".pyc.partial"))
