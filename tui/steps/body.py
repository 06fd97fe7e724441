"""What the panes of all steps share: the facts on top, then findings and what the chosen one means, or the running
work."""

from collections.abc import Iterator
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from appliance.service.findings import Finding, Waiver
from appliance.service.state import STATUS_WORDS, StepState
from appliance.service.words import joined, t
from tui.frame.front import Forward, Key, Told
from tui.parts.findings import Detail, Findings, meaning_of, trouble_of
from tui.parts.work import Work

COMPLETE = t("The checklist is complete. 7 opens the dashboard; so does `atoll top`.")
WATCHING = t("You only watch. F11 asks the other operator to let you work here.")


class Body(Told, Vertical):
    """A pane of the frame. It is drawn when what it watches has changed, and only while it is the open one.

    `LOOKS`: the actions of its keys that decide nothing, so that they also work for an operator who only watches.
    """

    STEP: ClassVar[str] = ""
    LEAD: ClassVar[str] = ""
    HELP: ClassVar[str] = ""
    LOOKS: ClassVar[frozenset[str]] = frozenset({"app.focus_next", "app.dashboard"})

    class Changed(Message):
        """What Enter and the other keys do may have changed."""

    def __init__(self) -> None:
        super().__init__(classes="step-body", id=f"body-{self.STEP or 'start'}")
        self.display = False

    def compose(self) -> ComposeResult:
        yield Static("", classes="lead", markup=False)
        yield from self.parts()

    def parts(self) -> Iterator[Widget]:
        yield from ()

    def on_mount(self) -> None:
        for name in ("standing", "machine", "language", "trouble", "following", "pulse"):
            self.watch(self.app, name, self._watched, init=False)

    def _watched(self) -> None:
        if self.is_open:
            self.draw()

    @property
    def is_open(self) -> bool:
        """Visible, with all its parts mounted: a program that ends unmounts them first."""
        return self.is_mounted and self.display

    def open(self) -> None:
        """Called when it becomes visible."""
        if self.is_open:
            self.draw()
            self.focus_first()

    def focus_first(self) -> None:
        return

    def draw(self) -> None:
        self.query_one(".lead", Static).update(self.say(self.LEAD))
        self.post_message(self.Changed())

    # -- keys

    def forward(self) -> Forward:
        return Forward(t("Continue"))

    def go(self) -> None:
        """Enter, where `forward` allows it."""
        self.front.open_step(self.front.position + 1)

    def keys(self) -> list[Key]:
        """Those of this pane, besides those of every pane."""
        return []

    def may_decide(self) -> bool:
        """Whether no work runs and this operator is in control; else the line above the keys says why not."""
        if self.front.watched is not None:
            self.front.note = WATCHING
        return self.front.watched is None and self.front.following is None


class StepBody(Body):
    """A step of the checklist."""

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield Work()
        yield Findings()
        yield Detail()

    @property
    def state(self) -> StepState | None:
        standing = self.front.standing
        return standing.step(self.STEP) if standing else None

    @property
    def at_work(self) -> bool:
        """Whether the job that runs works on this step."""
        following = self.front.following
        return following is not None and following.at_step in ("", self.STEP)

    def shown(self) -> list[Finding]:
        """The findings of the running work, if it is this step's; else those of the last run."""
        following = self.front.following
        if self.at_work and following is not None and following.found:
            return following.found
        return [self._as_waived(each) for each in self.state.findings] if self.state and not self.at_work else []

    def chosen(self) -> Finding | None:
        return self.query_one(Findings).chosen()

    def _as_waived(self, finding: Finding) -> Finding:
        """As the next run will record it, if it was waived since the last one."""
        reason = self.front.desk.answers.waivers.get(finding.id)
        if reason is None or not finding.blocks or finding.severity != "block":
            return finding
        return finding.model_copy(update={"waiver": Waiver(finding=finding.id, reason=reason, by=self.front.desk.by,
                                                           at="")})  # fmt: skip

    def blocking(self) -> list[Finding]:
        return [each for each in self.shown() if each.blocks]

    def missing(self) -> StepState | None:
        """The first step before this one that is not done; this one cannot run without it."""
        steps = self.front.standing.steps if self.front.standing else []
        return next((each for each in steps[: self.front.position - 1] if each.status != "green"), None)

    def draw(self) -> None:
        super().draw()
        work, findings = self.query_one(Work), self.query_one(Findings)
        work.show(self.front.following if self.at_work else None)
        work.display = self.at_work
        findings.show(self.shown())
        findings.display = not self.at_work or bool(self.shown())
        findings.set_class(not self.shown(), "empty")  # it keeps the focus, and takes no room
        self.query_one(Detail).set_class(not self.shown(), "alone")
        self.set_class(self.at_work, "at-work")
        self.tell_detail()
        self.draw_facts()
        if self.is_open and self.screen.focused is None:
            self.focus_first()

    def draw_facts(self) -> None:
        """The step's own part."""
        return

    def tell_detail(self) -> None:
        self.query_one(Detail).rows([] if self.at_work else self.detail())

    def detail(self) -> list[tuple[str, str]]:
        if self.front.trouble is not None and not self.blocking():
            return trouble_of(self.front.trouble)
        finding = self.chosen()
        if finding is not None:
            return meaning_of(finding, self.say)
        state = self.state
        if state is not None and state.why:
            return [(STATUS_WORDS[state.status], state.why)]
        return [("", self.empty())]

    def empty(self) -> str:
        """What is said before anything was found."""
        return t("Nothing was checked yet. Enter runs this step.")

    def on_findings_chosen(self) -> None:
        self.tell_detail()
        self.post_message(self.Changed())

    def focus_first(self) -> None:
        if self.query_one(Findings).display:
            self.query_one(Findings).focus()

    def forward(self) -> Forward:
        state, following = self.state, self.front.following
        if following is not None:
            if self.at_work:
                return Forward("", t("The work is running. It continues without this terminal."))
            return Forward("", t("Another step is running."))
        if state is None:
            return Forward("", t("Reading the current state ..."))
        missing = self.missing()
        if state.status == "green" and not self._is_last():
            return Forward(t("Next"))
        if state.status == "green" and missing is None:
            return Forward("", COMPLETE)
        if self.front.watched is not None:
            return Forward("", WATCHING)
        if missing is not None and self.front.standing is not None:
            number = self.front.standing.steps.index(missing) + 1
            return Forward("", t("Step {number} comes first ({title}). Its key is {number}.", number=number,
                                 title=missing.title))  # fmt: skip
        blocking = self.blocking()
        if blocking:
            return Forward("", self._in_the_way(blocking))
        again = state.status in ("stale", "interrupted") and state.why
        return Forward(self.run_words(), joined([STATUS_WORDS[state.status], state.why], ": ") if again else "")

    def _is_last(self) -> bool:
        standing = self.front.standing
        return standing is not None and self.front.position >= len(standing.steps)

    def run_words(self) -> str:
        return t("Run this step")

    def _in_the_way(self, blocking: list[Finding]) -> str:
        if all(each.severity == "strict" for each in blocking):
            return t("Failing checks: {count}. Fix them, then press F5 to check again.", count=len(blocking))
        return t("Failing checks: {count}. Fix them and press F5, or waive one with a reason (F9).",
                 count=len(blocking))  # fmt: skip

    def go(self) -> None:
        if self.state is not None and self.state.status == "green":
            super().go()
        else:
            self.run()

    def run(self) -> None:
        self.front.run_step(self.STEP)

    def keys(self) -> list[Key]:
        if self.front.following is not None:
            return []
        chosen = self.chosen()
        waivable = chosen is not None and chosen.blocks and chosen.severity == "block"
        waive = [Key("F9", t("Waive"), "app.waive")] if waivable else []
        ran = self.state is not None and self.state.status != "open"
        complete = self._is_last() and self.state is not None and self.state.status == "green" and not self.missing()
        watch = [Key("7", t("Dashboard"), "app.dashboard")] if complete else []
        return [*watch, *waive, *([Key("F5", t("Again"), "app.again")] if ran else [])]
