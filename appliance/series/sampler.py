"""`atoll sampler`: keeps the history of the service at all times, for the dashboard and for reports.

On a server atoll-sampler.service runs it, under a prefix the supervisor. It reads /metrics over the gateway's Unix
socket and writes one directory, var/lib/atoll/series. A pilot has its own file (appliance/service/pilot/records.py),
because time that nobody watched must not count for its stages.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from appliance.series.recorder import Recorder
from appliance.series.store import SeriesError, Store
from installer.base.layout import Layout

SECONDS = 15.0
MOST_GAP = 60.0
_GPU_EVERY = 60.0      # each time in a separate process
_OPEN_AGAIN = 60.0     # after a file that could not be opened


def file_of(layout: Layout) -> Path:
    return layout.series / "series.db"


def run(socket: Path, file: Path, every: float) -> NoReturn:
    """Until a signal comes. A full disk costs the samples that do not fit, and is said once."""
    said = ""
    while True:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with Store(file, most_gap=max(MOST_GAP, 3 * every)) as store:
                if store.opened.set_aside is not None:
                    _say(f"the time series was damaged; it is now {store.opened.set_aside}, and a new one was begun")
                _sample(Recorder(socket, store, gpu_every=_GPU_EVERY), file, every)
        except (SeriesError, OSError) as error:
            if (why := f"no history is kept: {error}") != said:
                _say(why)
                said = why
            time.sleep(_OPEN_AGAIN)


def _sample(recorder: Recorder, file: Path, every: float) -> None:
    """Until the file is no longer the one that was opened."""
    opened, said = file.stat().st_ino, ""
    while file.exists() and file.stat().st_ino == opened:
        why = "" if recorder.sample() is not None else f"a sample was not kept: {recorder.why}"
        if why and why != said:
            _say(why)
        said = why
        time.sleep(every - time.monotonic() % every)


def _say(text: str) -> None:
    print(f"atoll sampler: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `atoll sampler`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="atoll sampler", description=(
        "Keep the history of /metrics and of the GPUs. A unit runs it on a server, the supervisor under a prefix."))
    parser.add_argument("--socket", type=Path, required=True, help="the gateway's socket for /metrics")
    parser.add_argument("--directory", type=Path, required=True, help="where series.db is kept")
    parser.add_argument("--every", type=float, default=SECONDS, help="seconds between two samples (%(default)s)")
    given = parser.parse_args(argv)
    if not 0.1 <= given.every <= 3600:
        parser.error("--every: 0.1 to 3600 seconds")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # closes the file
    os.umask(0o077)
    try:
        run(given.socket, given.directory / "series.db", given.every)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
