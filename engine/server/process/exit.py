"""A fast exit for a process that has nothing left to save."""

import atexit
import logging
import os
import sys
from typing import NoReturn


def exit_now(status: int) -> NoReturn:
    """Exit without shutting down every library first: the kernel frees the memory in a tenth of the time.

    `atexit` functions still run, and logs are flushed.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
