"""Messages and progress on the operator's terminal. A part of install.sh."""

import contextlib
import sys
import time

from offline_bundle.errors import BundleError
from offline_bundle.medium.language import t

PREFLIGHT, INTERRUPTED = 3, 130  # exit codes, beside those of offline_bundle/errors.py
TAMPERED = t("The medium is damaged or was tampered with. Do not use it; get it again from its vendor.")
COPY_AGAIN = t("Copy the medium again from its source.")


def refused(exit_code, message, hint=""):
    """The error that ends install.sh: what happened, what to do, the exit code."""
    return BundleError(message, hint, exit_code)


def say(text=""):
    """One line on stderr. A terminal that has gone away does not stop the work."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class ProgressLine:
    """Bytes done: on one line of a terminal, elsewhere a new line every few seconds."""

    def __init__(self, label, total):
        self.label, self.total, self.done, self.last = label, max(total, 1), 0, 0.0
        self.terminal = sys.stderr.isatty()

    def at(self, done):
        self.done = max(self.done, min(done, self.total))
        now = time.monotonic()
        if now - self.last < (0.2 if self.terminal else 5.0):
            return
        self.last = now
        text = t("{label}: {done} of {total} MiB ({percent} %)", label=self.label, done=self.done >> 20,
                 total=self.total >> 20, percent=100 * self.done // self.total)
        with contextlib.suppress(OSError, ValueError):
            print("\r" + text if self.terminal else text, end=" " if self.terminal else "\n", file=sys.stderr)
            sys.stderr.flush()

    def end(self, text):
        if self.terminal:
            say("\r\033[K" + text)
        else:
            say(text)
