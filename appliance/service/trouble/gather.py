"""Look at the machine and the installation. Reads only; what this user may not read counts as not known."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from appliance.service.trouble.derive import derive
from appliance.service.trouble.record import Holder, Scene, Trouble
from installer.base.errors import ExitCode, InstallError
from installer.base.layout import Layout
from installer.operate.status import status
from installer.preflight import gpu as gpu_checks
from installer.preflight.machine import Machine
from installer.preflight.owners import Owner
from installer.preflight.record import PreflightContext
from installer.release import config
from installer.service.log_file import readable, tail
from installer.service.prefix import PrefixService
from installer.service.systemd import SystemdService

_LOG_LINES = 60
_FEW_BYTES = 256 << 20  # a desktop's GPU memory is no trouble


def troubles(layout: Layout, media: Iterable[Path] = ()) -> list[Trouble]:
    """What is wrong now, the most serious first. Raises InstallError where the installation cannot be read at all."""
    return derive(gather(layout, media))


def gather(layout: Layout, media: Iterable[Path] = (), *, machine: Machine | None = None) -> Scene:
    machine = machine or Machine()
    try:
        facts = status(layout)
    except InstallError as error:
        if error.exit_code != ExitCode.USAGE:
            raise
        facts = None
    context = PreflightContext(layout, config.Endpoint("127.0.0.1", 0), device=_device(layout), machine=machine)
    return Scene(
        where=layout.prefix_option, log=None if layout.system else layout.log, status=facts, gpu=tuple(_gpu(context)),
        holders=tuple(_holders(layout, machine)), media=tuple(path for path in media if not path.exists()),
        log_tail=tuple(readable(line) for line in _log(layout)),
    )  # fmt: skip


def _device(layout: Layout) -> str:
    """cpu where every model is set to it; else cuda if one insists on it, else auto."""
    with contextlib.suppress(InstallError, OSError):
        text = config.read_text(layout.config) or ""
        tables = list(config.model_tables(text, layout.config).values()) if layout.system else [
            config.parse(text, layout.config)]  # fmt: skip
        devices = {str(table.get("device", "auto")) for table in tables}
        return next((name for name in ("cuda", "auto", "cpu") if name in devices), "auto")
    return "auto"


def _gpu(context: PreflightContext) -> Iterable:
    """The first of the GPU's checks that does not pass; the later ones would only repeat it."""
    bus = gpu_checks.gpu(context)
    if bus.status != "pass" or context.no_gpu_needed() is not None:
        return [bus] if bus.status == "fail" else []
    for check in (gpu_checks.nvml, gpu_checks.driver):
        if (record := check(context)).status == "fail":
            return [record]
    return []


def _holders(layout: Layout, machine: Machine) -> Iterable[Holder]:
    service = SystemdService(layout) if layout.system else PrefixService(layout)
    try:
        ours = service.pids()
    except (InstallError, OSError):
        ours = frozenset()
    for gpu in machine.gpus().gpus:
        for process in gpu.processes:
            if process.pid not in ours and (process.used or 0) >= _FEW_BYTES:
                owner = Owner.of(machine, process.pid, process.name)
                yield Holder(f"GPU {gpu.index}", owner.text, process.used or 0, owner.stop_command)


def _log(layout: Layout) -> list[str]:
    if not layout.system:
        return tail(layout.log, _LOG_LINES)
    with contextlib.suppress(InstallError, OSError):
        return SystemdService(layout).log_tail(_LOG_LINES)
    return []
