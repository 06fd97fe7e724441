"""GPU: each GPU of this machine with what matters of it, and the checks."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual import work
from textual.widget import Widget
from textual.widgets import Static

from appliance.service.gpu_details import GpuDetail, GpuDetails, gpu_details
from appliance.service.words import human_bytes, t
from tui.look import HEIGHT
from tui.steps.body import StepBody

LEAST_WIDTH = 60      # of the pane, before it has a size
MOST_LINES = 8        # of an 80x24 screen
MOST_PROCESSES, MOST_NAME = 3, 24


class GpuBody(StepBody):
    STEP = "gpu"
    LEAD = t("Can this machine run the models on the medium?")
    HELP = t(
        "Every GPU with its memory, driver and health; then the checks of the machine.\n"
        "A check that fails says why it matters and which command helps. Fix the cause, then F5 checks again.\n"
        "WARN never stops you. Some failed checks can be waived with a reason (F9); strict ones cannot."
    )

    details: GpuDetails | None = None

    def parts(self) -> Iterator[Widget]:
        yield Static("", id="gpus", classes="facts", markup=False)

    def on_mount(self) -> None:
        super().on_mount()
        self._look()

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _look(self) -> None:
        details = gpu_details()
        self.app.call_from_thread(self._seen, details)

    def _seen(self, details: GpuDetails) -> None:
        self.details = details
        self.draw_facts()

    def run(self) -> None:
        super().run()
        self._look()

    def draw_facts(self) -> None:
        width = self.query_one("#gpus").size.width or LEAST_WIDTH
        self.query_one("#gpus", Static).update(Text("\n".join(self._lines(width)), no_wrap=True))

    def on_resize(self) -> None:
        self.draw_facts()

    def _lines(self, width: int) -> list[str]:
        details, machine = self.details, self.front.machine
        if details is None:
            return [self.say(t("Checking this machine ..."))]
        lines = []
        if machine is not None:
            lines.append(self.say(t("This machine has {memory} of memory.", memory=human_bytes(machine.memory_bytes))))
        if not details.gpus:
            return [*lines, self.say(t("No GPU was found; models would compute on the CPU."))]
        driver, cuda = details.driver or "?", details.cuda or "?"
        lines.append(self.say(t("Driver {driver}, CUDA {cuda}", driver=driver, cuda=cuda)))
        blocks = [self._of(group, width) for group in alike(details.gpus)]
        room = max(MOST_LINES, self.app.size.height - HEIGHT + MOST_LINES)  # the checks below need theirs
        shown = 0
        for block in blocks:
            if shown and len(lines) + len(block) > room:
                break
            lines, shown = lines + block, shown + 1
        if shown < len(blocks):
            lines.append(self.say(t("and {count} more, which differ: atoll status", count=len(blocks) - shown)))
        return lines

    def _of(self, group: list[GpuDetail], width: int) -> list[str]:
        """The lines of GPUs that are alike; what is measured is a range."""
        say, gpu = self.say, group[0]
        facts = [self._memory(group), f"cc {gpu.compute_capability}"]
        if gpu.ecc is not None:
            facts.append(say(t("ECC on") if gpu.ecc else t("ECC off")))
        if gpu.ecc_uncorrected:
            facts.append(say(t("{count} ECC errors", count=gpu.ecc_uncorrected)))
        if gpu.mig:
            facts.append("MIG")
        if gpu.pcie_gen and gpu.pcie_width:
            facts.append(f"PCIe {gpu.pcie_gen} x{gpu.pcie_width}")
        if degrees := _range([each.temperature for each in group]):
            facts.append(f"{degrees} C" if self.front.plain else f"{degrees} °C")
        if gpu.power_limit:
            facts.append(say(t("up to {watts} W", watts=f"{gpu.power_limit:.0f}")))
        lines = [_named(f"GPU {_indices(group)}", gpu.name, width), *_filled(facts, width)]
        for pid, name, used in gpu.processes[:MOST_PROCESSES]:
            lines += _filled([say(t("held by {name} (pid {pid}): {size}", name=_short(name or "?"), pid=pid,
                                    size=human_bytes(used or 0)))], width)  # fmt: skip
        if len(gpu.processes) > MOST_PROCESSES:
            lines.append("  " + say(t("{count} more processes", count=len(gpu.processes) - MOST_PROCESSES)))
        return lines

    def _memory(self, group: list[GpuDetail]) -> str:
        free = [gpu.memory_free for gpu in group if gpu.memory_free is not None]
        total = human_bytes(group[0].memory_total or 0)
        return self.say(t("{free} of {total} free", free=human_bytes(min(free)), total=total)) if free else total


def alike(gpus: Sequence[GpuDetail]) -> list[list[GpuDetail]]:
    """Groups of GPUs that differ only in index, temperature and free memory. A GPU that a process holds is alone."""
    groups: dict[Hashable, list[GpuDetail]] = {}
    for number, gpu in enumerate(gpus):
        key: Hashable = number if gpu.processes else replace(gpu, index=None, temperature=None, memory_free=None)
        groups.setdefault(key, []).append(gpu)
    return list(groups.values())


def _range(values: Sequence[int | None]) -> str:
    """From the least to the most, as "38-44"; one number where they are the same."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return str(known[0]) if min(known) == max(known) else f"{min(known)}-{max(known)}"


def _indices(group: Sequence[GpuDetail]) -> str:
    """The GPUs of a group: "0-2,4"."""
    runs: list[list[int]] = []
    for gpu in group:
        if gpu.index is None:
            continue
        if runs and gpu.index == runs[-1][-1] + 1:
            runs[-1].append(gpu.index)
        else:
            runs.append([gpu.index])
    return ",".join(_range(run) for run in runs) or "?"


def _named(gpu: str, name: str, width: int) -> str:
    """The name without its vendor where there is no room for both."""
    line = f"{gpu}  {name}"
    return line if cell_len(line) <= width else set_cell_size(f"{gpu}  {name.removeprefix('NVIDIA ')}", width).rstrip()


def _short(name: str) -> str:
    """The end of a program's name tells more than its beginning, a path."""
    return name if len(name) <= MOST_NAME else f"...{name[-MOST_NAME:]}"


def _filled(facts: list[str], width: int) -> list[str]:
    """Lines of facts; none is broken in the middle."""
    lines = [""]
    for number, fact in enumerate(facts):
        said = fact + ("," if number + 1 < len(facts) else "")
        if lines[-1] and cell_len(f"{lines[-1]} {said}") + 1 > width:
            lines.append("")
        lines[-1] += f" {said}"
    return [f" {line}" for line in lines]
