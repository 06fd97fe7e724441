"""Compare every file of a release's tree with what its vendor signed. A part of setup_release.py.

    lib/           the list of the wheels' contents (share/requirements/<abi>.json), whose hash is in bundle.json
    lib/*.pyc      made again from the verified sources and compared
    share/         bundle.json itself
    start.py       the text in share/setup/setup_release.py; bin/atoll the same, with this server's Python
    trust/*.pub    their names are their fingerprints
    pip's notes    only files.json, which nobody signed: no Python imports them
"""

import ast
import hashlib
import json
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor

from offline_bundle.medium.code_tree.bytecode import bytecode_path, differing_bytecode
from offline_bundle.medium.code_tree.packages import BUILD_ONLY
from offline_bundle.medium.code_tree.tools import processors, quoted, tag

UNSIGNED = ("files.json", "runtime.json")  # describe the tree for its user; no check relies on them
SHARED = ("docs/", "licenses/", "sbom/", "units/", "setup/", "requirements/", "kernels/")
MAX_LISTING = 64 << 20
_NOTES = re.compile(r"lib/[^/]+\.dist-info/(RECORD|INSTALLER|REQUESTED)\Z")
_KEY = re.compile(r"trust/([0-9a-f]{16})\.pub\Z")
_SETUP = "share/setup/setup_release.py"


def check_tree(tree, abi, digest, progress=lambda done, total: None):
    """Paths below `tree` that differ, are missing, or do not belong there; sorted.

    `digest` is the SHA-256 of the bundle.json whose signature the caller has verified. `abi` ("cp311") selects the list
    of packages that was installed; bytecode of another Python than this one is skipped. `progress(done, total)` counts
    bytes. Raises OSError if the disk cannot be read.
    """
    try:
        signed, (place, python) = _signed_files(tree, abi, digest), _place_of(tree)
    except _Differs as e:
        return [str(e)]
    listed = _listed_files(tree)
    there, wrong = _files_of(tree)
    wrong |= {path for path in signed if path not in there and not path.startswith(BUILD_ONLY)}
    cached = {bytecode_path(path): path for path in signed if path.startswith("lib/") and path.endswith(".py")}
    if abi != tag():  # made by another Python, so it cannot be recomputed here
        there = {path for path in there if not path.endswith(f".cpython-{abi.removeprefix('cp')}.pyc")}
    expected = {}
    for path in there:
        entry = signed.get(path) or (listed.get(path) if _NOTES.match(path) else None)
        if entry is not None:
            expected[path] = entry
        elif not (path in UNSIGNED or path in cached or _KEY.match(path)) and path not in ("start.py", "bin/atoll"):
            wrong.add(path)
    modules = {path: signed[path]["sha256"] for compiled, path in cached.items() if compiled in there}
    sizes = [entry["size"] for entry in expected.values()] + [signed[path]["size"] for path in modules]
    total, done = sum(sizes), 0

    def told(count):
        nonlocal done
        done = min(done + count, total)
        progress(done, total)

    with ThreadPoolExecutor(min(processors(), 8)) as pool:
        paths = sorted(expected, key=lambda path: -expected[path]["size"])
        for path, good in zip(paths, pool.map(lambda p: _is(os.path.join(tree, p), expected[p]), paths), strict=True):
            told(expected[path]["size"])
            if not good:
                wrong.add(path)
    average = sum(signed[path]["size"] for path in modules) // max(len(modules), 1)
    sound = {path: sha256 for path, sha256 in modules.items() if path not in wrong and path in there}
    wrong |= {bytecode_path(path) for path in modules.keys() - sound.keys()}  # bytecode of a changed source
    wrong.update(differing_bytecode(tree, place, sound, lambda count: told(count * average)))
    wrong |= _odd_launchers(tree, place, python)
    wrong |= {path for path in there if (key := _KEY.match(path)) and _hash(os.path.join(tree, path))[:16] != key[1]}
    return sorted(wrong)


class _Differs(ValueError):
    """The file named by the first argument is not what was signed, so its content must not be used."""


def _signed_files(tree, abi, digest):
    """path -> SHA-256 and size of every file of the tree that the signature covers."""
    name = "share/bundle.json"
    try:
        text = _read(os.path.join(tree, name))
        if hashlib.sha256(text).hexdigest() != digest:
            raise _Differs(name)
        entries = {e["path"]: {"sha256": e["sha256"], "size": e["size"]} for e in json.loads(text)["files"]}
        name = f"share/requirements/{abi}.json"
        text = _read(os.path.join(tree, name))
        if hashlib.sha256(text).hexdigest() != entries[name.removeprefix("share/")]["sha256"]:
            raise _Differs(name)
        signed = {f"lib/{path}": entry for path, entry in json.loads(text)["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise _Differs(name) from e
    return signed | {f"share/{path}": entry for path, entry in entries.items() if path.startswith(SHARED)}


def _place_of(tree):
    """The path that the tree was made for (which must be this tree) and the Python that it was made for."""
    try:
        facts = json.loads(_read(os.path.join(tree, "runtime.json")))
        place, python = facts["place"], facts["python"]
        if not (isinstance(python, str) and os.path.samefile(place, tree)):
            raise ValueError(place)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise _Differs("runtime.json") from e
    return place, python


def _listed_files(tree):
    """Size and hash of pip's notes at install time, from files.json."""
    try:
        files = json.loads(_read(os.path.join(tree, "files.json")))["files"]
        return {p: {"sha256": str(e["sha256"]), "size": int(e["size"])} for p, e in files.items() if _NOTES.match(p)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _files_of(tree):
    """(regular files, everything else except directories), as paths below the tree."""
    regular, odd, signature = set(), set(), ("share/bundle.json", "share/model.sig")
    for where, names, files in os.walk(tree, onerror=_raise):
        for name in [*files, *names]:
            path = os.path.join(where, name)
            mode = os.lstat(path).st_mode
            relative = os.path.relpath(path, tree)
            if stat.S_ISREG(mode):
                regular.add(relative)
            elif not stat.S_ISDIR(mode):
                odd.add(relative)
    return regular - set(signature), odd


def _raise(error):
    raise error


def _odd_launchers(tree, place, python):
    """Those of start.py and bin/atoll that differ from what the signed setup program in this tree writes."""
    texts = {}
    try:
        for node in ast.parse(_read(os.path.join(tree, _SETUP))).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name in ("LAUNCHER", "START"):
                    texts[name] = ast.literal_eval(node.value)
        start = quoted(os.path.join(place, "start.py"))
        launcher = texts["LAUNCHER"].format(python=quoted(python), start=start)
        expected = {"bin/atoll": launcher, "start.py": texts["START"]}
    except (OSError, ValueError, KeyError, SyntaxError):
        return {_SETUP}
    return {path for path, text in expected.items() if not _same(os.path.join(tree, path), text.encode())}


def _same(path, content):
    try:
        return _read(path) == content
    except (OSError, ValueError):
        return False


def _is(path, entry):
    """Whether the regular file has this size and hash."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if os.fstat(file.fileno()).st_size != entry["size"]:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]
    except (OSError, KeyError, TypeError):
        return False


def _hash(path):
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path):
    """A regular file of at most MAX_LISTING bytes."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        data = file.read(MAX_LISTING + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    if len(data) > MAX_LISTING:
        raise ValueError(path)
    return data
