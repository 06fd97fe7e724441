"""Pilot: users stage by stage with limits and stop conditions, figures, costs, and a person's name under it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import work
from textual.widget import Widget
from textual.widgets import Static

from appliance.service.desk import InstallError
from appliance.service.words import joined, t
from tui.dialogs.ask import Ask
from tui.dialogs.form import Field, Form, Pick
from tui.frame.front import Forward, Key
from tui.keys import letter
from tui.look import COLOURS, MARKS, PLAIN_MARKS
from tui.parts.bar import bar
from tui.parts.work import Work
from tui.steps.body import StepBody
from tui.texts import long_time

if TYPE_CHECKING:
    from appliance.service.pilot.board import PilotBoard, StageSeen

LOOK_SECONDS = 2.0
MOST_USERS = 2   # that a stage names; the rest is a number


class PilotBody(StepBody):
    STEP = "pilot"
    LEAD = t("First a few users, then all, with a way back.")
    HELP = t(
        "A pilot lets users in stage by stage. Each stage has users, a time, conditions that stop it, and goals that "
        "it must reach. If a condition trips, the users of the stage before stay and the rest are kept out.\n"
        "P chooses a plan, or load one with an answers file. E changes its stages: who, how long, what stops them. "
        "Enter starts it; it runs without this terminal.\n"
        "N begins the next stage where the plan leaves that to a person. X stops the pilot: all keys may use the "
        "service again. K shows what it costs.\n"
        "When all stages have passed, S puts a person's name under it. L leaves the pilot out, with a reason."
    )
    BINDINGS: ClassVar = [
        letter("p", "plan"), letter("e", "edit"), letter("n", "next"), letter("x", "stop"), letter("s", "sign"),
        letter("k", "costs"), letter("l", "leave_out"),
    ]  # fmt: skip

    LOOKS: ClassVar = frozenset({"costs", "app.dashboard"})

    board: "PilotBoard | None" = None
    problem: InstallError | None = None
    shows_costs = False

    def parts(self) -> Iterator[Widget]:
        yield Static("", id="stages", classes="facts", markup=False)

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(LOOK_SECONDS if not self.front.plain else 5.0, self._look_if_open)

    def open(self) -> None:
        super().open()
        self._look()

    def _look_if_open(self) -> None:
        if self.is_open and (self.at_work or self.board is None):
            self._look()

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _look(self) -> None:
        found, problem = None, None
        try:
            found = self.front.desk.pilot()
        except InstallError as error:
            problem = error
        self.app.call_from_thread(self._looked, found, problem)

    def _looked(self, found: "PilotBoard | None", problem: InstallError | None) -> None:
        self.board, self.problem = found or self.board, problem
        if self.is_open:
            self.draw()

    def _watched(self) -> None:
        super()._watched()
        if self.is_open and self.front.following is None:  # it has ended, or somebody else did something
            self._look()

    # -- drawing

    def draw_facts(self) -> None:
        self.query_one("#stages", Static).update(self._text())
        self.query_one(Work).display = self.at_work and not (self.board and self.board.stages)

    def _text(self) -> Text:
        board, text = self.board, Text(no_wrap=True)
        if board is None:
            return Text(self.say(self.problem.message if self.problem else t("Reading the plan of the pilot ...")))
        if self.shows_costs:
            for title, value in board.costs:
                text.append(f"{self.say(title)}  ", "bold").append(f"{self.say(value)}\n")
            return text.append(self.say(t("In the currency of your prices; the assumptions: atoll cost --assumptions")))
        for stage in board.stages:
            self._stage(text, stage)
        if board.signed is not None:
            word = t("GO") if board.signed["decision"] == "go" else t("NO-GO")
            text.append(self.say(t("{decision}, signed by {by} at {at}", decision=word, by=board.signed["by"],
                                   at=board.signed["at"])), "bold")  # fmt: skip
        text.rstrip()
        return text

    def _stage(self, text: Text, stage: "StageSeen") -> None:
        state = {"passed": "green", "running": "running", "missed": "failed", "stopped": "failed"}.get(
            stage.status, "open")  # fmt: skip
        marks = PLAIN_MARKS if self.front.plain else MARKS
        users = self.say(t("everybody")) if "*" in stage.users else ", ".join(stage.users[:MOST_USERS])
        if len(stage.users) > MOST_USERS and "*" not in stage.users:
            users += f" +{len(stage.users) - MOST_USERS}"
        text.append(f"{marks[state]} ", COLOURS[state]).append(f"{stage.name}  ", "bold")
        text.append(f"{self.say(stage.status_text)}  {users}  ")
        if stage.status == "running":
            share = stage.seconds / stage.duration if stage.duration else 1.0
            text.append(f"\n    {bar(24, share, plain=self.front.plain)} {self.say(long_time(stage.seconds))} / ")
        text.append(f"{self.say(long_time(stage.duration))}\n")
        for why in stage.why:
            text.append(f"    {self.say(why)}\n", "red")
        if stage.waits:
            text.append(f"    {self.say(t('Its time is over: N begins the next stage.'))}\n", "bold")
        if stage.status == "open":
            limits = self.say(joined(list(stage.limits)))
            text.append(f"    {self.say(t('stops at: {limits}', limits=limits))}\n", "dim")
            needs = self.say(joined(list(stage.needs)))
            text.append(f"    {self.say(t('must reach: {goals}', goals=needs))}\n", "dim")
            return
        for goal in stage.goals:
            good = "green" if goal.ok else "failed"
            text.append(f"    {marks[good]} ", COLOURS[good])
            text.append(f"{self.say(goal.title)}  {self.say(goal.observed)}  ({self.say(goal.required)})\n")
        goals = {self.say(goal.title) for goal in stage.goals}
        for title, value in stage.figures[2:]:
            if self.say(title) in goals:
                continue  # it stands there already, beside its limit
            text.append(f"      {self.say(title)}  {self.say(value)}\n", "dim")

    def empty(self) -> str:
        if self.board is not None and not self.board.stages:
            return t("No stage is planned yet. P chooses a plan; L leaves the pilot out, with a reason.")
        return t("Enter starts the pilot. It runs without this terminal.")

    # -- keys

    @property
    def answers(self) -> Any:
        return self.front.desk.answers.pilot  # type: ignore[attr-defined]

    def forward(self) -> Forward:
        found = super().forward()
        if self.state is not None and self.state.status == "green":
            return found
        if self.front.watched is not None:
            return found
        if self.front.following is None and not self.answers.skip and not self.answers.stages:
            return Forward(t("Choose a plan"), found.why_not)
        if found.text or self.front.following is not None or self.board is None:
            return found
        if self.board.outcome == "done" and self.board.signed is None:
            return Forward(t("Sign it"))
        return found

    def go(self) -> None:
        board = self.board
        if self.state is not None and self.state.status == "green":
            super().go()
        elif not self.answers.skip and not self.answers.stages:
            self.action_plan()
        elif board is not None and board.outcome == "done" and board.signed is None and self.blocking():
            self.action_sign()
        else:
            self.run()

    def run_words(self) -> str:
        return t("Run this step") if self.answers.skip else t("Start the pilot")

    def keys(self) -> list[Key]:
        board = self.board
        costs = [Key("K", t("Stages") if self.shows_costs else t("Costs"), "costs")]
        if self.front.following is not None:
            following = self.front.following
            if not self.at_work or following.is_watcher:
                return costs
            waits = board is not None and any(stage.waits for stage in board.stages)
            return [*([Key("N", t("Next stage"), "next")] if waits else []), Key("X", t("Stop it"), "stop"), *costs]
        if self.state is not None and self.state.status == "green":
            return [*costs, *super().keys()]
        sign = [Key("S", t("Sign"), "sign")] if board and board.outcome and board.signed is None else []
        edit = [Key("E", t("Edit"), "edit")] if self._may_edit() else []
        leave = Key("L", t("Leave out"), "leave_out")
        return [*sign, Key("P", t("Plan"), "plan"), *edit, leave, *costs, *super().keys()]

    def action_costs(self) -> None:
        self.shows_costs = not self.shows_costs
        self.draw()

    def action_plan(self) -> None:
        if not self.may_decide():
            return
        from appliance.service.pilot.board import ready_plans

        plans = ready_plans(self.front.desk.layout)

        def chosen(name: str | None) -> None:
            if name is not None:
                self._amend(skip=None, stages=plans[name][1])

        about = t("Every stage stops at 5 % errors or when the service does not answer for 30 s.")
        choices = {name: text for name, (text, _) in plans.items()}
        self.app.push_screen(Pick(self.say, t("Choose a plan"), choices, about), chosen)

    def _may_edit(self) -> bool:
        """A plan that was not begun: users and stop conditions do not change below a pilot."""
        begun = self.board is not None and self.board.open
        done = self.state is not None and self.state.status == "green"
        return bool(self.answers.stages) and not begun and not done and self.front.following is None

    def action_edit(self) -> None:
        if not self._may_edit() or not self.may_decide():
            return

        def chosen(what: str | None) -> None:
            if what == "add":
                self._try(self.front.desk.add_stage)
            elif what is not None:
                verb, _, number = what.partition(" ")
                if verb == "remove":
                    self._try(partial(self.front.desk.remove_stage, int(number)))
                else:
                    self._edit_stage(int(number))

        stages = self.answers.stages
        choices: dict[str, str] = {
            f"change {number}": t("Change stage {name}", name=stage.name) for number, stage in enumerate(stages)}
        choices["add"] = t("Add a stage like the last one")
        if len(stages) > 1:
            choices |= {f"remove {number}": t("Remove stage {name}", name=stage.name)
                        for number, stage in enumerate(stages)}  # fmt: skip
        self.app.push_screen(Pick(self.say, t("Edit the plan"), choices), chosen)

    def _edit_stage(self, number: int) -> None:
        def take(values: dict[str, str]) -> str:
            try:
                self.front.desk.change_stage(number, values)
            except InstallError as error:
                return joined([error.message, error.hint], " ") if error.hint else error.message
            return ""

        fields = [Field(field.name, field.title, value, field.hint)
                  for field, value in self.front.desk.stage_fields(number)]  # fmt: skip
        title = t("Stage {name}", name=self.answers.stages[number].name)
        self.app.push_screen(Form(self.say, title, fields, take), lambda values: self._edited() if values else None)

    def _try(self, change: Callable[[], None]) -> None:
        try:
            change()
        except InstallError as error:
            self.front.note = error.message
        else:
            self._edited()

    def _edited(self) -> None:
        self.front.look_again()
        self._look()

    def action_leave_out(self) -> None:
        if not self.may_decide() or (self.state is not None and self.state.status == "green"):
            return

        def said(reason: str | None) -> None:
            if reason and self._amend(skip=reason, stages=None):
                self.run()

        self.app.push_screen(Ask(self.say, t("Why is there no pilot? It is recorded with your name."), 3), said)

    def _amend(self, **pilot: Any) -> bool:
        try:
            self.front.desk.amend(pilot=pilot)
        except InstallError as error:
            self.front.note = error.message
            return False
        self._edited()
        return True

    def action_next(self) -> None:
        if self.at_work:
            self._do(self.front.desk.next_stage)

    def action_stop(self) -> None:
        if not self.at_work:
            return

        def sure(choice: str | None) -> None:
            if choice == "stop":
                self._do(self.front.desk.stop_pilot)

        self.app.push_screen(
            Pick(self.say, t("Stop the pilot?"), {"go-on": t("Let it continue"), "stop": t("Stop it")},
                 t("Every API key may use the service again, as before the pilot.")), sure)  # fmt: skip

    @work(thread=True, exclusive=True, group="pilot", exit_on_error=False)
    def _do(self, deed: Callable[[], str]) -> None:
        try:
            said = deed()
        except InstallError as error:
            said = error.message
        self.app.call_from_thread(self._done, said)

    def _done(self, said: str) -> None:
        self.front.note = said
        self._look()

    def action_sign(self) -> None:
        board = self.board
        if board is None or board.outcome is None or board.signed is not None or not self.may_decide():
            return

        def take(values: dict[str, str]) -> str:
            try:
                self.front.desk.sign_pilot(values["by"], go=values["decision"] == "go", reason=values["reason"])
            except InstallError as error:
                return error.message
            return ""

        fields = [
            Field("decision", t("Decision"), "go" if board.recommended else "no-go", t("go or no-go"), "[gon-]*"),
            Field("by", t("Your name")),
            Field("reason", t("Reason"), "", t("needed where not every stage has passed")),
        ]  # fmt: skip
        about = t("Recommended: go.") if board.recommended else t("Recommended: no-go. Not every stage has passed.")
        self.app.push_screen(Form(self.say, t("Sign the pilot"), fields, take, about), self._signed)

    def _signed(self, values: dict[str, str] | None) -> None:
        if values is not None:
            self.shows_costs = False  # the signature stands below the stages
            self._look()
            if values["decision"] == "go":
                self.run()
