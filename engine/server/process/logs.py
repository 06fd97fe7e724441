"""Log lines: text on a terminal, one JSON object per line elsewhere. Callers never pass prompts, answers or keys."""

import json
import logging
import sys
import time
from typing import TextIO, cast

from engine.server.settings.options import LogFormat


class JsonFormatter(logging.Formatter):
    """`logger.info("…", extra={"fields": {...}})` adds the fields next to the message."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}


class TextFormatter(logging.Formatter):
    def __init__(self, terminal: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._terminal = terminal

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={value}" for key, value in getattr(record, "fields", {}).items())
        level = "" if record.levelno == logging.INFO else record.levelname.lower() + ": "
        source = record.name.rpartition(".")[2]
        text = f"{self.formatTime(record, self.datefmt)} {source:8} {level}{record.getMessage()}{fields}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if not self._terminal:
            return text
        if code := COLOURS.get(record.levelname):
            text = f"{code}{text}\x1b[0m"
        return f"\r\x1b[K{text}"  # overwrite a progress line, if there is one


def setup(style: LogFormat = "auto", level: str = "info", stream: TextIO | None = None) -> None:
    """Send all log lines to `stream` (stderr), replacing any handlers. Idempotent."""
    stream = stream or cast(TextIO, sys.stderr)
    terminal = stream.isatty()
    handler = logging.StreamHandler(stream)
    as_text = style == "text" or (style == "auto" and terminal)
    handler.setFormatter(TextFormatter(terminal) if as_text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries
    for ours in ("atoll", "engine"):
        logging.getLogger(ours).setLevel("DEBUG" if level == "trace" else level.upper())
