"""Verify: the groups of checks one after another, numbers beside their targets, latencies over time."""

from collections.abc import Iterator
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.widget import Widget
from textual.widgets import Static

from appliance.service.desk import InstallError
from appliance.service.words import t
from tui.dialogs.form import Field, Form
from tui.frame.front import Forward, Key
from tui.keys import letter
from tui.look import COLOURS, MARKS, PLAIN_MARKS
from tui.parts.plot import Plot
from tui.parts.work import Work
from tui.steps.body import StepBody
from tui.texts import duration

GROUPS = {"health": t("Health"), "conformance": t("Conformance"), "quality": t("Quality"),
          "performance": t("Performance"), "stability": t("Stability"), "security": t("Security")}  # fmt: skip
_NUMBERS = (("ttft", t("first token")), ("itl", t("between tokens")))
_TARGETS = ("ttft", "itl", "users", "output_throughput")
_TITLES = {"ttft": t("first token"), "itl": t("between tokens"), "users": t("users at once"),
           "output_throughput": t("throughput")}  # fmt: skip


class VerifyBody(StepBody):
    STEP = "verify"
    LEAD = t("Every promise is checked, every number beside its target.")
    HELP = t(
        "Six groups: health, conformance of the API, quality of the answers, performance under load, stability over "
        "time, security. Each turns green, or says what it missed and by how much.\n"
        "G sets the targets: how long your users wait for the first token and between tokens, and how many users "
        "there are.\n"
        "A missed target leads back to Tune (4), or is accepted with a reason (F9) that stays in the report.\n"
        "An interrupted run continues after the last group that passed."
    )
    BINDINGS: ClassVar = [letter("g", "goals")]
    LOOKS: ClassVar = frozenset({"app.open(4)"})

    def parts(self) -> Iterator[Widget]:
        yield Static("", id="groups", classes="facts", markup=False)
        yield Static("", id="numbers", markup=False)
        yield Plot(id="latency")

    @property
    def plan(self) -> Any:
        return self.front.desk.answers.verify  # type: ignore[attr-defined]

    def draw_facts(self) -> None:
        following = self.front.following
        live = following.live if self.at_work and following is not None else {}
        self.query_one("#groups", Static).update(self._groups(list(live.get("group", ()))))
        loads = list(live.get("load", ()))
        self.query_one("#numbers", Static).update(Text("\n".join(self._numbers(loads))))
        plot = self.query_one("#latency", Plot)
        label = loads[-1]["label"] if loads else ""
        seen = [(each["seconds"], each["itl_p95"]) for each in loads if each["label"] == label and "itl_p95" in each]
        plot.points, plot.target = tuple(seen), self.plan.targets.itl
        plot.title = t("between tokens, p95, milliseconds")
        plot.display = len(seen) > 1
        self.query_one(Work).styles.height = 4 if self.at_work and live else "1fr"

    def _groups(self, told: list[dict[str, Any]]) -> Text:
        """One line each: sign, name, what came of it, how long it took."""
        latest = {each["group"]: each for each in told}
        marks = PLAIN_MARKS if self.front.plain else MARKS
        done = self.state is not None and self.state.status in ("green", "failed") and bool(self.state.findings)
        text = Text(no_wrap=True)
        width = max(cell_len(self.say(title)) for title in GROUPS.values())
        for name, title in GROUPS.items():
            if name not in self.plan.groups:
                continue
            about = latest.get(name)
            state = {"passed": "green", "failed": "failed", "running": "running"}.get(
                about["status"] if about else "", "open")  # fmt: skip
            said = ""
            if about is not None and "checks" in about:
                good, count = about["checks"] - about["failed"], about["checks"]
                said = self.say(t("{good} of {count} checks", good=good, count=count))
                said += f"  {duration(about['seconds'])}"
            elif about is not None:
                said = self.say(t("at work"))
            elif not done:
                said = self.say(t("not begun"))
            elif not self.at_work:
                continue
            head = self.say(title)
            text.append(f"{marks[state]} ", COLOURS[state]).append(head + " " * (width - cell_len(head) + 2))
            text.append(f"{said}\n", "dim" if state == "open" else "")
        text.rstrip()
        self.query_one("#groups", Static).display = bool(text)
        self.query_one("#numbers", Static).set_class(not text, "facts")  # the first below the lead keeps a distance
        return text

    def _numbers(self, loads: list[dict[str, Any]]) -> list[str]:
        """Live: those of the load that runs. Afterwards: those of the last verification."""
        targets = self.plan.targets
        if loads:
            last = loads[-1]
            lines = [f"{self.say(last['label'])}  {duration(last['seconds'])}"]
            for name, title in _NUMBERS:
                if f"{name}_p50" in last:
                    lines.append(self._line(title, f"p50 {last[f'{name}_p50']:,.0f} ms", last[f"{name}_p95"],
                                            getattr(targets, name)))  # fmt: skip
            return [*lines, self.say(t("throughput  {rate} tokens/s", rate=f"{last['rate']:,.0f}"))]
        summary = self.state.summary if self.state is not None and not self.at_work else {}
        lines = []
        for loads_of in summary.get("loads", {}).values():
            closed = loads_of.get("closed") or {}
            for name, title in _NUMBERS:
                value = closed.get(f"p95_{name}_ms")
                if value is not None:
                    lines.append(self._line(title, "", value, getattr(targets, name)))
            if closed.get("output_throughput"):
                lines.append(self.say(t("throughput  {rate} tokens/s", rate=f"{closed['output_throughput']:,.0f}")))
        if not lines and self.state is not None and self.state.status != "green" and not self.at_work:
            lines = [self.say(each) for each in self._targets()]
        return lines

    def _line(self, title: str, half: str, p95: float, target: float | None) -> str:
        """What is judged comes first; the median only where there is room."""
        head, column = self.say(title), max(cell_len(self.say(each)) for _, each in _NUMBERS)
        line = f"{head}{' ' * (column - cell_len(head))}  p95 {p95:,.0f} ms"
        if target is not None:
            verdict = self.say(t("met") if p95 <= target else t("missed"))
            line += f"  {self.say(t('target {limit} ms', limit=f'{target:,g}'))}  {verdict}"
        return f"{line}  {half}" if half and cell_len(f"{line}  {half}") < self.size.width else line

    def _targets(self) -> list[str]:
        targets = self.plan.targets
        given = {name: getattr(targets, name) for name in _TARGETS if getattr(targets, name) is not None}
        if not given:
            return [t("No targets yet: numbers are measured and not judged. G sets them.")]
        units = {"ttft": " ms", "itl": " ms", "users": "", "output_throughput": " tokens/s"}
        said = ", ".join(f"{self.say(_TITLES[name])} {value:,g}{units[name]}" for name, value in given.items())
        return [t("Targets: {targets}", targets=said)]

    def run_words(self) -> str:
        return t("Verify")

    def empty(self) -> str:
        return t("Enter starts the checks: the load {profile}, then a soak of {seconds} s.", profile=self.plan.profile,
                 seconds=f"{self.plan.soak_seconds:g}")  # fmt: skip

    def forward(self) -> Forward:
        found = super().forward()
        missed = [each.id for each in self.blocking()]
        if missed and all(name.startswith(("latency", "output-", "request-", "users")) for name in missed):
            return Forward("", t("A target is missed: tune again (4), accept it with a reason (F9), or change it (G)."))
        return found

    def keys(self) -> list[Key]:
        if self.front.following is not None:
            return []
        tune = [Key("4", t("Tune"), "app.open(4)")] if self.blocking() else []
        return [*super().keys(), *tune, Key("G", t("Targets"), "goals")]

    def action_goals(self) -> None:
        if not self.may_decide():
            return
        targets = self.plan.targets
        number = r"[0-9]*\.?[0-9]*"

        def shown(value: float | None) -> str:
            return "" if value is None else f"{value:g}"

        fields = [
            Field("ttft", t("First token, ms"), shown(targets.ttft), t("empty: not judged"), number),
            Field("itl", t("Between tokens, ms"), shown(targets.itl), t("empty: not judged"), number),
            Field("users", t("Users at once"), shown(targets.users), t("empty: not judged"), "[0-9]*"),
            Field("output_throughput", t("Tokens/s in all"), shown(targets.output_throughput),
                  t("empty: not judged"), number),
            Field("soak_seconds", t("Soak, s"), shown(self.plan.soak_seconds), t("0: none"), number),
        ]  # fmt: skip
        self.app.push_screen(Form(self.say, t("Targets"), fields, self._take), lambda values: self._changed(values))

    def _take(self, values: dict[str, str]) -> str:
        try:
            numbers = {name: float(value) if value else None for name, value in values.items()}
            if numbers["users"] is not None:
                numbers["users"] = int(numbers["users"])
            soak = numbers.pop("soak_seconds")
            before = self.plan.targets.model_dump(exclude_defaults=True)
            targets = {name: value for name, value in {**before, **numbers}.items() if value is not None}
            self.front.desk.amend(verify={"targets": targets, "soak_seconds": 0 if soak is None else soak})
        except InstallError as error:
            return error.message
        except ValueError:
            return t("Write numbers, such as 500.")
        return ""

    def _changed(self, values: dict[str, str] | None) -> None:
        if values is not None:
            self.front.look_again()
            self.draw()
