"""Helpers: run other Pythons, spread work over processes, write files. A part of setup_release.py."""

import contextlib
import errno
import json
import os
import selectors
import signal
import subprocess
import sys

CONTENT, SPACE_IO, BUG = 11, 30, 1


def t(source, /, **values):
    """`source` with its {placeholders} filled in. install.sh replaces this function by its own, which translates."""
    return source.format(**values)


def python(*arguments):
    return [sys.executable, "-I", "-S", "-B", *arguments]


def tag():
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def environment(temporary):
    """An environment without the operator's proxies, pip settings and paths."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": temporary,
        "TMPDIR": temporary,
        "LC_ALL": "C.UTF-8",
        "PIP_CONFIG_FILE": os.devnull,
        "SOURCE_DATE_EPOCH": "315532800",
    }


def processors():
    return max(1, len(os.sched_getaffinity(0)))


def run_all(commands, temporary, deed, refused, tick, fine=(0,)):
    """Run commands side by side without output; if one fails, the error shows its last lines.

    Each command has a temporary directory of its own. `tick` is called a few times a second.
    """
    with contextlib.ExitStack() as logs:
        running = []
        try:
            for command, place in zip(commands, temporary, strict=True):
                log = logs.enter_context(open(os.path.join(place, ".log"), "w+b"))
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(place), cwd="/"
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


def in_processes(work, items, done=lambda count: None):
    """[work(item) for item in items] without the Nones, on all processors; results are strings, in no order.

    `done(count)` is called with the number of items just finished. Raises OSError if a worker did.
    """
    count = max(1, min(processors(), len(items)))
    found, workers = [], {}
    with selectors.DefaultSelector() as ready:
        try:
            for number in range(count):
                reading, writing = os.pipe()
                pid = os.fork()
                if not pid:
                    _work(work, items[number::count], writing)
                os.close(writing)
                workers[reading] = [pid, b""]
                ready.register(reading, selectors.EVENT_READ)
            while workers:
                for key, _ in ready.select():
                    data = os.read(key.fd, 1 << 16)
                    *lines, rest = (workers[key.fd][1] + data).split(b"\n")
                    workers[key.fd][1] = rest
                    results = [json.loads(line) for line in lines]
                    found += [result for result in results if result is not None]
                    done(len(results))
                    if not data:
                        ready.unregister(key.fd)
                        os.close(key.fd)
                        code = os.waitstatus_to_exitcode(os.waitpid(workers.pop(key.fd)[0], 0)[1])
                        if code:
                            raise OSError(code if code > 0 else errno.EINTR, os.strerror(max(code, errno.EINTR)))
        finally:
            for fd, (pid, _) in workers.items():
                os.close(fd)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return found


def _work(work, items, writing):
    """A child of in_processes: writes a line for each item; its exit status reports an error. Never returns."""
    code = errno.EIO
    try:
        for signal_of_parent in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_of_parent, signal.SIG_DFL)
        for item in items:
            os.write(writing, json.dumps(work(item)).encode() + b"\n")
        code = 0
    except OSError as e:
        code = e.errno or code
    finally:
        os._exit(code)


def quoted(text):
    """`text` quoted as one word for a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def free(path):
    info = os.statvfs(path)
    return info.f_bfree * info.f_frsize


def write(partial, path, text, mode=0o644):
    target = os.path.join(partial, path)
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
    with open(target, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(target, 0o755 if path == "bin/atoll" else mode)
