"""Real terminals for tests: a program on a pty whose screen pyte draws, or in a pane of tmux. Keys go in as bytes.

    with Pty([ATOLL], {"TERM": "vt220"}) as terminal:
        terminal.until("where the medium is")
        terminal.press("tab", "f6")
        terminal.hang_up()       # as a dropped SSH session: the kernel sends SIGHUP
"""

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte

ATOLL = str(Path(sys.executable).with_name("atoll"))
WIDTH, HEIGHT = 80, 24

# What a keyboard sends, as terminfo has it: the Linux console's F1 to F5 are its own.
_KEYS = {
    "enter": "\r", "tab": "\t", "escape": "\x1b", "space": " ", "up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C",
    "left": "\x1b[D", "pageup": "\x1b[5~", "pagedown": "\x1b[6~", "ctrl-c": "\x03",
    "f6": "\x1b[17~", "f7": "\x1b[18~", "f8": "\x1b[19~", "f9": "\x1b[20~", "f10": "\x1b[21~", "f11": "\x1b[23~",
    "f12": "\x1b[24~",
}  # fmt: skip
_PF = {"f1": "\x1bOP", "f2": "\x1bOQ", "f3": "\x1bOR", "f4": "\x1bOS"}
KEYS = {
    "xterm-256color": {**_KEYS, **_PF, "f5": "\x1b[15~"},
    "linux": {**_KEYS, **{f"f{number}": f"\x1b[[{'ABCDE'[number - 1]}" for number in range(1, 6)}},
    "vt220": {**_KEYS, **_PF},
}
_OF_TMUX = {"pageup": "PPage", "pagedown": "NPage", "ctrl-c": "C-c"}


class Terminal(ABC):
    """A program in a terminal of 80 columns and 24 lines."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.command = list(command)
        self.environment = {**os.environ, "LANG": "C.UTF-8", **environment}

    def __enter__(self) -> "Terminal":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def start(self) -> None:
        """Run the program in a new terminal."""

    @abstractmethod
    def rows(self) -> list[str]:
        """The lines that the terminal shows, without spaces at their ends."""

    @abstractmethod
    def press(self, *keys: str) -> None: ...

    @abstractmethod
    def type(self, text: str) -> None: ...

    @abstractmethod
    def hang_up(self) -> None:
        """The terminal goes away; the program is sent SIGHUP. Returns when it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL to the program; its terminal goes as well."""

    @abstractmethod
    def close(self) -> None:
        """Nothing stays behind."""

    def text(self) -> str:
        return "\n".join(self.rows())

    def until(self, *patterns: str, seconds: float = 60.0) -> str:
        """The screen, once it matches all of these regular expressions."""
        end = time.monotonic() + seconds
        while not all(re.search(pattern, text := self.text()) for pattern in patterns):
            assert time.monotonic() < end, f"{patterns} did not come in {seconds:.0f} s:\n{text}"
            time.sleep(0.05)
        return text


class Pty(Terminal):
    """`raw`: everything that the program has written since `start`; `came`: when how much of it was there.

    `enter` is called in the child before exec. Without `draws` there is no screen: a bench must not compute beside what
    it measures.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], *, size: tuple[int, int] = (WIDTH, HEIGHT),
                 enter: Callable[[], None] = lambda: None, draws: bool = True) -> None:  # fmt: skip
        super().__init__(command, environment)
        self.size, self._enter, self._draws = size, enter, draws
        self.keys = KEYS.get(self.environment.get("TERM", ""), KEYS["xterm-256color"])
        self.process: subprocess.Popen[bytes] | None = None
        self._master = -1

    def start(self) -> None:
        self.raw = bytearray()
        self.came: list[tuple[float, int]] = []
        self.screen = pyte.Screen(*self.size)
        self._stream, self._lock = pyte.ByteStream(self.screen), threading.Lock()
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", self.size[1], self.size[0], 0, 0))
        self.before = termios.tcgetattr(slave)

        def controlled() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            self._enter()

        self.process = subprocess.Popen(self.command, env=self.environment, stdin=slave, stdout=slave, stderr=slave,
                                        start_new_session=True, preexec_fn=controlled)  # fmt: skip
        os.close(slave)
        self._reader = threading.Thread(target=self._read, args=(self._master,), daemon=True)
        self._reader.start()

    def _read(self, master: int) -> None:
        while True:
            try:
                if not select.select([master], [], [], 0.2)[0]:
                    continue
                got = os.read(master, 1 << 16)
            except (OSError, ValueError):
                return
            if not got:
                return
            with self._lock:
                self.raw += got
                self.came.append((time.monotonic(), len(self.raw)))
                if not self._draws:
                    continue
                with contextlib.suppress(Exception):  # a sequence that pyte does not know
                    self._stream.feed(got)

    def rows(self) -> list[str]:
        with self._lock:
            return [row.rstrip() for row in self.screen.display]

    def drawn_at(self, pattern: bytes, since: int = 0, seconds: float = 20.0) -> float:
        """When the first of `pattern` behind the byte `since` had come whole, in seconds of time.monotonic()."""
        end = time.monotonic() + seconds
        while (at := self.raw.find(pattern, since)) < 0:
            assert time.monotonic() < end, (pattern, bytes(self.raw[since:])[-2000:])
            time.sleep(0.002)
        with self._lock:
            return next(moment for moment, count in self.came if count >= at + len(pattern))

    def modes(self) -> list:
        """How the terminal's line discipline is set: cooked, echoing and so on."""
        return termios.tcgetattr(self._master)

    def press(self, *keys: str) -> None:
        for key in keys:
            os.write(self._master, self.keys.get(key, key).encode())
            time.sleep(0.15)  # as fast as a person; an Esc must not meet the next key

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def hang_up(self) -> None:
        self._close_master()
        assert self.process is not None
        self.process.wait(20)

    def kill(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        self._close_master()

    def wait(self, seconds: float = 20.0) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self._close_master()

    def _close_master(self) -> None:
        if self._master >= 0:
            master, self._master = self._master, -1
            os.close(master)
            self._reader.join(5)


class Tmux(Terminal):
    """A pane of a tmux server of its own."""

    _made = 0

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        super().__init__(command, {"TERM": "xterm-256color", **environment})
        self._name = ""

    def _tmux(self, *words: str, check: bool = True) -> str:
        return subprocess.run(["tmux", "-L", self._name, "-f", os.devnull, *words], env=self.environment, text=True,
                              capture_output=True, check=check, timeout=30).stdout  # fmt: skip

    def start(self) -> None:
        Tmux._made += 1  # the server before may not be gone yet
        self._name = f"atoll-test-{os.getpid()}-{Tmux._made}"
        self._tmux("new-session", "-d", "-s", "atoll", "-x", str(WIDTH), "-y", str(HEIGHT), *self.command)
        self._pid = int(self._tmux("display-message", "-p", "-t", "atoll", "#{pane_pid}"))

    def rows(self) -> list[str]:
        return self._tmux("capture-pane", "-p", "-t", "atoll", check=False).splitlines()

    def press(self, *keys: str) -> None:
        for key in keys:
            self._tmux("send-keys", "-t", "atoll", _OF_TMUX.get(key, key.capitalize() if len(key) > 1 else key))
            time.sleep(0.15)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-t", "atoll", "-l", text)

    def hang_up(self) -> None:
        self._tmux("kill-session", "-t", "atoll")
        self._gone()

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self._gone()
        self._tmux("kill-server", check=False)

    def _gone(self) -> None:
        end = time.monotonic() + 20
        with contextlib.suppress(FileNotFoundError):
            while ") Z " not in Path(f"/proc/{self._pid}/stat").read_text():
                assert time.monotonic() < end, "the program outlives its terminal"
                time.sleep(0.05)

    def close(self) -> None:
        self._tmux("kill-server", check=False)


def missing_tmux() -> str:
    """Why there is no tmux here, or nothing."""
    return "" if shutil.which("tmux") else "tmux is not here: apt-get install tmux"
