"""The end of a process that has nothing left to save."""

import atexit
import logging
import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """Exit without taking every library apart first: the kernel frees the memory in a tenth of that time.

    What was registered with `atexit` still runs, and what was logged is written.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
