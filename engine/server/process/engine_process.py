"""The engine process: one thread that runs the scheduler loop and, between two steps, serves a Unix socket.

    python -m engine.server.process.engine_process --uds /run/atoll/engine.sock --model /models/llama [engine flags]

It has no network, sees token ids and never text, and is meant to run as a unit of `Type=notify` with a watchdog that
only this loop feeds. Exit status: 0 stopped, 2 a flag cannot be honoured, 11 the model's files are damaged, 1 a defect.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import AtollError, ConfigError, ModelError, complain, log_fields
from engine.message import msg
from engine.server.ipc.server import IpcServer
from engine.server.process.engine_service import LOAD_PATIENCE_SECONDS, Core, EngineService, ProgressCallback
from engine.server.process.notify import Notifier
from engine.worker.startup.start_clock import StartClock

if TYPE_CHECKING:
    from engine.server.settings.options import EngineOptions

log = logging.getLogger("atoll.engine")

EXIT_CONFIG = 2
EXIT_MODEL = 11
FAREWELL_SECONDS = 5.0    # how long last words wait for a gateway that was started with us and has not connected yet


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill us when the process that started us dies: without it, nobody can use this engine."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it had died before we asked
        os._exit(1)


def go_offline() -> None:
    """Keep libraries from using a network. The unit has no network; this is for starts outside the unit."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1",
                      HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1")


@contextlib.contextmanager
def signals(service: EngineService, server: IpcServer, *, under_parent: bool) -> Iterator[Callable[[], None]]:
    """Handle signals. SIGTERM (and Ctrl-C, unless a parent handles it) drains; while loading it ends the process at
    once. SIGINT comes from a successor: then that process, and not this one, reports to systemd.

    Yields a function to call when loading is over.
    """
    loading = True

    def on_stop(signum: int, _: FrameType | None) -> None:
        if loading:
            raise SystemExit(0)
        service.stop(silently=signum == signal.SIGINT)

    def loaded() -> None:
        nonlocal loading
        loading = False

    signal.signal(signal.SIGTERM, on_stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN if under_parent else on_stop)
    signal.set_wakeup_fd(server.wake_fd, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # dumps the stacks of a loop that hangs
    try:
        yield loaded
    finally:
        signal.set_wakeup_fd(-1)


def serve(options: "EngineOptions", server: IpcServer, notifier: Notifier, *, started: float) -> int:
    """Load and serve until stopped; returns the exit status."""
    service = EngineService(server, notifier, watchdog=options.watchdog)

    def build(progress: ProgressCallback) -> Core:
        progress("importing torch", 0, 0)
        clock = StartClock(started)
        gc.disable()  # what is imported stays: traversing it again and again is a tenth of the time
        from engine.worker.startup.build import build_engine

        gc.enable()
        clock.lap("imports")
        return build_engine(options.engine, progress, clock)

    patience = FAREWELL_SECONDS if options.parent_pid else 0.0
    with signals(service, server, under_parent=bool(options.parent_pid)) as loaded:
        try:
            service.load(build, started)
            loaded()
            service.run()
        except AtollError as error:
            log.error("%s", error, extra=log_fields(error))
            complain("atoll engine", error, logged=True)
            service.farewell(error.message, error.hint, patience=patience)
            return _status_of(error)
        except Exception as error:
            log.exception("the engine cannot go on", extra=log_fields(error))
            defect = msg("The engine failed with an internal error: {kind}.", kind=type(error).__name__)
            service.farewell(defect, msg("Its log holds the traceback."), patience=patience)
            return 1
    server.close()
    log.info("stopped")
    return 0


def preload(config: EngineConfig) -> int:
    """Do the part of a start that needs neither the device nor the socket: import libraries, check settings and model.

    Returns 0, or the exit status if the start cannot succeed.
    """
    from engine.worker.startup.build import preload_worker

    try:
        preload_worker(config)
    except AtollError as error:
        log.error("%s", error, extra=log_fields(error))
        complain("atoll engine", error, logged=True)
        return _status_of(error)
    return 0


def _status_of(error: AtollError) -> int:
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_MODEL if isinstance(error, ModelError) else 1


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()
    faulthandler.enable()
    go_offline()
    from engine.server.ipc.framing import PeerPolicy, listen
    from engine.server.process import logs
    from engine.server.process.exit import exit_now
    from engine.server.process.takeover import take_over
    from engine.server.settings.commands import parse_engine

    try:
        options = parse_engine(sys.argv[1:] if argv is None else argv)
        logs.setup(options.log_format, options.log_level)
        if options.parent_pid:
            die_with_parent(options.parent_pid)
        if options.gpus:  # before any library lists the devices
            os.environ["CUDA_VISIBLE_DEVICES"] = options.gpus
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the indices of nvidia-smi
        policy = PeerPolicy.parse(options.allow_user, options.allow_group)
        if options.check:
            return preload(options.engine)
        notifier = Notifier()
        if options.take_over:
            take_over(options.take_over, lambda: preload(options.engine), notifier)
            notifier.set_watchdog(LOAD_PATIENCE_SECONDS)
            started = time.monotonic()
        shared = bool(options.allow_user or options.allow_group)
        server = IpcServer(listen(options.uds, shared_with_group=shared), policy, pid=os.getpid())
    except ConfigError as error:
        complain("atoll engine", error)
        return EXIT_CONFIG
    try:
        status = serve(options, server, notifier, started=started)
    finally:
        options.uds.unlink(missing_ok=True)
    return exit_now(status)


if __name__ == "__main__":
    sys.exit(main())
