"""The last part of install.sh: the order of its steps.

Runs as `python3 -I -S -B /dev/fd/3 PATH-OF-INSTALL.SH ARGUMENTS...`, with the other parts in front of it (scripts.py).

    1. trusted_key    whose signature counts
    2. signature      runtime/model.sig, bundle.json, the set of files
    3. server         whether the medium fits this server
    4. private_copy   every file copied and hashed
    5. this module    setup_release.py runs from the copy: it makes the code tree and becomes `atoll install`
"""

import contextlib
import fcntl
import hashlib
import importlib.abc
import os
import shutil
import signal
import sys
import tempfile
import types

from offline_bundle.errors import BUSY, CONTENT, MISSING, SPACE_IO, USAGE, BundleError
from offline_bundle.medium.install_sh.arguments import HELP, Options
from offline_bundle.medium.install_sh.private_copy import (
    hash_all,
    missing_directories,
    own_directory,
    remove_empty,
    take_copy,
)
from offline_bundle.medium.install_sh.server import check_interpreter, check_sequence, check_server, check_space
from offline_bundle.medium.install_sh.signature import verify_signature
from offline_bundle.medium.install_sh.terminal import INTERRUPTED, TAMPERED, ProgressLine, refused, say
from offline_bundle.medium.language import reason, t
from offline_bundle.names import show
from offline_bundle.on_medium import lies_on
from offline_bundle.untrusted_dir import DIRECTORY

DRY_RUN_BYTES = 1 << 28  # what a dry run unpacks, beside the copy


class BytesLoader(importlib.abc.InspectLoader):
    """Imports exactly these bytes: no file is opened again, and no cached bytecode is looked for."""

    def __init__(self, text):
        self.text = text

    def get_source(self, fullname):
        return self.text.decode("utf-8")


def load_setup(incoming, manifest):
    """setup_release.py as a module, from bytes whose hash is checked once more in memory."""
    path = "setup/setup_release.py"
    with open(os.path.join(incoming, path), "rb") as file:
        text = file.read()
    expected = next((f["sha256"] for f in manifest["files"] if f["path"] == path), None)
    if hashlib.sha256(text).hexdigest() != expected:
        raise refused(CONTENT, t("{path} changed after it was checked.", path=path), TAMPERED)
    loader = BytesLoader(text)
    module = types.ModuleType("setup_release")
    loader.exec_module(module)
    module.__dict__["t"] = t  # its messages appear in the same language
    return module


def install(script, arguments):
    """All steps in order. Returns the exit code, or becomes `atoll install`."""
    options = Options(script, arguments)
    if options.help:
        print(HELP, end="")
        return 0
    if not options.verify_only and options.prefix is None and os.geteuid() != 0:
        raise refused(
            USAGE, t("Installing on the server needs root."), t("sudo sh install.sh, or --prefix DIR for a trial.")
        )
    check_interpreter(options.medium)
    try:
        root = os.open(os.path.join(options.medium, "runtime"), DIRECTORY)
    except OSError as e:
        message = t("There is no {medium}/runtime ({why}).", medium=show(options.medium), why=reason(e))
        raise refused(MISSING, message, t("Is the disk mounted? Name it: --medium DIR")) from None
    signed = verify_signature(root, options)
    manifest, data, _, key = signed
    digest = hashlib.sha256(data).hexdigest()
    say(
        t("Atoll {version} (sequence {sequence}), signed by the key {fingerprint}...", version=manifest["version"],
          sequence=manifest["sequence"], fingerprint=key["fingerprint"][:32])
    )
    check_sequence(options, manifest)
    if options.verify_only:
        progress = ProgressLine(t("Checking"), sum(f["size"] for f in manifest["files"]))
        hash_all(root, manifest["files"], progress)
        progress.end(t("Good: {count} files, each as it was signed. Nothing was changed.",
                       count=len(manifest["files"])))
        return 0
    check_server(manifest["requires"])
    return make_release(options, root, signed, f"{manifest['version']}-{digest[:12]}")


def make_release(options, root, signed, name):
    """Copy the files, build the tree beside the running one, start `atoll install` from it."""
    base = os.path.join(options.root, "opt/atoll/code")
    dry_run = options.dry_run or options.preflight
    place = os.environ.get("TMPDIR") or "/var/tmp"  # noqa: S108  mkdtemp makes it private
    if lies_on(place if dry_run else base, options.medium):
        raise refused(
            USAGE,
            t("{place} lies on the medium: code that runs from there could be changed after it was checked.",
              place=show(place if dry_run else base)),
            t("Choose another --prefix, or another $TMPDIR for a dry run."),
        )
    with contextlib.ExitStack() as on_failure:
        if dry_run:
            base = tempfile.mkdtemp(prefix="atoll-dry-run-", dir=place)
            on_failure.callback(shutil.rmtree, base, ignore_errors=True)
        try:
            setup, facts, lock = fill(base, name, root, signed, on_failure, dry_run)
        except OSError as e:
            message = t("Writing below {base} failed: {why} ({filename}).", base=base, why=reason(e),
                        filename=e.filename)
            raise refused(SPACE_IO, message, t("Correct it, then run again.")) from None
        on_failure.pop_all()
    return setup.start_install(facts, options, lock)


def fill(base, name, root, signed, on_failure, dry_run):
    """The tree `base/name`, under the lock of `base`: (setup_release.py as a module, the facts for it, the lock)."""
    incoming, here = os.path.join(base, f".incoming-{name}"), os.path.isfile(os.path.join(base, name, "runtime.json"))
    copied = sum(entry["size"] for entry in signed[0]["files"])
    need = copied + DRY_RUN_BYTES if dry_run else signed[0]["requires"]["disk_bytes"]
    if not here:
        check_space(base, need)
    absent = missing_directories(base)
    lock = own_directory(base)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise refused(
            BUSY, t("Another installation is running here."), t("Wait until it is done, then run again.")
        ) from None
    on_failure.callback(remove_empty, absent)
    try:
        take_copy(root, signed, incoming, only="setup/" if here else "")
        setup = load_setup(incoming, signed[0])
        facts = {"manifest": signed[0], "key": signed[3], "base": base, "name": name}
        facts |= {"incoming": incoming, "dry_run": dry_run}
        facts["make"] = not setup.is_complete(facts, say, ProgressLine)
        if facts["make"] and here:
            check_space(base, need)
            take_copy(root, signed, incoming)
        setup.make_tree(facts, say, ProgressLine, refused)
    except BaseException as e:
        code = SPACE_IO if isinstance(e, OSError) else getattr(e, "exit_code", None)
        if code != SPACE_IO:  # if only space was missing, the next run reuses the good part of the copy
            shutil.rmtree(incoming, ignore_errors=True)
        raise
    shutil.rmtree(incoming, ignore_errors=True)
    return setup, facts, lock


def stop_politely(*_):
    """Make SIGTERM behave like Ctrl-C."""
    raise KeyboardInterrupt


def main(argv):
    os.umask(0o022)
    signal.signal(signal.SIGTERM, stop_politely)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a dropped connection must not stop an install half-way
    try:
        return install(argv[0], argv[1:])
    except BundleError as e:
        say(t("\nerror: {message}", message=e.message))
        if e.hint:
            say(f"  {e.hint}")
        return e.exit_code
    except KeyboardInterrupt:
        say(t("\nInterrupted. Partial work was removed; whatever ran before is still running. Run the same command "
              "again."))
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
