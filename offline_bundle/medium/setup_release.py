"""Makes a release's code tree from the verified copy of a runtime. Signed, and started by install.sh; not imported.

    <base>/<version>-<12 hex>/
      bin/atoll  start.py      the launcher: this tree's packages, the server's Python, nothing else
      lib/                     every package, compiled ahead
      share/                   docs, licences, units, bill of materials, bundle.json and model.sig as they were signed
      trust/<16 hex>.pub       the key, when the operator named it just now
      files.json runtime.json  the hash of every file above, and what this is; runtime.json is the sign of completeness

The tree is made under another name and appears by one rename. Nothing writes to it later. Only the standard library.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time

CONTENT, SPACE_IO, BUG = 11, 30, 1

# Only for compiling against the packages, which nothing on a server does; half of all files.
NEEDLESS = ("lib/bin", "lib/torch/include")
# What the server does not import when it serves; it would still run, only without bytecode made ahead.
NOT_COMPILED = (
    r"/(tests?|sympy|networkx|mpmath|setuptools|torchgen|functorch|huggingface_hub)/"
    r"|/torch/(_inductor|testing|onnx)/"
)

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

lib = os.path.join(os.path.dirname(os.path.realpath(__file__)), "lib")
sys.path.insert(0, lib)
os.environ["PYTHONPATH"] = lib  # for the processes that this one starts
sys.argv[0] = "atoll"

from appliance.cli import main  # noqa: E402

if __name__ == "__main__":  # processes that multiprocessing starts import this file again
    main()
"""


def make_tree(facts, say, progress_of, refused):
    """Build `facts["base"]/facts["name"]` unless it is there. `refused(code, message, hint)` is the error to raise."""
    manifest, base, incoming = facts["manifest"], facts["base"], facts["incoming"]
    final, partial = os.path.join(base, facts["name"]), os.path.join(base, f".partial-{facts['name']}")
    for left_over in os.listdir(base):
        if left_over.startswith((".partial-", ".incoming-")) and os.path.join(base, left_over) != incoming:
            shutil.rmtree(os.path.join(base, left_over), ignore_errors=True)
    if os.path.isfile(os.path.join(final, "runtime.json")):
        say(f"The code is already in {final}.")
        return
    began = time.monotonic()
    try:
        os.mkdir(partial, 0o755)
        _install_packages(facts, partial, progress_of, refused)
        say("Preparing the packages: bytecode, launcher, hashes ...")
        _compile(partial, final, refused)
        _add_rest(facts, partial, final)
        _try_it(partial, manifest["version"], refused)
        _describe(facts, partial, refused)
        os.sync()  # a power cut after the rename must not find half a tree
        os.rename(partial, final)
        _sync_directory(base)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"Code installed in {final} ({time.monotonic() - began:.0f} s). It stays for the next try if the rest stops.")


def hand_over(facts, options, lock):
    """Become `atoll install` of the new tree. The tree of a dry run or preflight is removed behind it."""
    tree = os.path.join(facts["base"], facts["name"])
    command = [os.path.join(tree, "bin/atoll"), "preflight" if options.preflight else "install"]
    if options.prefix:
        command += ["--prefix", options.prefix]
    for path in options.values["--trust-key"]:
        command += ["--trust-key", os.path.abspath(path)]
    key = os.path.join(tree, "trust", facts["key"]["fingerprint"][:16] + ".pub")
    if facts["key"]["new"] and not options.values["--trust-key"] and os.path.isfile(key):
        command += ["--trust-key", key]
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


# -- the parts of a tree ----------------------------------------------------------------------------------------------


def _python(*arguments):
    return [sys.executable, "-I", "-S", "-B", *arguments]


def _tag():
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def _environment(temporary):
    """Nothing of the operator's: no proxies, no pip settings, no paths."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": temporary,
        "TMPDIR": temporary,
        "LC_ALL": "C.UTF-8",
        "PIP_CONFIG_FILE": os.devnull,
        "SOURCE_DATE_EPOCH": "315532800",
    }


def _install_packages(facts, partial, progress_of, refused):
    """pip, from its own verified wheel, into lib/: no index, and only files whose hashes are in the signed list."""
    incoming, manifest = facts["incoming"], facts["manifest"]
    pip = next(f["path"] for f in manifest["files"] if f["role"] == "tool")
    temporary = os.path.join(partial, "tmp")  # on the same disk: pip moves the packages from here, it need not copy
    os.mkdir(temporary, 0o700)
    command = _python(
        os.path.join(incoming, pip, "pip"), "install", "--quiet", "--no-index", "--require-hashes", "--no-deps",
        "--only-binary", ":all:", "--find-links", os.path.join(incoming, "wheels"),
        "--requirement", os.path.join(incoming, "requirements", f"{_tag()}.txt"),
        "--target", os.path.join(partial, "lib"),
        "--no-compile", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--root-user-action", "ignore",
    )  # fmt: skip
    before = _free(partial)  # the disk tells roughly how far it is; counting twenty thousand files would cost more
    progress = progress_of("Unpacking packages", manifest["requires"]["unpacked_bytes"])
    _run(command, temporary, "unpack the packages", refused, lambda: progress.at(before - _free(partial)))
    shutil.rmtree(temporary)
    for needless in NEEDLESS:
        shutil.rmtree(os.path.join(partial, needless), ignore_errors=True)
    progress.end("Unpacked: every package, by its signed hash, without any index.")


def _compile(partial, final, refused):
    """Bytecode for all of it now, so that nothing ever has to be written into the tree, and starts are quick."""
    lib = os.path.join(partial, "lib")
    mode = ("-q", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash")  # nothing is looked up to judge its age
    command = _python("-m", "compileall", *mode, "-x", NOT_COMPILED, "-s", partial, "-p", final, lib)
    # Some packages carry templates that are not Python by themselves: those do not compile, and nobody imports them.
    _run(command, partial, "compile the packages", refused, lambda: None, fine=(0, 1))


def _add_rest(facts, partial, final):
    """Launcher, documents, the signed description, and the key if it is new."""
    incoming = facts["incoming"]
    for name in ("docs", "licenses", "sbom", "units", "setup", "requirements"):
        if os.path.isdir(os.path.join(incoming, name)):
            shutil.copytree(os.path.join(incoming, name), os.path.join(partial, "share", name))
    for name in ("bundle.json", "model.sig"):
        shutil.copyfile(os.path.join(incoming, name), os.path.join(partial, "share", name))
    python = os.path.realpath(sys.executable)
    _write(partial, "start.py", START)
    _write(partial, "bin/atoll", LAUNCHER.format(python=_quote(python), start=_quote(os.path.join(final, "start.py"))))
    if facts["key"]["new"]:
        _write(partial, f"trust/{facts['key']['fingerprint'][:16]}.pub", facts["key"]["pem"].decode())


def _try_it(partial, version, refused):
    """The packages load, and say the version that was signed."""
    command = _python(os.path.join(partial, "start.py"), "--version")
    done = subprocess.run(command, env=_environment(partial), capture_output=True, text=True, check=False)
    if done.returncode or done.stdout.strip() != version:
        tail = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise refused(
            BUG, f"The unpacked code does not start: {' / '.join(tail)}", "Tell the vendor; nothing was changed."
        )


def _describe(facts, partial, refused):
    """files.json and runtime.json, and every mode: readable by all, writable by none.

    What pip unpacked must be what the vendor found in the same wheels, to the last file.
    """
    files = {}
    for directory, _, names in os.walk(partial):
        for name in names:
            path = os.path.join(directory, name)
            if os.path.islink(path):
                continue
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            relative = os.path.relpath(path, partial)
            files[relative] = {"sha256": digest, "size": os.path.getsize(path)}
            os.chmod(path, 0o555 if relative == "bin/atoll" else 0o444)
    manifest = facts["manifest"]
    with open(os.path.join(facts["incoming"], "requirements", f"{_tag()}.json"), "rb") as file:
        signed = json.loads(file.read())["files"]
    for path, expected in signed.items():
        if files.get(f"lib/{path}") != expected and not f"lib/{path}".startswith(NEEDLESS):
            raise refused(CONTENT, f"lib/{path} is not what the vendor signed.", "Check the disk (dmesg), run again.")
    with open(os.path.join(facts["incoming"], "bundle.json"), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    runtime = {name: manifest[name] for name in ("name", "version", "sequence", "created", "requires")}
    runtime |= {"schema_version": 1, "digest": digest, "key_fingerprint": facts["key"]["fingerprint"]}
    runtime |= {"abi": _tag(), "python": os.path.realpath(sys.executable)}
    runtime |= {"bytes": sum(f["size"] for f in files.values())}
    _write(partial, "files.json", json.dumps({"files": dict(sorted(files.items()))}, indent=0) + "\n", 0o444)
    _write(partial, "runtime.json", json.dumps(runtime, indent=2) + "\n", 0o444)
    for directory, _, _ in os.walk(partial, topdown=False):
        os.chmod(directory, 0o755)  # noqa: S103  everybody may read it


def _run(command, temporary, deed, refused, tick, fine=(0,)):
    """Run a Python of our own, quietly; its last words are shown if it fails. `tick` is called now and then."""
    with open(os.path.join(temporary, ".log"), "w+b") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(temporary), cwd="/"
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.25)
                tick()
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode in fine:
            return
        log.seek(0)
        words = log.read().decode(errors="replace").strip().splitlines()[-4:]
    full = any("No space left" in line or "Errno 28" in line for line in words)
    hint = "Free some space (df -h) and run again." if full else "Run again; if it fails again, tell the vendor."
    raise refused(SPACE_IO if full else BUG, f"Could not {deed}: {' / '.join(words)}", hint)


def _free(path):
    info = os.statvfs(path)
    return info.f_bfree * info.f_frsize


def _write(partial, path, text, mode=0o644):
    target = os.path.join(partial, path)
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
    with open(target, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(target, 0o755 if path == "bin/atoll" else mode)


def _quote(text):
    return "'" + text.replace("'", "'\\''") + "'"


def _sync_directory(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
