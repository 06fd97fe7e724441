"""The two programs of a medium, joined from their parts: install.sh and setup_release.py.

Each is a single file, because a server checks it in memory before it runs it and has no package to import from yet.
Parts are ordinary modules of offline_bundle, so the installed Atoll applies the same rules with the same code.
"""

from importlib.resources import files
from pathlib import Path

# Below offline_bundle, in the order in which they are joined: a name must be defined before a module's body uses it.
INSTALL_SH = (
    # language
    "medium/korean.py", "medium/language.py",
    # the rules of a bundle, which Atoll itself applies as well
    "limits.py", "errors.py", "names.py", "progress.py", "parallel.py", "untrusted_dir.py",
    "signing/strict_json.py", "signing/signature_format.py",
    # what stands in for the cryptography package
    "medium/p256.py",
    # trust: where a file comes from, which keys were revoked, fingerprints as words
    "on_medium.py", "signing/revoked_keys.py", "signing/hash_words.py",
    # the steps of install.sh
    "medium/install_sh/terminal.py",       # messages and progress
    "medium/install_sh/arguments.py",      # the command line
    "medium/install_sh/trusted_key.py",    # 1. which key the operator trusts
    "medium/install_sh/signature.py",      # 2. the signature, bundle.json, the set of files
    "medium/install_sh/server.py",         # 3. whether this server is what the medium was made for
    "medium/install_sh/private_copy.py",   # 4. a private copy, hashed while it is written
    "medium/install_sh/main.py",           # 5. run setup_release.py from the copy; and the order of all this
)  # fmt: skip
SETUP_RELEASE = (
    "medium/code_tree/tools.py",
    "medium/code_tree/bytecode.py",
    "medium/code_tree/packages.py",        # 1. unpack the wheels, compile
    "medium/code_tree/contents.py",        # 2. launcher, documents, list of files
    "medium/code_tree/check.py",           # compare a tree with what was signed
    "medium/code_tree/setup_release.py",   # the order of all this; hand over to `atoll install`
)
_OWN_IMPORT = "from offline_bundle."


def install_script() -> bytes:
    """install.sh: its shell part (install.sh.in) around the Python parts."""
    return medium_file("install_sh/install.sh.in").replace(b"@PYTHON@\n", _joined(INSTALL_SH, "install.sh"))


def setup_script() -> bytes:
    """setup_release.py, which install.sh loads from the verified copy."""
    return _joined(SETUP_RELEASE, "setup_release.py")


def medium_file(name: str) -> bytes:
    """A file of this package."""
    return (files("offline_bundle.medium") / name).read_bytes()


def part_paths() -> list[Path]:
    """The source files of both programs, for what looks into them (the catalogue of texts, tests)."""
    return [Path(str(files("offline_bundle") / part)) for part in (*INSTALL_SH, *SETUP_RELEASE)]


def _joined(parts: tuple[str, ...], whole: str) -> bytes:
    """The parts one after another, without their imports of one another."""
    texts = []
    for part in parts:
        text = (files("offline_bundle") / part).read_text("utf-8")
        while _OWN_IMPORT in text:
            start = text.index(_OWN_IMPORT)
            line_end = text.index("\n", start)
            end = text.index(")\n", start) + 2 if text[start:line_end].endswith("(") else line_end + 1
            text = text[:start] + text[end:]
        texts.append(text)
    joined = "\n\n".join(texts)
    compile(joined, whole, "exec")
    return joined.encode()
