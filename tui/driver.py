"""Textual's driver for Linux, for consoles, for a quick Esc, and for a terminal that may go away at any time.

When it does, writing to it fails. Textual's writing thread would end there, its queue would fill, and the program would
wait for ever to draw, holding the seat of its operator.
"""

import os
import select
import signal
from codecs import getincrementaldecoder
from functools import lru_cache
from typing import IO, Any, cast

from rich.segment import Segment
from rich.style import Style
from textual import constants
from textual._xterm_parser import XTermParser
from textual.color import Color
from textual.drivers.linux_driver import LinuxDriver
from textual.filter import LineFilter

from tui.pauses import key_came

# Pointer shapes, the Kitty keyboard, synchronised drawing, sizes as keys: a console may print what it does not know.
_MODERN = ("\x1b]22;", "\x1b[>", "\x1b[<", "\x1b[?2026", "\x1b[?2048")
_WAIT_SECONDS = 0.1


class Driver(LinuxDriver):
    def __init__(self, app: Any, **more: Any) -> None:
        super().__init__(app, **more)
        self._plain = bool(app.plain)
        self._file = cast(IO[str], _UntilGone(self._file))

    def write(self, data: str) -> None:
        if not (self._plain and data.startswith(_MODERN)):
            super().write(data)

    def run_input_thread(self) -> None:
        """Like Textual's, which checks only ten times a second whether an Esc is a key or begins a key's sequence."""
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        data = b""
        while not self.exit_event.is_set():
            wait = constants.ESCAPE_DELAY if data.endswith(b"\x1b") else _WAIT_SECONDS
            data = b""
            try:
                if select.select([self.fileno], [], [], wait)[0]:
                    data = os.read(self.fileno, 4096)
                    if not data:
                        raise OSError
                    key_came()
            except OSError:
                _tell()
                return
            for event in (*parser.feed(decode(data)), *parser.tick()) if data else parser.tick():
                self.process_message(event)


class _UntilGone:
    """The terminal as a file. Once it is gone, what is written to it is dropped, and the program leaves."""

    def __init__(self, file: Any) -> None:
        self._file, self._gone = file, False

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> None:
        self._try(lambda: self._file.write(text))

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, what: Any) -> None:
        if self._gone:
            return
        try:
            what()
        except OSError:
            self._gone = True
            _tell()


def _tell() -> None:
    """Send SIGHUP to this process: the kernel sends it only to the leader of a session."""
    os.kill(os.getpid(), signal.SIGHUP)


class WithoutColours(LineFilter):
    """Text with its own background, such as the selected line, is shown in reverse instead."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [segment if segment.style is None else Segment(segment.text, _in_reverse(segment.style), segment.control)
                for segment in segments]  # fmt: skip


@lru_cache(1024)
def _in_reverse(style: Style) -> Style:
    stands_out = style.reverse or (style.bgcolor is not None and not style.bgcolor.is_default)
    return style.without_color + Style(reverse=stands_out, meta=style.meta)
