"""Make a release's code tree from the verified copy of a runtime. Signed, and started by install.sh.

    <base>/<version>-<12 hex>/
      bin/atoll  start.py      the launcher: this tree's packages, the server's Python, nothing else
      lib/                     every package, compiled ahead
      share/                   docs, licences, units, bill of materials, GPU kernels, bundle.json and model.sig as they
                               were signed
      trust/<16 hex>.pub       the vendor's key, if the operator named it in the run that made the tree
      files.json runtime.json  the hash of every file above, and what this tree is (none: incomplete)

The tree is made under another name and appears by one rename. Nothing writes to it later. This module contains the
order of the steps; scripts.py joins it with the other parts into one file.
"""

import hashlib
import os
import shutil
import subprocess
import time

from offline_bundle.medium.code_tree.check import check_tree
from offline_bundle.medium.code_tree.contents import add_rest, check_start, describe, describe_for_dry_run
from offline_bundle.medium.code_tree.packages import compile_all, install_packages, unpack_for_dry_run
from offline_bundle.medium.code_tree.tools import t, tag


def is_complete(facts, say, progress_of):
    """Whether the tree exists and every file is what was signed, judged by this medium's own code."""
    final = os.path.join(facts["base"], facts["name"])
    if not os.path.isfile(os.path.join(final, "runtime.json")):
        return False
    with open(os.path.join(facts["incoming"], "bundle.json"), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    progress = progress_of(t("Checking the installed code"), 1)

    def told(done, total):
        progress.total = max(total, 1)
        progress.at(done)

    wrong = check_tree(final, tag(), digest, told)
    if wrong:
        say(t("The code in {final} is not what was signed ({path}, {count} in all); it will be rebuilt.", final=final,
              path=wrong[0], count=len(wrong)))
    return not wrong


def make_tree(facts, say, progress_of, refused):
    """Build `facts["base"]/facts["name"]` if `facts["make"]`. `refused(exit_code, message, hint)` makes an error."""
    manifest, base, incoming = facts["manifest"], facts["base"], facts["incoming"]
    final, partial = os.path.join(base, facts["name"]), os.path.join(base, f".partial-{facts['name']}")
    replaced = os.path.join(base, f".partial-replaced-{facts['name']}")
    for left_over in os.listdir(base):
        if left_over.startswith((".partial-", ".incoming-")) and os.path.join(base, left_over) != incoming:
            shutil.rmtree(os.path.join(base, left_over), ignore_errors=True)
    if not facts["make"]:
        say(t("The code is already in {final} and matches what was signed.", final=final))
        return
    began = time.monotonic()
    if facts["dry_run"]:
        unpack_for_dry_run(facts, final)
        add_rest(facts, final, final)
        describe_for_dry_run(facts, final)
        say(t("Ready for the dry run ({seconds:.0f} s). It will be removed afterwards.",
              seconds=time.monotonic() - began))
        return
    try:
        os.mkdir(partial, 0o755)
        install_packages(facts, partial, progress_of, refused)
        shutil.rmtree(os.path.join(incoming, "wheels"))  # before the disk writes them out
        say(t("Preparing the packages: bytecode, launcher, hashes ..."))
        compile_all(partial, final)
        add_rest(facts, partial, final)
        check_start(partial, manifest["version"], refused)
        describe(facts, partial, final, refused)
        os.sync()  # a power cut after the rename must not find half a tree
        if os.path.lexists(final):  # it differs from what was signed
            os.rename(final, replaced)
        os.rename(partial, final)
        _sync_directory(base)
    finally:
        for left_over in (partial, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
    say(t("Code installed in {final} ({seconds:.0f} s). It is kept for the next attempt if a later step fails.",
          final=final, seconds=time.monotonic() - began))


def start_install(facts, options, lock):
    """Become `atoll install` of the new tree. The tree of a dry run or preflight is removed afterwards."""
    tree = os.path.join(facts["base"], facts["name"])
    command = [os.path.join(tree, "bin/atoll"), "preflight" if options.preflight else "install"]
    if options.prefix:
        command += ["--prefix", options.prefix]
    for path in options.values["--trust-key"]:
        command += ["--trust-key", os.path.abspath(path)]
    if facts["key"]["new"] and not options.trust:
        command += ["--trust-key", _named_key(facts, tree)]
    command += ["--bundle"] if options.preflight else []
    command += [options.medium, *options.rest]
    os.umask(0o022)
    if not (options.dry_run or options.preflight):
        os.close(lock)
        os.execv(command[0], command)  # noqa: S606  our own launcher, and no shell
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        shutil.rmtree(facts["base"], ignore_errors=True)


def _named_key(facts, tree):
    """A file with the key that was named by its fingerprint, so that `atoll install` also trusts only this one.

    A tree from an earlier run may lack it; the file beside the trees is removed when the next install is committed.
    """
    name = facts["key"]["fingerprint"][:16] + ".pub"
    path = os.path.join(tree, "trust", name)
    if not os.path.isfile(path):
        path = os.path.join(facts["base"], ".named-" + name)
        with open(path + ".partial", "wb") as file:
            file.write(facts["key"]["pem"])
        os.replace(path + ".partial", path)
    return path


def _sync_directory(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
