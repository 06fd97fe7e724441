"""The programs of a medium, put together from the parts in offline_bundle/medium: install.sh and setup_release.py.

Each is one file on the medium, since a server checks it in memory before it runs it, and has nothing to import from.
"""

from importlib.resources import files

_INSTALL = (
    "korean.py", "words.py", "p256.py", "hash_words.py", "place.py", "revoked.py", "check.py", "arguments.py",
    "trust.py", "begin.py",
)  # fmt: skip
_SETUP = (
    "tree_tools.py", "bytecode.py", "tree_packages.py", "tree_contents.py", "tree_check.py", "setup_release.py",
)  # fmt: skip
_IMPORT = "from offline_bundle.medium."


def install_script() -> bytes:
    """install.sh: the shell part around the Python parts."""
    return medium_file("install.sh.in").replace(b"@PYTHON@\n", _joined(_INSTALL, "install.sh"))


def setup_script() -> bytes:
    """setup_release.py, which install.sh loads from the verified copy."""
    return _joined(_SETUP, "setup_release.py")


def medium_file(name: str) -> bytes:
    """One of the parts, or of the texts beside them."""
    return (files("offline_bundle.medium") / name).read_bytes()


def _joined(names: tuple[str, ...], whole: str) -> bytes:
    """The parts one after another, without their imports of one another."""
    parts = []
    for name in names:
        text = medium_file(name).decode()
        while _IMPORT in text:
            start = text.index(_IMPORT)
            line_end = text.index("\n", start)
            end = text.index(")\n", start) + 2 if text[start:line_end].endswith("(") else line_end + 1
            text = text[:start] + text[end:]
        parts.append(text)
    joined = "\n\n".join(parts)
    compile(joined, whole, "exec")
    return joined.encode()
