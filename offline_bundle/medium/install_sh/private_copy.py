"""Step 4 of install.sh: a private copy of the signed files, hashed while it is written.

Nothing is read twice from the medium: the code that runs later is the copy that was hashed, whatever the disk returns
by then.
"""

import contextlib
import hashlib
import os
import stat

from offline_bundle.errors import CONTENT, SPACE_IO
from offline_bundle.limits import MIB
from offline_bundle.medium.install_sh.terminal import COPY_AGAIN, ProgressLine, refused
from offline_bundle.medium.language import t
from offline_bundle.parallel import Reader, run, write_at
from offline_bundle.untrusted_dir import DIRECTORY, open_file, read_failed


def own_directory(path):
    """Create the directory `path` and open it; refuse one that others could write to."""
    os.makedirs(path, 0o755, exist_ok=True)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
        raise refused(
            SPACE_IO,
            t("{path} is a link, or other users may write to it.", path=path),
            t("Find out who created it: ls -ld {path}", path=path),
        )
    return os.open(path, DIRECTORY)


def missing_directories(path):
    """`path` and those of its parents that do not exist yet, the deepest first."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def remove_empty(directories):
    """Remove those of the directories that are empty."""
    for path in directories:
        with contextlib.suppress(OSError):
            os.rmdir(path)


def take_copy(root, signed, incoming, only=""):
    """The signed files (those whose path begins with `only`) in a private directory, hashed as they were written."""
    manifest, data, signature, _ = signed
    os.makedirs(incoming, 0o700, exist_ok=True)
    if os.lstat(incoming).st_uid != os.geteuid() or os.path.islink(incoming):
        raise refused(
            SPACE_IO, t("{incoming} belongs to another user.", incoming=incoming), t("Remove it and run again.")
        )
    os.chmod(incoming, 0o700)
    files = [f for f in manifest["files"] if f["path"].startswith(only)]
    progress = ProgressLine(t("Copying and checking"), sum(f["size"] for f in files))
    hash_all(root, files, progress, incoming)
    for name, content in (("bundle.json", data), ("model.sig", signature)):
        with open(os.path.join(incoming, name), "wb") as file:
            file.write(content)
    progress.end(t("Checked: {count} files, {total} MiB, each as it was signed.", count=len(files),
                   total=progress.total >> 20))


def hash_all(root, entries, progress, copy_to=None):
    """Hash every file; with `copy_to`, write it there as well, and the hash is of what was written."""
    reader = Reader(root)

    def work(entry, tick):
        hash_one(root, entry, os.path.join(copy_to, entry["path"]) if copy_to else None, reader, tick)

    run(
        sorted(entries, key=lambda entry: -entry["size"]), work, stage="copy",
        total=sum(entry["size"] for entry in entries), workers=reader.workers,
        progress=lambda stage, done, total: progress.at(done),
    )  # fmt: skip


def hash_one(root, entry, target, reader, tick):
    """Hash one file while copying it to `target`, if any. A copy that an earlier run left is hashed instead."""
    size = entry["size"]
    if target:
        os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
        if os.path.isfile(target) and not os.path.islink(target) and os.stat(target).st_size == size:
            with open(target, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]:
                    return tick(size)
    digest, at = hashlib.sha256(), 0
    with open_file(root, entry["path"]) as source:
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600) if target else -1
        try:
            while at <= size:  # a byte more than was signed shows that the file is longer
                view = reader.buffer(8 * MIB, size + 1 - at)
                try:
                    count = reader.read_into(source, view, at)
                except OSError as e:
                    raise read_failed(entry["path"], e) from None
                if not count:
                    break
                digest.update(view[:count])
                if target:
                    write_at(out, view[:count], at)
                at += count
                tick(count)
        finally:
            if target:
                os.close(out)
    if at != size or digest.hexdigest() != entry["sha256"]:
        if target:
            os.unlink(target)
        raise refused(CONTENT, t("{path} differs from what was signed.", path=entry["path"]), COPY_AGAIN)
    return None
