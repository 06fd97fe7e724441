"""Tune: four knobs on one memory budget, then the sweep that measures, and what came of it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import work
from textual.binding import Binding
from textual.widget import Widget
from textual.widgets import Static

from appliance.service.desk import InstallError
from appliance.service.words import t
from tui.dialogs.form import Field, Form
from tui.frame.front import Forward, Key
from tui.keys import letter
from tui.parts.findings import Detail, Findings
from tui.parts.knob import Knob
from tui.parts.memory_bar import MemoryBar
from tui.parts.trials import Trials
from tui.pauses import keep_loaded
from tui.steps.body import StepBody

if TYPE_CHECKING:
    from appliance.service.planning.planner import Knobs
    from appliance.service.tuning.board import Board, Seen

_KNOBS = {"context": t("Context length"), "sequences": t("Users at once"), "share": t("GPU memory share"),
          "precision": t("KV precision")}  # fmt: skip


class TuneBody(StepBody):
    STEP = "tune"
    LEAD = t("The settings that serve your users best.")
    HELP = t(
        "Four settings share one budget, the memory of the GPU. Change one and the bar moves at once; a line says "
        "what no longer fits, and what would help.\n"
        "Context length: the longest prompt with its answer. Users at once: more than these wait in a queue.\n"
        "GPU memory share: how much the engine may use; the rest is left to other programs. KV precision: fp8 is half "
        "of auto.\n"
        "Left and right change a setting, digits write it, up and down go to the next one. Enter starts the engine "
        "with them; if it does not serve, the previous settings are restored.\n"
        "M measures: the engine is restarted with one setting after another under load like yours. The best one is "
        "kept, and the reason is shown. P sets the preset's values, R the current ones, U leaves everything as it is."
    )
    BINDINGS: ClassVar = [
        letter("m", "measure"), letter("p", "preset"), letter("r", "reset"), letter("u", "unchanged"),
        Binding("down", "app.focus_next"), Binding("up", "app.focus_previous"),
    ]  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.board: Board | None = None
        self.seen: Seen | None = None
        self.problem: InstallError | None = None

    def parts(self) -> Iterator[Widget]:
        yield Static("", id="about", markup=False)
        yield MemoryBar()
        for name in _KNOBS:
            yield Knob(name, writable=name != "precision")
        yield Static("", id="fits", markup=False)
        yield Trials()

    def open(self) -> None:
        super().open()
        if self.board is None:
            self._look()

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _look(self) -> None:
        found, problem = [], None
        try:
            found = self.front.desk.boards()
        except InstallError as error:
            problem = error
        keep_loaded()
        self.app.call_from_thread(self._looked, found, problem)

    def _looked(self, found: list, problem: InstallError | None) -> None:
        wanted = self.front.desk.answers.tune.model  # type: ignore[attr-defined]
        self.board = next((each for each in found if each.model == wanted), found[0] if found else None)
        self.problem = problem
        if self.board is not None and self.board.card is not None:
            self._set_knobs(self.board.knobs)
        if self.is_open:
            self.draw()

    # -- the knobs

    def _set_knobs(self, knobs: "Knobs") -> None:
        board = self.board
        assert board is not None
        context, users = self.query_one("#knob-context", Knob), self.query_one("#knob-sequences", Knob)
        context.steps = tuple(str(n) for n in _powers(1024, board.longest))
        context.value = str(knobs.context or board.longest)
        users.steps = tuple(str(n) for n in _powers(1, 1024))
        users.value = str(knobs.sequences or 1)
        share, precision = self.query_one("#knob-share", Knob), self.query_one("#knob-precision", Knob)
        share.steps = tuple(f"{n / 100:.2f}" for n in (*range(50, 100, 5), 97))
        share.value = f"{knobs.gpu_memory_utilization:.2f}"
        # A precision that somebody chose by hand stays; the tuner itself tries only these two.
        precision.steps, precision.value = tuple({"auto": 0, "fp8": 0, knobs.kv_cache_dtype: 0}), knobs.kv_cache_dtype
        self._turned()

    def knobs(self) -> "Knobs":
        """The values of the four fields. An empty or half-typed number counts as 0: the plan says what is wrong with
        it."""
        assert self.board is not None

        def said(name: str) -> str:
            return self.query_one(f"#knob-{name}", Knob).value

        return replace(
            self.board.knobs, context=int(said("context") or 0), sequences=int(said("sequences") or 0), users=None,
            gpu_memory_utilization=float(said("share").rstrip(".") or 0), kv_cache_dtype=said("precision"),
        )  # fmt: skip

    def on_knob_turned(self) -> None:
        self._turned()
        self.post_message(self.Changed())

    def _turned(self) -> None:
        """The bar and the line "Fits" follow at once."""
        board = self.board
        assert board is not None
        wrong = ""
        try:
            self.seen = board.seen(self.knobs())
        except InstallError as error:
            self.seen, wrong = None, error.message
        bar, seen = self.query_one(MemoryBar), self.seen
        bar.parts = tuple((part.kind, part.title, part.bytes) for part in seen.parts) if seen else ()
        bar.total = seen.total if seen else 0
        lines = [wrong] if seen is None else [seen.fits, seen.speed, *seen.helps[:2]]
        self.query_one("#fits", Static).update(Text("\n".join(self.say(each) for each in lines if each)))
        users = self.query_one("#knob-sequences", Knob)
        users.remark = t("waiting starts at {count}", count=f"{int(users.value or 0) + 1:,}")
        if seen is not None:
            left = next((part.bytes for part in seen.parts if part.kind == "others"), 0)
            self.query_one("#knob-share", Knob).remark = t("{size} GB left to others", size=f"{left / 1e9:.1f}")

    # -- drawing

    def draw_facts(self) -> None:
        board, turning = self.board, self._turns()
        for name, title in _KNOBS.items():
            knob = self.query_one(f"#knob-{name}", Knob)
            knob.title, knob.display, knob.language = title, turning, self.front.language
        self.query_one("#knob-context", Knob).remark = t("longest prompt + answer")
        self.query_one("#knob-precision", Knob).remark = t("fp8: half the size")
        bar, trials = self.query_one(MemoryBar), self.query_one(Trials)
        bar.display, bar.language = turning, self.front.language
        self.query_one("#fits", Static).display = turning
        about = self.query_one("#about", Static)
        about.update(Text(self._about(board)))
        about.display = not self.at_work
        if turning and self.seen is not None:
            self._turned()
        following = self.front.following
        if self.at_work and following is not None:
            trials.show_live(list(following.live.get("trial", ())), following.progressed)
        else:
            trials.show_result(self._result())
        trials.display = trials.has_something and not turning

    def _turns(self) -> bool:
        """Whether the knobs are what is seen: before the step is green, and on a GPU."""
        green = self.state is not None and self.state.status == "green"
        return self.board is not None and self.board.card is not None and not self.at_work and not green

    def _about(self, board: "Board | None") -> str:
        if board is None:
            return self.say(self.problem.message if self.problem else t("Reading the plan of memory ..."))
        if board.card is None:
            if self.state is not None and self.state.status == "green":
                return self.say(t("{model} computes on the CPU: there is no GPU memory to divide. M measures which "
                                  "settings serve best.", model=board.title))  # fmt: skip
            return self.say(t("{model} computes on the CPU: there is no GPU memory to divide. M measures which "
                              "settings serve best, U leaves them as they are.", model=board.title))  # fmt: skip
        preset = board.preset.name if board.preset else self.say(board.why_no_preset or t("no preset"))
        return f"{board.title}  {board.card.title}  {preset}"

    def _result(self) -> dict | None:
        summary = self.state.summary if self.state is not None else {}
        models = [each for each in summary.get("models", []) if each.get("trials")]
        return models[0] if models else None

    def focus_first(self) -> None:
        if self._turns():
            self.query_one("#knob-context", Knob).focus()
        else:
            super().focus_first()

    def draw(self) -> None:
        super().draw()
        if self._turns() and not isinstance(self.screen.focused, Knob) and self.is_open and self.screen.is_current:
            self.focus_first()
        # Nothing was found before the first run: the knobs take the room.
        self.query_one(Findings).display = bool(self.shown())
        self.query_one(Detail).display = not self._turns() or self.front.trouble is not None

    # -- keys

    def _is_decided(self) -> bool:
        """The answers say already what to do."""
        tune = self.front.desk.answers.tune  # type: ignore[attr-defined]
        return bool(tune.skip or tune.confirm or tune.settings)

    def _is_turned(self) -> bool:
        return self._turns() and self.board is not None and self.knobs() != replace(self.board.knobs, users=None)

    def forward(self) -> Forward:
        found = super().forward()
        if not found.text or (self.state is not None and self.state.status == "green"):
            return found
        if self._is_turned():
            if self.seen is None or self.seen.planned is None:
                return Forward("", t("These settings do not fit. Turn one back, or R."))
            return Forward(t("Use these settings"), found.why_not)
        return Forward(t("Run this step") if self._is_decided() else t("Measure it"), found.why_not)

    def go(self) -> None:
        if self.state is not None and self.state.status == "green":
            super().go()
        elif self._is_turned():
            self._use()
        elif self._is_decided():
            self.run()
        else:
            self.action_measure()

    def keys(self) -> list[Key]:
        if self.front.following is not None:
            return []
        green = self.state is not None and self.state.status == "green"
        preset = [Key("P", t("Preset"), "preset")] if self._turns() and self.board and self.board.preset else []
        reset = [Key("R", t("Reset"), "reset")] if self._is_turned() else []
        own = [Key("M", t("Measure"), "measure")] if green or self._is_turned() or self._is_decided() else []
        return [*own, *preset, *reset, *([] if green else [Key("U", t("Leave as is"), "unchanged")]), *super().keys()]

    def _decide(self, **tune: object) -> None:
        try:
            given = {"settings": None, "skip": None, "confirm": None, **tune}
            self.front.desk.amend(tune=given)
        except InstallError as error:
            self.front.note = error.message
            return
        self.run()

    def _use(self) -> None:
        assert self.board is not None
        try:
            self._decide(settings=self.board.settings(self.knobs()))
        except InstallError as error:
            self.front.note = error.message

    def action_measure(self) -> None:
        if not self.may_decide():
            return
        tune = self.front.desk.answers.tune  # type: ignore[attr-defined]

        def take(values: dict[str, str]) -> str:
            from appliance.load.slo import parse_slo
            from appliance.service.tuning.request import seconds_of

            try:
                seconds_of(values["budget"], "")
            except InstallError as error:
                return error.hint  # which times can be used
            try:
                parse_slo([values["target"]])
                self.front.desk.amend(tune={"settings": None, "skip": None, "confirm": True, **values})
            except InstallError as error:
                return error.message
            return ""

        example = t("ttft=500ms,itl=40ms; empty: no target")
        fields = [
            Field("target", t("What your users need"), tune.target, example),
            Field("budget", t("How long it may take"), tune.budget, t("such as 10m or 1h")),
            Field("profile", t("The load"), tune.profile, t("chat, documents, batch, single, or a file")),
        ]  # fmt: skip
        about = t("Every trial restarts the engine and cuts off running requests.")
        self.app.push_screen(Form(self.say, t("Measure it"), fields, take, about),
                             lambda values: self.run() if values is not None else None)  # fmt: skip

    def action_preset(self) -> None:
        preset = self.board.of_preset() if self.board is not None and self._turns() else None
        if preset is not None:
            self._set_knobs(preset)
            self.post_message(self.Changed())

    def action_reset(self) -> None:
        if self.board is not None and self._turns():
            self._set_knobs(self.board.knobs)
            self.post_message(self.Changed())

    def action_unchanged(self) -> None:
        if self.may_decide() and self.state is not None and self.state.status != "green":
            self._decide(skip=self.say(t("The current settings stay in use.")))

    def run(self) -> None:
        super().run()
        self.board = None  # it is read again when the run has ended

    def _watched(self) -> None:
        if self.is_open and self.board is None and self.problem is None and self.front.following is None:
            self._look()
        super()._watched()


def _powers(least: int, most: int) -> list[int]:
    found, value = [], least
    while value < most:
        found.append(value)
        value *= 2
    return [*found, most]
