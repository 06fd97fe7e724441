"""Unpack the packages of a release from the verified wheels into lib/, and compile them. A part of setup_release.py."""

import os
import shutil
import zipfile

from offline_bundle.medium.code_tree.bytecode import make_bytecode
from offline_bundle.medium.code_tree.tools import free, processors, python, run_all, t, tag, write

MAX_PIPS = 4  # with more, the disk becomes the limit
SHARE = 4 << 20  # bytes of wheels that a second pip is worth: each takes most of a second to start

# Only needed to compile against the packages, which no server does; half of all files.
BUILD_ONLY = ("lib/bin", "lib/torch/include")
# Of packages above this size (in bytes of the wheel), a dry run or preflight only unpacks the metadata: PyTorch takes
# most of the time and space of an install, and neither of them imports it.
LARGE_WHEEL = 16 << 20
METADATA_MODULES = ("torch/__init__.py", "torch/version.py")


def install_packages(facts, partial, progress_of, refused):
    """Run pip from its own verified wheel, into lib/, without an index: only files with a hash in the signed list.

    Several pips run at once, each with its share of the packages, because one core decompresses gigabytes slowly.
    """
    incoming, manifest = facts["incoming"], facts["manifest"]
    pip = next(f["path"] for f in manifest["files"] if f["role"] == "tool")
    shares, commands = _shares(facts), []
    for number, lines in enumerate(shares):
        os.makedirs(_temporary(partial, number), 0o700)  # on the same disk: pip moves from here, it need not copy
        write(partial, f"tmp/{number}.txt", "".join(lines))
        commands.append(python(
            os.path.join(incoming, pip, "pip"), "install", "--quiet", "--no-index", "--require-hashes", "--no-deps",
            "--only-binary", ":all:", "--find-links", os.path.join(incoming, "wheels"),
            "--requirement", os.path.join(partial, f"tmp/{number}.txt"),
            "--target", os.path.join(partial, "tmp", f"lib-{number}"),
            "--no-compile", "--no-cache-dir", "--no-input", "--disable-pip-version-check",
            "--root-user-action", "ignore",
        ))  # fmt: skip
    before = free(partial)  # a rough measure of progress; counting twenty thousand files would cost more
    progress = progress_of(t("Unpacking packages"), manifest["requires"]["unpacked_bytes"])
    where = [_temporary(partial, number) for number in range(len(shares))]
    run_all(commands, where, t("unpack the packages"), refused, lambda: progress.at(before - free(partial)))
    for number in range(len(shares)):
        _merge(os.path.join(partial, "tmp", f"lib-{number}"), os.path.join(partial, "lib"))
    shutil.rmtree(os.path.join(partial, "tmp"))
    for unused in BUILD_ONLY:
        shutil.rmtree(os.path.join(partial, unused), ignore_errors=True)
    progress.end(t("Unpacked all packages, each by its signed hash, without a package index."))


def unpack_for_dry_run(facts, final):
    """Unpack only what `atoll` needs to plan an install or to check the server."""
    incoming, manifest = facts["incoming"], facts["manifest"]
    with open(os.path.join(incoming, "requirements", f"{tag()}.txt"), encoding="ascii") as file:
        wanted = {line.rpartition("sha256:")[2].strip() for line in file}
    for entry in manifest["files"]:
        if entry["path"].startswith("wheels/") and entry["sha256"] in wanted:
            with zipfile.ZipFile(os.path.join(incoming, entry["path"])) as wheel:
                names = wheel.namelist()
                if entry["size"] > LARGE_WHEEL:
                    names = [name for name in names if ".dist-info/" in name or name in METADATA_MODULES]
                wheel.extractall(os.path.join(final, "lib"), names)


def compile_all(partial, final):
    """Write the bytecode of all packages now: starts are quick, and nothing is ever written into the tree later."""
    found = (os.path.join(where, name) for where, _, names in os.walk(os.path.join(partial, "lib")) for name in names)
    make_bytecode(partial, final, sorted(os.path.relpath(path, partial) for path in found if path.endswith(".py")))


def _temporary(partial, number):
    return os.path.join(partial, "tmp", str(number))


def _shares(facts):
    """The lines of the signed list of requirements, in about equal parts by the size of the wheels."""
    sizes = {f["sha256"]: f["size"] for f in facts["manifest"]["files"]}

    def size(line):
        return sizes.get(line.rpartition("sha256:")[2].strip(), 0)

    with open(os.path.join(facts["incoming"], "requirements", f"{tag()}.txt"), encoding="ascii") as file:
        lines = sorted(file, key=size, reverse=True)
    total = sum(map(size, lines))
    shares = [[0, []] for _ in range(min(processors(), MAX_PIPS, len(lines), 1 + total // SHARE))]
    for line in lines:
        least = min(shares, key=lambda share: share[0])
        least[0] += size(line)
        least[1].append(line)
    return [lines for _, lines in shares]


def _merge(source, target):
    """Move everything of `source` into `target`; both are on one disk, so nothing is copied."""
    os.makedirs(target, 0o755, exist_ok=True)
    for entry in os.scandir(source):
        goal = os.path.join(target, entry.name)
        if entry.is_dir(follow_symlinks=False) and os.path.isdir(goal):
            _merge(entry.path, goal)
        else:
            os.replace(entry.path, goal)
