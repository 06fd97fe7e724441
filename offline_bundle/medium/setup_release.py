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
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

CONTENT, SPACE_IO, BUG = 11, 30, 1
MOST_PIPS = 4  # past that a disk, not a processor, is the limit

# Only for compiling against the packages, which nothing on a server does; half of all files.
NEEDLESS = ("lib/bin", "lib/torch/include")
# What the server does not import when it serves; it would still run, only without bytecode made ahead.
NOT_COMPILED = (
    r"/(tests?|sympy|networkx|mpmath|setuptools|torchgen|functorch|huggingface_hub)/"
    r"|/torch/(_inductor|testing|onnx)/"
)

# For a look (a dry run, a preflight) packages above this size tell only what they are: PyTorch takes most of the time
# and space of an install, and nothing that looks imports it.
LARGE = 16 << 20
TELLING = ("torch/__init__.py", "torch/version.py")

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


def t(source, /, **values):
    """`source` with its {placeholders} filled in. install.sh puts its own in place of this, which may speak Korean."""
    return source.format(**values)


def make_tree(facts, say, progress_of, refused):
    """Build `facts["base"]/facts["name"]` unless it is there. `refused(code, message, hint)` is the error to raise."""
    manifest, base, incoming = facts["manifest"], facts["base"], facts["incoming"]
    final, partial = os.path.join(base, facts["name"]), os.path.join(base, f".partial-{facts['name']}")
    for left_over in os.listdir(base):
        if left_over.startswith((".partial-", ".incoming-")) and os.path.join(base, left_over) != incoming:
            shutil.rmtree(os.path.join(base, left_over), ignore_errors=True)
    if os.path.isfile(os.path.join(final, "runtime.json")):
        say(t("The code is already in {final}.", final=final))
        return
    began = time.monotonic()
    if facts["look"]:
        _unpack_for_a_look(facts, final)
        say(t("Ready to look ({seconds:.0f} s). Nothing of it stays.", seconds=time.monotonic() - began))
        return
    try:
        os.mkdir(partial, 0o755)
        _install_packages(facts, partial, progress_of, refused)
        shutil.rmtree(os.path.join(incoming, "wheels"))  # before the disk has to keep them
        say(t("Preparing the packages: bytecode, launcher, hashes ..."))
        _compile(partial, final, refused)
        _add_rest(facts, partial, final)
        _try_it(partial, manifest["version"], refused)
        _describe(facts, partial, refused)
        os.sync()  # a power cut after the rename must not find half a tree
        os.rename(partial, final)
        _sync_directory(base)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(t("Code installed in {final} ({seconds:.0f} s). It stays for the next try if the rest stops.", final=final,
          seconds=time.monotonic() - began))


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
    """pip, from its own verified wheel, into lib/: no index, and only files whose hashes are in the signed list.

    Several at once, each with its share of the packages: inflating gigabytes is work for more than one processor.
    """
    incoming, manifest = facts["incoming"], facts["manifest"]
    pip = next(f["path"] for f in manifest["files"] if f["role"] == "tool")
    shares, commands = _shares(facts), []
    for number, lines in enumerate(shares):
        os.makedirs(_temporary(partial, number), 0o700)  # on the same disk: pip moves from here, it need not copy
        _write(partial, f"tmp/{number}.txt", "".join(lines))
        commands.append(_python(
            os.path.join(incoming, pip, "pip"), "install", "--quiet", "--no-index", "--require-hashes", "--no-deps",
            "--only-binary", ":all:", "--find-links", os.path.join(incoming, "wheels"),
            "--requirement", os.path.join(partial, f"tmp/{number}.txt"),
            "--target", os.path.join(partial, "tmp", f"lib-{number}"),
            "--no-compile", "--no-cache-dir", "--no-input", "--disable-pip-version-check",
            "--root-user-action", "ignore",
        ))  # fmt: skip
    before = _free(partial)  # the disk tells roughly how far it is; counting twenty thousand files would cost more
    progress = progress_of(t("Unpacking packages"), manifest["requires"]["unpacked_bytes"])
    where = [_temporary(partial, number) for number in range(len(shares))]
    _run_all(commands, where, t("unpack the packages"), refused, lambda: progress.at(before - _free(partial)))
    for number in range(len(shares)):
        _merge(os.path.join(partial, "tmp", f"lib-{number}"), os.path.join(partial, "lib"))
    shutil.rmtree(os.path.join(partial, "tmp"))
    for needless in NEEDLESS:
        shutil.rmtree(os.path.join(partial, needless), ignore_errors=True)
    progress.end(t("Unpacked: every package, by its signed hash, without any index."))


def _unpack_for_a_look(facts, final):
    """What `atoll` needs to plan and to check the server, from the verified copy; gone when that is done."""
    incoming, manifest = facts["incoming"], facts["manifest"]
    with open(os.path.join(incoming, "requirements", f"{_tag()}.txt"), encoding="ascii") as file:
        wanted = {line.rpartition("sha256:")[2].strip() for line in file}
    for entry in manifest["files"]:
        if entry["path"].startswith("wheels/") and entry["sha256"] in wanted:
            with zipfile.ZipFile(os.path.join(incoming, entry["path"])) as wheel:
                names = wheel.namelist()
                if entry["size"] > LARGE:
                    names = [name for name in names if ".dist-info/" in name or name in TELLING]
                wheel.extractall(os.path.join(final, "lib"), names)
    _add_rest(facts, final, final)
    _write(final, "runtime.json", json.dumps(_facts_of(facts, manifest["requires"]["unpacked_bytes"]), indent=2) + "\n")


def _temporary(partial, number):
    return os.path.join(partial, "tmp", str(number))


def _shares(facts):
    """The lines of the signed list of requirements, in about equal parts by the size of the wheels."""
    sizes = {f["sha256"]: f["size"] for f in facts["manifest"]["files"]}
    with open(os.path.join(facts["incoming"], "requirements", f"{_tag()}.txt"), encoding="ascii") as file:
        lines = sorted(file, key=lambda line: -sizes.get(line.rpartition("sha256:")[2].strip(), 0))
    shares = [[0, []] for _ in range(min(_processors(), MOST_PIPS, len(lines)))]
    for line in lines:
        least = min(shares, key=lambda share: share[0])
        least[0] += sizes.get(line.rpartition("sha256:")[2].strip(), 0)
        least[1].append(line)
    return [lines for _, lines in shares]


def _processors():
    return max(1, len(os.sched_getaffinity(0)))


def _merge(source, target):
    """Move everything of `source` into `target`; both are on one disk, so nothing is copied."""
    os.makedirs(target, 0o755, exist_ok=True)
    for entry in os.scandir(source):
        goal = os.path.join(target, entry.name)
        if entry.is_dir(follow_symlinks=False) and os.path.isdir(goal):
            _merge(entry.path, goal)
        else:
            os.replace(entry.path, goal)


def _compile(partial, final, refused):
    """Bytecode for all of it now, so that nothing ever has to be written into the tree, and starts are quick."""
    lib = os.path.join(partial, "lib")
    mode = ("-q", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash")  # nothing is looked up to judge its age
    command = _python("-m", "compileall", *mode, "-x", NOT_COMPILED, "-s", partial, "-p", final, lib)
    # Some packages carry templates that are not Python by themselves: those do not compile, and nobody imports them.
    _run_all([command], [partial], t("compile the packages"), refused, lambda: None, fine=(0, 1))


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
            BUG,
            t("The unpacked code does not start: {names}", names=" / ".join(tail)),
            t("Tell the vendor; nothing was changed."),
        )


def _describe(facts, partial, refused):
    """files.json and runtime.json, and every mode: readable by all, writable by none.

    What pip unpacked must be what the vendor found in the same wheels, to the last file.
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

    with ThreadPoolExecutor(min(_processors(), 8)) as pool:
        files = dict(pool.map(entry, paths))
    with open(os.path.join(facts["incoming"], "requirements", f"{_tag()}.json"), "rb") as file:
        signed = json.loads(file.read())["files"]
    for path, expected in signed.items():
        if files.get(f"lib/{path}") != expected and not f"lib/{path}".startswith(NEEDLESS):
            raise refused(
                CONTENT,
                t("lib/{path} is not what the vendor signed.", path=path),
                t("Check the disk (dmesg), run again."),
            )
    listing = json.dumps({"files": dict(sorted(files.items()))}, indent=0) + "\n"
    runtime = _facts_of(facts, sum(f["size"] for f in files.values()) + len(listing))
    _write(partial, "files.json", listing, 0o444)
    _write(partial, "runtime.json", json.dumps(runtime, indent=2) + "\n", 0o444)
    for directory, _, _ in os.walk(partial, topdown=False):
        os.chmod(directory, 0o755)  # noqa: S103  everybody may read it


def _facts_of(facts, size):
    """runtime.json: what a tree is."""
    manifest = facts["manifest"]
    with open(os.path.join(facts["incoming"], "bundle.json"), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    runtime = {name: manifest[name] for name in ("name", "version", "sequence", "created", "requires")}
    runtime |= {"schema_version": 1, "digest": digest, "key_fingerprint": facts["key"]["fingerprint"]}
    return runtime | {"abi": _tag(), "python": os.path.realpath(sys.executable), "bytes": size}


def _run_all(commands, temporary, deed, refused, tick, fine=(0,)):
    """Run Pythons of our own side by side, quietly; the last words of one that fails are shown.

    Each has a directory of its own for what it puts down meanwhile. `tick` is called now and then.
    """
    with contextlib.ExitStack() as logs:
        running = []
        try:
            for command, place in zip(commands, temporary, strict=True):
                log = logs.enter_context(open(os.path.join(place, ".log"), "w+b"))
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(place), cwd="/"
                )
                running.append((process, log))
            for process, _ in running:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.25)
                    tick()
                if process.returncode not in fine:
                    break
        finally:
            for process, _ in running:
                if process.poll() is None:
                    process.kill()
                process.wait()
        failed = next((log for process, log in running if process.returncode not in (*fine, -signal.SIGKILL)), None)
        failed = failed or next((log for process, log in running if process.returncode not in fine), None)
        if failed is None:
            for place in temporary:
                os.unlink(os.path.join(place, ".log"))
            return
        failed.seek(0)
        words = failed.read().decode(errors="replace").strip().splitlines()[-4:]
    full = any("No space left" in line or "Errno 28" in line for line in words)
    hint = t("Free some space (df -h) and run again.") if full else t("Run again; if it fails again, tell the vendor.")
    raise refused(SPACE_IO if full else BUG, t("Could not {deed}: {names}", deed=deed, names=" / ".join(words)), hint)


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
