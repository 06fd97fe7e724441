"""`nvidia-smi -q -x`, read event by event: no entities, no deep nesting, no endless documents."""

from dataclasses import dataclass, field
from xml.parsers import expat  # entity declarations end the parse, see _Reader

from installer.gpu import values
from installer.gpu.command import clean
from installer.gpu.facts import Gpu, GpuFacts, GpuProcess

MAX_DEPTH = 16
MAX_ELEMENTS = 400_000   # one GPU's report has about 600
MAX_TEXT = 400           # characters of one element; longer ones are not facts


class _RefusedError(Exception):
    """Something that no report of nvidia-smi contains."""


@dataclass
class _Reader:
    """Collects the texts of the document, per GPU by their path below <gpu>."""

    path: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)            # outside of any GPU
    gpus: list[dict[str, str]] = field(default_factory=list)
    processes: list[list[dict[str, str]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    elements: int = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self.elements += 1
        if len(self.path) >= MAX_DEPTH or self.elements > MAX_ELEMENTS:
            raise _RefusedError
        self.path.append(name)
        self.words = []
        if self.path == ["nvidia_smi_log", "gpu"]:
            self.gpus.append({"@id": attributes.get("id", "")})
            self.processes.append([])
        elif name == "process_info" and self.processes:
            self.processes[-1].append({})

    def text(self, data: str) -> None:
        if sum(map(len, self.words)) < MAX_TEXT:
            self.words.append(data)

    def end(self, name: str) -> None:
        said, below = "".join(self.words)[:MAX_TEXT], self.path[1:]
        if below[:1] == ["gpu"] and self.gpus:
            if "process_info" in below[:-1] and self.processes[-1]:
                self.processes[-1][-1].setdefault(name, said)
            else:
                self.gpus[-1].setdefault("/".join(below[1:]), said)
        else:
            self.texts.setdefault("/".join(below), said)
        self.path.pop()
        self.words = []


def parse(text: str) -> GpuFacts:
    """Facts of the report; empty if the text is not a complete report."""
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.EntityDeclHandler = _refuse
    parser.ExternalEntityRefHandler = _refuse
    parser.buffer_text = True
    try:
        parser.Parse(text, True)
    except (expat.ExpatError, _RefusedError, ValueError):
        return GpuFacts()
    gpus = [_gpu(at, *both) for at, both in enumerate(zip(reader.gpus[:64], reader.processes, strict=False))]
    driver, cuda = reader.texts.get("driver_version"), reader.texts.get("cuda_version")
    return GpuFacts(tuple(gpus), values.driver(driver), values.pair(cuda))


def _refuse(*_: object) -> int:
    raise _RefusedError

_DRAWN = ("average_power_draw", "instant_power_draw", "power_draw")   # the last is older


def _gpu(position: int, texts: dict[str, str], processes: list[dict[str, str]]) -> Gpu:
    def get(*paths: str) -> str | None:
        return next((texts[path] for path in paths if values.word(texts.get(path))), None)

    errors = {path: text for path, text in texts.items() if path.startswith("ecc_errors/volatile/")}
    volatile = {path.rpartition("/")[2]: values.count(text) for path, text in errors.items()}
    link = "pci/pci_gpu_link_info/link_widths"
    power = ("gpu_power_readings", "power_readings")  # its name until R525
    return Gpu(
        index=position,
        uuid=values.uuid(get("uuid")),
        pci=values.pci(get("pci/pci_bus_id")) or values.pci(texts["@id"]),
        minor=values.count(get("minor_number"), 1024),
        name=values.word(get("product_name")),
        memory_total=values.size(get("fb_memory_usage/total")),
        memory_used=values.size(get("fb_memory_usage/used")),
        memory_free=values.size(get("fb_memory_usage/free")),
        persistence=values.switch(get("persistence_mode")),
        compute_mode=values.compute_mode(get("compute_mode")),
        mig=values.switch(get("mig_mode/current_mig")),
        ecc=values.switch(get("ecc_mode/current_ecc")),
        ecc_corrected=_sum(volatile, "_correctable"),
        ecc_uncorrected=_sum(volatile, "_uncorrectable"),
        remap_pending=values.switch(get("remapped_rows/remapped_row_pending")),
        remap_failed=values.switch(get("remapped_rows/remapped_row_failure")),
        pcie_gen=values.count(get("pci/pci_gpu_link_info/pcie_gen/current_link_gen"), 64),
        pcie_width=values.count((get(f"{link}/current_link_width") or "").rstrip("x"), 64),
        pcie_width_max=values.count((get(f"{link}/max_link_width") or "").rstrip("x"), 64),
        power_draw=values.number(get(*(f"{p}/{name}" for p in power for name in _DRAWN))),
        power_limit=values.number(get(*(f"{p}/current_power_limit" for p in power), "power_readings/power_limit")),
        power_default=values.number(get(*(f"{p}/default_power_limit" for p in power))),
        temperature=values.count(get("temperature/gpu_temp"), 1000),
        fabric_state=values.word(get("fabric/state")),
        processes=tuple(found for process in processes[:4096] if (found := _process(process))),
    )


def _sum(counters: dict[str, int | None], part: str) -> int | None:
    """All counters of one kind (SRAM parity, SECDED, DRAM, …); None if there is none."""
    known = [value for name, value in counters.items() if part in name and value is not None]
    return sum(known) if known else None


def _process(texts: dict[str, str]) -> GpuProcess | None:
    pid = values.count(texts.get("pid"), 1 << 22)
    return GpuProcess(pid, clean(texts.get("process_name", "")), values.size(texts.get("used_memory"))) if pid else None
