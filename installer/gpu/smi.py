"""GPU facts from `nvidia-smi`: a CSV query, and its XML report if the query is refused.

Its output format is not guaranteed, so every field may be missing. A field that this version does not know is left out
and the query repeated.
"""

import csv
import io
import os
import re
import shutil
import time
from collections.abc import Callable

from installer.gpu import smi_xml, values
from installer.gpu.command import Output, run
from installer.gpu.facts import Gpu, GpuFacts

BUDGET = 7.0    # seconds for everything; without persistence mode each call wakes the driver, about 1 s per GPU
MAX_GPUS = 64
_PLACES = ("/usr/bin", "/usr/local/bin", "/bin", "/usr/local/nvidia/bin", "/opt/nvidia/bin")
_UNKNOWN_FIELD = re.compile(r'[Ff]ield "([\w.]+)" is not a valid field')

# field of the query → field of Gpu, and how it is read
FIELDS: dict[str, tuple[str, Callable[[str | None], object]]] = {
    "index": ("index", lambda text: values.count(text, 1024)),
    "uuid": ("uuid", values.uuid),
    "pci.bus_id": ("pci", values.pci),
    "name": ("name", values.word),
    "driver_version": ("driver", values.driver),
    "compute_cap": ("compute_cap", values.pair),
    "memory.total": ("memory_total", values.size),
    "memory.used": ("memory_used", values.size),
    "memory.free": ("memory_free", values.size),
    "persistence_mode": ("persistence", values.switch),
    "compute_mode": ("compute_mode", values.compute_mode),
    "mig.mode.current": ("mig", values.switch),
    "ecc.mode.current": ("ecc", values.switch),
    "ecc.errors.corrected.volatile.total": ("ecc_corrected", values.count),
    "ecc.errors.uncorrected.volatile.total": ("ecc_uncorrected", values.count),
    "pcie.link.gen.current": ("pcie_gen", lambda text: values.count(text, 64)),
    "pcie.link.width.current": ("pcie_width", lambda text: values.count(text, 64)),
    "pcie.link.width.max": ("pcie_width_max", lambda text: values.count(text, 64)),
    "power.draw": ("power_draw", values.number),
    "power.limit": ("power_limit", values.number),
    "power.default_limit": ("power_default", values.number),
    "temperature.gpu": ("temperature", lambda text: values.count(text, 1000)),
}
# Without these, a query does not suffice.
_ESSENTIAL = ("uuid", "memory_total", "compute_cap")


def find() -> str | None:
    """The program, on PATH or where drivers put it."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_PLACES])
    return shutil.which("nvidia-smi", path=path)


def query(budget: float = BUDGET) -> GpuFacts:
    """Ask nvidia-smi. Never raises and never takes much longer than `budget` seconds."""
    program = find()
    if program is None:
        return GpuFacts(smi_error="nvidia-smi: command not found")
    deadline = time.monotonic() + budget
    asked = _ask_csv(program, deadline)
    facts = parse_csv(asked[0].stdout, asked[1]) if asked[0].ok else GpuFacts()
    lacking = not facts.gpus or any(getattr(gpu, name) is None for gpu in facts.gpus for name in _ESSENTIAL)
    hung = "no answer" in asked[0].problem
    report = GpuFacts()
    if not hung and (left := deadline - time.monotonic()) > 0.2:
        # The report also has what the query lacks: the CUDA version, pending row remaps, processes.
        output = run([program, "-q", "-x"], left)
        report = smi_xml.parse(output.stdout) if output.ok else GpuFacts()
    gpus = _together(facts.gpus, report.gpus)
    if not gpus:
        return GpuFacts(smi_error=f"nvidia-smi: {asked[0].said if not asked[0].ok else 'it lists no GPU'}")
    error = f"nvidia-smi: {asked[0].said}" if lacking and not asked[0].ok and not report.gpus else ""
    return GpuFacts(gpus, facts.driver or report.driver, report.cuda, smi_error=error, sources=("nvidia-smi",))


def _ask_csv(program: str, deadline: float) -> tuple[Output, list[str]]:
    """The CSV query, without the fields that this nvidia-smi does not know. Returns also the fields that were asked
    for."""
    wanted = list(FIELDS)
    while True:
        left = max(0.1, deadline - time.monotonic())
        output = run([program, f"--query-gpu={','.join(wanted)}", "--format=csv,noheader,nounits"], left)
        unknown = _UNKNOWN_FIELD.search(output.stdout + output.stderr)
        if output.ok or not unknown or unknown[1] not in wanted or len(wanted) == 1:
            return output, wanted
        wanted.remove(unknown[1])


def parse_csv(text: str, wanted: list[str]) -> GpuFacts:
    """GPUs from the lines of a query for the fields `wanted`. Lines that do not fit are skipped."""
    gpus, driver = [], None
    try:
        rows = [row for row in csv.reader(io.StringIO(text.replace("\0", "")), skipinitialspace=True) if row]
    except csv.Error:
        rows = []
    for row in rows[:MAX_GPUS]:
        if len(row) != len(wanted):
            continue
        read = {FIELDS[name][0]: FIELDS[name][1](text) for name, text in zip(wanted, row, strict=True)}
        driver = driver or read.pop("driver", None)
        read.pop("driver", None)
        gpu = Gpu(**read)  # type: ignore[arg-type]
        if gpu.index is not None or gpu.uuid or gpu.pci:
            gpus.append(gpu)
    return GpuFacts(tuple(gpus), driver if isinstance(driver, str) else None)


def _together(queried: tuple[Gpu, ...], reported: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    if not queried:
        return reported
    filled = []
    for gpu in queried:
        known = next((other for other in reported if other.is_the_same_as(gpu)), None)
        filled.append(gpu.filled_from(known) if known else gpu)
    return tuple(filled)
