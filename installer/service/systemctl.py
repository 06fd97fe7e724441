"""Run systemd's own commands: with a time limit, in one language, without a pager and without questions."""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended. `code` is None if it ran past its time, 127 if there is no such command."""

    code: int | None
    out: str = ""
    err: str = ""


Runner = Callable[[Sequence[str], float], Done]


def run(words: Sequence[str], timeout: float) -> Done:
    """Run it with nothing of the caller's environment except the path to programs."""
    environment = {
        "PATH": os.environ.get("PATH", "") or "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "SYSTEMD_PAGER": "",
        "SYSTEMD_COLORS": "0",
        "SYSTEMD_LOG_TARGET": "console",
    }
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout,
            env=environment, cwd="/", start_new_session=True,  # Ctrl-C is for us: a job that was begun ends
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Done(None)
    except OSError as error:
        return Done(127, err=f"{words[0]}: {error.strerror}")
    return Done(done.returncode, done.stdout, done.stderr)


def parse_show(text: str) -> dict[str, dict[str, str]]:
    """Properties by unit, from `systemctl show` of several units: blocks of KEY=value with an empty line between
    them."""
    units: dict[str, dict[str, str]] = {}
    for block in text.strip().split("\n\n"):
        facts = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in facts:
            units[facts["Id"]] = facts
    return units


def journal(runner: Runner, names: Sequence[str], lines: int) -> list[str]:
    """The last lines of these units since the boot, as they were written."""
    chosen = [word for name in names for word in ("--unit", name)]
    done = runner(["journalctl", "--quiet", "--no-pager", "--boot", "--output=cat", f"--lines={lines}", *chosen], 20.0)
    return done.out.splitlines()[-lines:] if done.code == 0 else []
