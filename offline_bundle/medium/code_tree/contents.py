"""The rest of a release's tree: launcher, documents, key, and the list of all files with their hashes.

A part of setup_release.py.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from offline_bundle.medium.code_tree.packages import BUILD_ONLY
from offline_bundle.medium.code_tree.tools import BUG, CONTENT, environment, processors, python, quoted, t, tag, write

LAUNCHER = """\
#!/bin/sh
# Starts this release: its own packages, the server's Python, no user's packages, no model hub, no bytecode written.
unset PYTHONHOME PYTHONPATH PYTHONSTARTUP PYTHONINSPECT
export PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
exec {python} -I -S -B {start} "$@"
"""

START = """\
import os
import sys

tree = os.path.dirname(os.path.realpath(__file__))
lib = os.path.join(tree, "lib")
kernels = os.path.join(tree, "share", "kernels")
sys.path.insert(0, lib)
if os.path.isdir(kernels):
    os.environ.setdefault("ATOLL_PREBUILT_KERNELS", kernels)  # compiled from this very code; empty: not used
os.environ["PYTHONPATH"] = lib  # for the processes that this one starts
sys.argv[0] = "atoll"
if "verify" in sys.argv[1:]:
    sys.pycache_prefix = os.devnull  # what checks the bytecode does not run it

from appliance.cli import main  # noqa: E402

if __name__ == "__main__":  # processes that multiprocessing starts import this file again
    main()
"""


def add_rest(facts, partial, final):
    """Add the launcher, the documents, the kernels, the signed manifest, and the key if it is new."""
    incoming = facts["incoming"]
    for name in ("docs", "licenses", "sbom", "units", "setup", "requirements"):
        if os.path.isdir(os.path.join(incoming, name)):
            shutil.copytree(os.path.join(incoming, name), os.path.join(partial, "share", name))
    if os.path.isdir(os.path.join(incoming, "kernels")) and not facts["dry_run"]:  # which starts no engine
        os.makedirs(os.path.join(partial, "share"), 0o755, exist_ok=True)
        os.rename(os.path.join(incoming, "kernels"), os.path.join(partial, "share", "kernels"))
    for name in ("bundle.json", "model.sig"):
        shutil.copyfile(os.path.join(incoming, name), os.path.join(partial, "share", name))
    paths = {"python": quoted(os.path.realpath(sys.executable)), "start": quoted(os.path.join(final, "start.py"))}
    write(partial, "start.py", START)
    write(partial, "bin/atoll", LAUNCHER.format(**paths))
    if facts["key"]["new"]:
        write(partial, f"trust/{facts['key']['fingerprint'][:16]}.pub", facts["key"]["pem"].decode())


def check_start(partial, version, refused):
    """Check that the packages load and report the version that was signed."""
    command = python(os.path.join(partial, "start.py"), "--version")
    done = subprocess.run(command, env=environment(partial), capture_output=True, text=True, check=False)
    if done.returncode or done.stdout.strip() != version:
        tail = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise refused(
            BUG,
            t("The unpacked code does not start: {names}", names=" / ".join(tail)),
            t("Tell the vendor; nothing was changed."),
        )


def describe(facts, partial, final, refused):
    """Write files.json and runtime.json, and make every file readable by all and writable by none.

    What pip unpacked must be what the vendor found in the same wheels, file by file. Bytecode is not listed: a check
    recomputes it from the sources (bytecode.py).
    """
    paths = [os.path.join(directory, name) for directory, _, names in os.walk(partial) for name in names]
    paths = [path for path in paths if not os.path.islink(path)]

    def entry(path):
        relative = os.path.relpath(path, partial)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            info = os.fstat(file.fileno())
            os.fchmod(file.fileno(), 0o555 if info.st_mode & 0o100 else 0o444)  # Triton's assembler is a program
            return relative, {"sha256": digest, "size": info.st_size}

    with ThreadPoolExecutor(min(processors(), 8)) as pool:
        files = dict(pool.map(entry, paths))
    with open(os.path.join(facts["incoming"], "requirements", f"{tag()}.json"), "rb") as file:
        signed = json.loads(file.read())["files"]
    for path, expected in signed.items():
        if files.get(f"lib/{path}") != expected and not f"lib/{path}".startswith(BUILD_ONLY):
            raise refused(
                CONTENT,
                t("lib/{path} is not what the vendor signed.", path=path),
                t("Check the disk (dmesg), then run again."),
            )
    size = sum(f["size"] for f in files.values())
    files = {path: files[path] for path in sorted(files) if not path.endswith(".pyc")}
    listing = json.dumps({"files": files}, indent=0) + "\n"
    runtime = _facts_of(facts, final, size + len(listing))
    write(partial, "files.json", listing, 0o444)
    write(partial, "runtime.json", json.dumps(runtime, indent=2) + "\n", 0o444)
    for directory, _, _ in os.walk(partial, topdown=False):
        os.chmod(directory, 0o755)  # noqa: S103  everybody may read it


def describe_for_dry_run(facts, final):
    """Write runtime.json only: the tree is removed after the dry run."""
    size = facts["manifest"]["requires"]["unpacked_bytes"]
    write(final, "runtime.json", json.dumps(_facts_of(facts, final, size), indent=2) + "\n")


def _facts_of(facts, final, size):
    """The content of runtime.json, which identifies a tree."""
    manifest = facts["manifest"]
    with open(os.path.join(facts["incoming"], "bundle.json"), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    runtime = {name: manifest[name] for name in ("name", "version", "sequence", "created", "requires")}
    runtime |= {"schema_version": 1, "digest": digest, "key_fingerprint": facts["key"]["fingerprint"]}
    runtime |= {"abi": tag(), "python": os.path.realpath(sys.executable), "compiled_by": platform.python_version()}
    return runtime | {"place": final, "bytes": size}

