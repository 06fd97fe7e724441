"""GPU: each GPU of this machine with what matters of it, and the checks."""

from collections.abc import Iterator

from rich.cells import cell_len
from rich.text import Text
from textual import work
from textual.widget import Widget
from textual.widgets import Static

from appliance.service.gpu_details import GpuDetail, GpuDetails, gpu_details
from appliance.service.words import t
from tui.steps.body import StepBody
from tui.texts import human


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
        self.query_one("#gpus", Static).update(Text("\n".join(self._lines()), no_wrap=True))

    def _lines(self) -> list[str]:
        details, machine = self.details, self.front.machine
        if details is None:
            return [self.say(t("Checking this machine ..."))]
        lines = []
        if machine is not None:
            lines.append(self.say(t("This machine has {memory} of memory.", memory=human(machine.memory_bytes))))
        if not details.gpus:
            return [*lines, self.say(t("No GPU was found; models would compute on the CPU."))]
        driver, cuda = details.driver or "?", details.cuda or "?"
        lines.append(self.say(t("Driver {driver}, CUDA {cuda}", driver=driver, cuda=cuda)))
        for gpu in details.gpus[:8]:
            lines += self._of(gpu)
        return lines

    def _of(self, gpu: GpuDetail) -> list[str]:
        say = self.say
        memory = human(gpu.memory_total or 0)
        if gpu.memory_free is not None:
            memory = say(t("{free} of {total} free", free=human(gpu.memory_free), total=human(gpu.memory_total or 0)))
        facts = [memory, f"cc {gpu.compute_capability}"]
        if gpu.ecc is not None:
            facts.append(say(t("ECC on") if gpu.ecc else t("ECC off")))
        if gpu.ecc_uncorrected:
            facts.append(say(t("{count} ECC errors", count=gpu.ecc_uncorrected)))
        if gpu.mig:
            facts.append("MIG")
        if gpu.pcie_gen and gpu.pcie_width:
            facts.append(f"PCIe {gpu.pcie_gen} x{gpu.pcie_width}")
        if gpu.temperature is not None:
            facts.append(f"{gpu.temperature} °C" if not self.front.plain else f"{gpu.temperature} C")
        if gpu.power_limit:
            facts.append(say(t("up to {watts} W", watts=f"{gpu.power_limit:.0f}")))
        lines = [f"GPU {gpu.index}  {gpu.name}", *_filled(facts, self.query_one("#gpus").size.width)]
        for pid, name, used in gpu.processes[:3]:
            lines.append("  " + say(t("held by {name} (pid {pid}): {size}", name=name or "?", pid=pid,
                                      size=human(used or 0))))  # fmt: skip
        return lines


def _filled(facts: list[str], width: int) -> list[str]:
    """Lines of facts; none is broken in the middle."""
    lines = [""]
    for number, fact in enumerate(facts):
        said = fact + ("," if number + 1 < len(facts) else "")
        if cell_len(f"{lines[-1]} {said}") + 2 > max(width, 40):
            lines.append("")
        lines[-1] += f" {said}"
    return [f" {line}" for line in lines]
