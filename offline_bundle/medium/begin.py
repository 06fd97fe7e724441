"""The last part of install.sh: what the server must have, and the order of things.

Runs as `python3 -I -S -B /dev/fd/3 PATH-OF-INSTALL.SH ARGUMENTS...`, with the other parts in front of it.
"""

import contextlib
import fcntl
import hashlib
import importlib.abc
import json
import os
import platform
import shutil
import signal
import stat
import sys
import tempfile
import types

from offline_bundle.medium.arguments import HELP, Options
from offline_bundle.medium.check import (
    BUSY,
    CONTENT,
    DIRECTORY,
    INTERRUPTED,
    MAX_MANIFEST,
    MAX_SIGNATURE,
    MAX_SMALL,
    MISSING,
    ODD,
    PREFLIGHT,
    REPLAY,
    SPACE_IO,
    UNTRUSTED,
    USAGE,
    Progress,
    Refused,
    check_file_set,
    copy_all,
    open_envelope,
    parse_manifest,
    read_small,
    say,
    show,
    signed_resources,
)
from offline_bundle.medium.place import lies_on
from offline_bundle.medium.trust import choose_key
from offline_bundle.medium.words import reason, t

LOOK_BYTES = 1 << 28  # what a dry run unpacks, beside the copy

# -- what the server must have ----------------------------------------------------------------------------------------


def check_server(requires):
    """This processor, this Python, this libc: told before gigabytes are copied."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    arch = platform.machine()
    if arch != requires["arch"]:
        raise Refused(
            PREFLIGHT,
            t("The medium is for {made}; this is {here}.", made=requires["arch"], here=arch),
            t("Ask for the other one."),
        )
    if here not in requires["python"]:
        made = ", ".join(requires["python"])
        raise Refused(
            PREFLIGHT,
            t("The medium is for Python {made}; {executable} is Python {here}.", made=made, executable=sys.executable,
              here=here),
            t("Name another one with --python DIR, or have the medium built for this one."),
        )
    libc, version = platform.libc_ver()
    have = tuple(int(part) for part in version.split(".")[:2]) if libc == "glibc" else (0, 0)
    if have < tuple(int(part) for part in requires["glibc"].split(".")):
        raise Refused(
            PREFLIGHT,
            t("The medium needs glibc {glibc} or newer; this one has {version}.", glibc=requires["glibc"],
              version=version or t("another libc")),
            t("Use a newer release of the distribution (Debian 12, Ubuntu 22.04, RHEL 9 or newer)."),
        )


def check_sequence(options, manifest):
    """No older runtime than the one that runs here or ever did."""
    known = 0
    for path, dig in (
        ("var/lib/atoll/state/sequence.json", lambda d: d["sequences"].get("runtime/atoll", 0)),
        ("opt/atoll/current/lib/../runtime.json", lambda d: d["sequence"]),
    ):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                with open(os.path.join(options.root, path), "rb") as file:
                    known = max(known, dig(json.loads(file.read(MAX_SMALL))))
            except (ValueError, KeyError, TypeError, AttributeError, PermissionError) as e:
                raise Refused(
                    SPACE_IO,
                    t("/{path} cannot be read: {why}.", path=path, why=show(e)),
                    t("Restore it, or run as root."),
                ) from None
    if manifest["sequence"] < known and not options.last("--allow-downgrade"):
        raise Refused(
            REPLAY,
            t("This runtime has sequence {sequence}, but {known} was installed here already: it is older.",
              sequence=manifest["sequence"], known=known),
            t("Use the newest medium. To go back: atoll rollback. To insist: --allow-downgrade 'the reason'"),
        )


def check_interpreter(medium):
    """Refuse a Python from the medium. install.sh has looked before it started this one; this also sees hard links,
    other partitions of the disk, and images on it."""
    for path in (sys.executable, getattr(os, "__file__", "")):
        if path and lies_on(path, medium):
            raise Refused(
                UNTRUSTED,
                t("The Python {path} lies on the medium {medium}: whoever changed the medium could have changed it "
                  "too.", path=show(path), medium=show(medium)),
                t("Use the server's own python3, or another one that came by another way: --python DIR"),
            )


# -- the order of things ----------------------------------------------------------------------------------------------


def verify_signature(root, options):
    """(manifest, its bytes, digest, key) once signature and bundle.json hold."""
    try:
        signature = read_small(root, "model.sig", MAX_SIGNATURE)
    except Refused as e:
        if e.code == SPACE_IO:
            raise
        raise Refused(
            UNTRUSTED, t("There is no usable signature: {message}", message=e.message), t("Get the medium again.")
        ) from None
    claimed, payload, raw = open_envelope(signature)
    point, text, fingerprint, now = choose_key(options, claimed)
    resources = signed_resources(payload, raw, point)
    data = read_small(root, "bundle.json", MAX_MANIFEST)
    digest = hashlib.sha256(data).hexdigest()
    if resources.pop("bundle.json", None) != digest:
        raise Refused(CONTENT, t("runtime/bundle.json is not the file that was signed."), ODD)
    manifest = parse_manifest(data, resources)
    sizes = {f["path"]: f["size"] for f in manifest["files"]}
    check_file_set(root, {**sizes, "bundle.json": len(data), "model.sig": len(signature)})
    return manifest, data, signature, {"fingerprint": fingerprint, "pem": text, "new": now}


def check_space(where, need):
    """`need` bytes are free at `where`, or at its nearest parent that is there."""
    while not os.path.isdir(where):
        where = os.path.dirname(where)
    info = os.statvfs(where)
    if info.f_bavail * info.f_frsize < need:
        free = info.f_bavail * info.f_frsize >> 20
        message = t("{where} has {free} MiB free; the code takes {need} MiB while it is installed.", where=where,
                    free=free, need=need >> 20)
        raise Refused(SPACE_IO, message, t("Free some space (df -h), then run again."))


def own_directory(path):
    """Make `path`, refusing one that others could write to."""
    os.makedirs(path, 0o755, exist_ok=True)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
        raise Refused(
            SPACE_IO,
            t("{path} is a link, or others may write to it.", path=path),
            t("Look who made it: ls -ld {path}", path=path),
        )
    return os.open(path, DIRECTORY)


def missing_directories(path):
    """`path` and its parents that are not there yet, the deepest first."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def remove_empty(directories):
    """Take back the directories that hold nothing."""
    for path in directories:
        with contextlib.suppress(OSError):
            os.rmdir(path)


def take_copy(root, signed, incoming, only=""):
    """The signed files (whose path begins with `only`), hashed as they were written, in a private directory."""
    manifest, data, signature, _ = signed
    os.makedirs(incoming, 0o700, exist_ok=True)
    if os.lstat(incoming).st_uid != os.geteuid() or os.path.islink(incoming):
        raise Refused(
            SPACE_IO, t("{incoming} belongs to somebody else.", incoming=incoming), t("Remove it and run again.")
        )
    os.chmod(incoming, 0o700)
    files = [f for f in manifest["files"] if f["path"].startswith(only)]
    progress = Progress(t("Copying and checking"), sum(f["size"] for f in files))
    copy_all(root, files, lambda path: os.path.join(incoming, path), progress)
    for name, content in (("bundle.json", data), ("model.sig", signature)):
        with open(os.path.join(incoming, name), "wb") as file:
            file.write(content)
    progress.end(t("Checked: {count} files, {total} MiB, each as it was signed.", count=len(files),
                   total=progress.total >> 20))


class Checked(importlib.abc.InspectLoader):
    """Imports these very bytes: no file is opened again, and no cached bytecode is looked for."""

    def __init__(self, text):
        self.text = text

    def get_source(self, fullname):
        return self.text.decode("utf-8")


def load_setup(incoming, manifest):
    """setup_release.py as a module, from bytes that are hashed once more in memory."""
    path = "setup/setup_release.py"
    with open(os.path.join(incoming, path), "rb") as file:
        text = file.read()
    expected = next((f["sha256"] for f in manifest["files"] if f["path"] == path), None)
    if hashlib.sha256(text).hexdigest() != expected:
        raise Refused(CONTENT, t("{path} changed after it was checked.", path=path), ODD)
    loader = Checked(text)
    module = types.ModuleType("setup_release")
    loader.exec_module(module)
    module.__dict__["t"] = t  # it speaks the same language
    return module


def run(script, arguments):
    """Everything; returns the exit code, or becomes `atoll install`."""
    options = Options(script, arguments)
    if options.help:
        print(HELP, end="")
        return 0
    if not options.verify_only and options.prefix is None and os.geteuid() != 0:
        raise Refused(
            USAGE, t("Installing on the server needs root."), t("sudo sh install.sh, or --prefix DIR for a trial.")
        )
    check_interpreter(options.medium)
    try:
        root = os.open(os.path.join(options.medium, "runtime"), DIRECTORY)
    except OSError as e:
        message = t("There is no {medium}/runtime ({why}).", medium=show(options.medium), why=reason(e))
        raise Refused(MISSING, message, t("Is the disk mounted? Name it: --medium DIR")) from None
    signed = verify_signature(root, options)
    manifest, data, _, key = signed
    digest = hashlib.sha256(data).hexdigest()
    say(
        t("Atoll {version} (sequence {sequence}), signed by the key {fingerprint}...", version=manifest["version"],
          sequence=manifest["sequence"], fingerprint=key["fingerprint"][:32])
    )
    check_sequence(options, manifest)
    if options.verify_only:
        progress = Progress(t("Checking"), sum(f["size"] for f in manifest["files"]))
        copy_all(root, manifest["files"], lambda path: None, progress)
        progress.end(t("Good: {count} files, each as it was signed. Nothing was changed.",
                       count=len(manifest["files"])))
        return 0
    check_server(manifest["requires"])
    return make_release(options, root, signed, f"{manifest['version']}-{digest[:12]}")


def make_release(options, root, signed, name):
    """Copy, build the tree beside what runs, hand over to it."""
    base = os.path.join(options.root, "opt/atoll/code")
    look = options.dry_run or options.preflight
    place = os.environ.get("TMPDIR") or "/var/tmp"  # noqa: S108  mkdtemp makes it private
    if lies_on(place if look else base, options.medium):
        raise Refused(
            USAGE,
            t("{place} lies on the medium: code that runs from there could be changed after it was checked.",
              place=show(place if look else base)),
            t("Choose another --prefix, or another $TMPDIR for a dry run."),
        )
    with contextlib.ExitStack() as on_failure:
        if look:
            base = tempfile.mkdtemp(prefix="atoll-dry-run-", dir=place)
            on_failure.callback(shutil.rmtree, base, ignore_errors=True)
        try:
            setup, facts, lock = fill(base, name, root, signed, on_failure, look)
        except OSError as e:
            message = t("Writing below {base} failed: {why} ({filename}).", base=base, why=reason(e),
                        filename=e.filename)
            raise Refused(SPACE_IO, message, t("Correct it, then run again.")) from None
        on_failure.pop_all()
    return setup.hand_over(facts, options, lock)


def fill(base, name, root, signed, on_failure, look):
    """The tree `base/name`, under the lock of `base`: (setup_release.py as a module, the facts for it, the lock)."""
    incoming, here = os.path.join(base, f".incoming-{name}"), os.path.isfile(os.path.join(base, name, "runtime.json"))
    copied = sum(entry["size"] for entry in signed[0]["files"])
    need = copied + LOOK_BYTES if look else signed[0]["requires"]["disk_bytes"]
    if not here:
        check_space(base, need)
    absent = missing_directories(base)
    lock = own_directory(base)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(
            BUSY, t("Another install is working here."), t("Wait until it is done, then run again.")
        ) from None
    on_failure.callback(remove_empty, absent)
    try:
        take_copy(root, signed, incoming, only="setup/" if here else "")
        setup = load_setup(incoming, signed[0])
        facts = {"manifest": signed[0], "key": signed[3], "base": base, "name": name}
        facts |= {"incoming": incoming, "look": look}
        facts["make"] = not setup.is_whole(facts, say, Progress)
        if facts["make"] and here:
            check_space(base, need)
            take_copy(root, signed, incoming)
        setup.make_tree(facts, say, Progress, Refused)
    except BaseException as e:
        code = SPACE_IO if isinstance(e, OSError) else getattr(e, "code", None)
        if code != SPACE_IO:  # where only space was lacking, what is good of the copy serves the next run
            shutil.rmtree(incoming, ignore_errors=True)
        raise
    shutil.rmtree(incoming, ignore_errors=True)
    return setup, facts, lock


def stop_politely(*_):
    """SIGTERM does what Ctrl-C does."""
    raise KeyboardInterrupt


def main(argv):
    os.umask(0o022)
    signal.signal(signal.SIGTERM, stop_politely)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a dropped connection must not stop an install half-way
    try:
        return run(argv[0], argv[1:])
    except Refused as e:
        say(t("\nerror: {message}", message=e.message))
        if e.hint:
            say(f"  {e.hint}")
        return e.code
    except KeyboardInterrupt:
        say(t("\nInterrupted. What was half-done is removed, and what ran before still runs. Run the same command "
              "again."))
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
