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
from offline_bundle.medium.trust import choose_key

LOOK_BYTES = 1 << 28  # what a dry run unpacks, beside the copy

KOREAN = {  # said after the English words where the system speaks Korean
    USAGE: "인자 또는 응답 파일이 잘못되었습니다. 도움말: sh install.sh --help",
    PREFLIGHT: "이 서버에는 이 매체에 필요한 것이 없습니다. 아무것도 바뀌지 않았습니다.",
    UNTRUSTED: "서명이 없거나 신뢰하는 키로 서명되지 않았습니다. 이 매체를 사용하지 말고 공급자에게 확인하십시오.",
    CONTENT: "서명된 내용과 다릅니다. 이 매체를 사용하지 말고 다시 받으십시오.",
    REPLAY: "이미 설치된 것보다 오래된 매체입니다.",
    MISSING: "매체 또는 그 안의 파일이 없습니다. 디스크가 마운트되었는지 확인하십시오.",
    SPACE_IO: "공간이 부족하거나 디스크를 읽고 쓸 수 없습니다. 해결한 뒤 같은 명령을 다시 실행하십시오.",
    BUSY: "다른 설치가 진행 중입니다. 끝난 뒤 다시 실행하십시오.",
    INTERRUPTED: "중단되었습니다. 실행 중이던 것은 그대로입니다. 같은 명령을 다시 실행하십시오.",
}


def speaks_korean():
    """By the system's language, as gettext picks it."""
    names = ("LC_ALL", "LC_MESSAGES", "LANG")
    return next((os.environ[n] for n in names if os.environ.get(n)), "").startswith("ko")


# -- what the server must have ----------------------------------------------------------------------------------------


def check_server(requires):
    """This processor, this Python, this libc: told before gigabytes are copied."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    arch = platform.machine()
    if arch != requires["arch"]:
        raise Refused(PREFLIGHT, f"The medium is for {requires['arch']}; this is {arch}.", "Ask for the other one.")
    if here not in requires["python"]:
        made = ", ".join(requires["python"])
        raise Refused(
            PREFLIGHT,
            f"The medium is for Python {made}; {sys.executable} is Python {here}.",
            "Name another one with --python DIR, or have the medium built for this one.",
        )
    libc, version = platform.libc_ver()
    have = tuple(int(part) for part in version.split(".")[:2]) if libc == "glibc" else (0, 0)
    if have < tuple(int(part) for part in requires["glibc"].split(".")):
        raise Refused(
            PREFLIGHT,
            f"The medium needs glibc {requires['glibc']} or newer; this one has {version or 'another libc'}.",
            "Use a newer release of the distribution (Debian 12, Ubuntu 22.04, RHEL 9 or newer).",
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
                raise Refused(SPACE_IO, f"/{path} cannot be read: {show(e)}.", "Restore it, or run as root.") from None
    if manifest["sequence"] < known and not options.last("--allow-downgrade"):
        raise Refused(
            REPLAY,
            f"This runtime has sequence {manifest['sequence']}, but {known} was installed here already: it is older.",
            "Use the newest medium. To go back: atoll rollback. To insist: --allow-downgrade 'the reason'",
        )


# -- the order of things ----------------------------------------------------------------------------------------------


def verify_signature(root, options):
    """(manifest, its bytes, digest, key) once signature and bundle.json hold."""
    try:
        signature = read_small(root, "model.sig", MAX_SIGNATURE)
    except Refused as e:
        if e.code == SPACE_IO:
            raise
        raise Refused(UNTRUSTED, f"There is no usable signature: {e.message}", "Get the medium again.") from None
    claimed, payload, raw = open_envelope(signature)
    point, text, fingerprint, now = choose_key(options, claimed)
    resources = signed_resources(payload, raw, point)
    data = read_small(root, "bundle.json", MAX_MANIFEST)
    digest = hashlib.sha256(data).hexdigest()
    if resources.pop("bundle.json", None) != digest:
        raise Refused(CONTENT, "runtime/bundle.json is not the file that was signed.", ODD)
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
        message = f"{where} has {free} MiB free; the code takes {need >> 20} MiB while it is installed."
        raise Refused(SPACE_IO, message, "Free some space (df -h), then run again.")


def own_directory(path):
    """Make `path`, refusing one that others could write to."""
    os.makedirs(path, 0o755, exist_ok=True)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
        raise Refused(SPACE_IO, f"{path} is a link, or others may write to it.", f"Look who made it: ls -ld {path}")
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
        raise Refused(SPACE_IO, f"{incoming} belongs to somebody else.", "Remove it and run again.")
    os.chmod(incoming, 0o700)
    files = [f for f in manifest["files"] if f["path"].startswith(only)]
    progress = Progress("Copying and checking", sum(f["size"] for f in files))
    copy_all(root, files, lambda path: os.path.join(incoming, path), progress)
    for name, content in (("bundle.json", data), ("model.sig", signature)):
        with open(os.path.join(incoming, name), "wb") as file:
            file.write(content)
    progress.end(f"Checked: {len(files)} files, {progress.total >> 20} MiB, each as it was signed.")


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
        raise Refused(CONTENT, f"{path} changed after it was checked.", ODD)
    loader = Checked(text)
    module = types.ModuleType("setup_release")
    loader.exec_module(module)
    return module


def run(script, arguments):
    """Everything; returns the exit code, or becomes `atoll install`."""
    options = Options(script, arguments)
    if options.help:
        print(HELP, end="")
        return 0
    if not options.verify_only and options.prefix is None and os.geteuid() != 0:
        raise Refused(USAGE, "Installing on the server needs root.", "sudo sh install.sh, or --prefix DIR for a trial.")
    try:
        root = os.open(os.path.join(options.medium, "runtime"), DIRECTORY)
    except OSError as e:
        message = f"There is no {show(options.medium)}/runtime ({e.strerror})."
        raise Refused(MISSING, message, "Is the disk mounted? Name it: --medium DIR") from None
    signed = verify_signature(root, options)
    manifest, data, _, key = signed
    digest = hashlib.sha256(data).hexdigest()
    say(
        f"Atoll {manifest['version']} (sequence {manifest['sequence']}), signed by the key {key['fingerprint'][:32]}..."
    )
    check_sequence(options, manifest)
    if options.verify_only:
        progress = Progress("Checking", sum(f["size"] for f in manifest["files"]))
        copy_all(root, manifest["files"], lambda path: None, progress)
        progress.end(f"Good: {len(manifest['files'])} files, each as it was signed. Nothing was changed.")
        return 0
    check_server(manifest["requires"])
    return make_release(options, root, signed, f"{manifest['version']}-{digest[:12]}")


def make_release(options, root, signed, name):
    """Copy, build the tree beside what runs, hand over to it."""
    base = os.path.join(options.root, "opt/atoll/code")
    look = options.dry_run or options.preflight
    with contextlib.ExitStack() as on_failure:
        if look:
            place = os.environ.get("TMPDIR") or "/var/tmp"  # noqa: S108  mkdtemp makes it private
            base = tempfile.mkdtemp(prefix="atoll-dry-run-", dir=place)
            on_failure.callback(shutil.rmtree, base, ignore_errors=True)
        try:
            setup, facts, lock = fill(base, name, root, signed, on_failure, look)
        except OSError as e:
            message = f"Writing below {base} failed: {e.strerror} ({e.filename})."
            raise Refused(SPACE_IO, message, "Correct it, then run again.") from None
        on_failure.pop_all()
    return setup.hand_over(facts, options, lock)


def fill(base, name, root, signed, on_failure, look):
    """The tree `base/name`, under the lock of `base`: (setup_release.py as a module, the facts for it, the lock)."""
    incoming, here = os.path.join(base, f".incoming-{name}"), os.path.isfile(os.path.join(base, name, "runtime.json"))
    if not here:
        copied = sum(entry["size"] for entry in signed[0]["files"])
        check_space(base, copied + LOOK_BYTES if look else signed[0]["requires"]["disk_bytes"])
    absent = missing_directories(base)
    lock = own_directory(base)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(BUSY, "Another install is working here.", "Wait until it is done, then run again.") from None
    on_failure.callback(remove_empty, absent)
    try:
        take_copy(root, signed, incoming, only="setup/" if here else "")
        setup = load_setup(incoming, signed[0])
        facts = {"manifest": signed[0], "key": signed[3], "base": base, "name": name}
        facts |= {"incoming": incoming, "look": look}
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
        say(f"\nerror: {e.message}")
        if e.hint:
            say(f"  {e.hint}")
        if speaks_korean() and e.code in KOREAN:
            say(f"  {KOREAN[e.code]}")
        return e.code
    except KeyboardInterrupt:
        say("\nInterrupted. What was half-done is removed, and what ran before still runs. Run the same command again.")
        if speaks_korean():
            say(KOREAN[INTERRUPTED])
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
