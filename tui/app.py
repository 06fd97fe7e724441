"""The frame: the steps on the left, what was found on the right, one key that goes forward."""

import asyncio
import contextlib
import os
import signal
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Label, OptionList, Static
from textual.widgets.option_list import Option

from appliance.service.desk import Desk, InstallError, Layout, MachineFacts
from appliance.service.findings import Finding
from appliance.service.state import State, StepState
from appliance.service.words import CHOSEN, t, told
from tui.dialogs.ask import Ask, Read
from tui.following import Following, Question
from tui.look import (
    COLOURS,
    CSS,
    HEIGHT,
    MARKS,
    PLAIN_CSS,
    PLAIN_MARKS,
    PLAIN_THEME,
    STATES,
    THEME_NAMES,
    THEMES,
    VERDICTS,
    WIDTH,
    verdict,
)  # fmt: skip
from tui.texts import HELP, LEADS, detail_of, human, plan_lines, work_lines


class Findings(OptionList):
    """Enter goes forward here too, also where there is nothing to choose."""

    BINDINGS: ClassVar = [Binding("enter", "app.forward")]


class Wizard(App[None]):
    """`position` 0 is the start; from 1 on the steps of the checklist."""

    CSS = CSS + PLAIN_CSS
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        Binding("enter", "forward"), Binding("escape", "back"),
        Binding("f1,question_mark", "help"), Binding("f2", "language"), Binding("f4", "colours"),
        Binding("f5", "again"), Binding("f6", "export"), Binding("f8", "messages"), Binding("f9", "waive"),
        Binding("f10,ctrl+q", "leave", priority=True), Binding("ctrl+c", "leave", priority=True),
        Binding("left", "move(-1)"), Binding("right", "move(1)"),
        *(Binding(str(number), f"open({number})") for number in range(10)),
    ]  # fmt: skip

    def __init__(self, layout: Layout, language: str, *, plain: bool = False) -> None:
        super().__init__(ansi_color=plain)
        self.desk = Desk(layout)
        self.language, self.plain = language, plain
        self.parting = ""
        self.position = 0
        self.standing: State | None = None
        self.trouble: InstallError | None = None
        self.machine: MachineFacts | None = None
        self.following: Following | None = None
        self._shown: list[Finding] = []
        self._drawn: object = None
        self._signature: object = None
        self._asking = False
        self._told = ""

    def compose(self) -> ComposeResult:
        yield Static("", id="head")
        with Horizontal(id="body"):
            yield Static("", id="rail")
            with Vertical(id="pane"):
                yield Static("", id="lead")
                with Vertical(id="place"):
                    for name in ("medium", "key", "by"):
                        yield Label("", id=f"{name}-label")
                        yield Input(id=name, max_length=255)
                yield Findings(id="findings", markup=False)
                yield Static("", id="detail")
        yield Static("", id="keys")
        yield Static("", id="small")

    def on_mount(self) -> None:
        for theme in THEMES:
            self.register_theme(theme)
        asked = os.environ.get("ATOLL_THEME")
        self.theme = PLAIN_THEME if self.plain else asked if asked in THEME_NAMES else THEME_NAMES[0]
        self.set_class(self.plain, "plain")
        for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):
                asyncio.get_running_loop().add_signal_handler(name, self.action_leave)
        answers = self.desk.answers
        self.query_one("#medium", Input).value = str(next(iter(answers.medium), answers.bundle or ""))
        self.query_one("#key", Input).value = str(next(iter(answers.trust_keys), ""))
        self.query_one("#by", Input).value = self.desk.by
        self.draw()
        self.query_one("#medium", Input).focus()
        self.look()
        self.set_interval(0.1, self._follow)
        self.set_interval(5.0 if self.plain else 1.0, self._watch)

    def say(self, text: str) -> str:
        return str(told(text, self.language))

    # -- what stands

    @work(thread=True, exclusive=True, group="look")
    def look(self, land: bool = True) -> None:
        """Read the state. On the first look, come to where work goes on, and attach to a job that runs."""
        try:
            state, trouble = self.desk.state(), None
        except InstallError as error:
            state, trouble = None, error
        machine = self.machine or self.desk.machine()
        self._signature = self.desk.signature()
        self.call_from_thread(self._looked, state, trouble, machine, land)

    def _looked(self, state: State | None, trouble: InstallError | None, machine: MachineFacts, land: bool) -> None:
        first = self.standing is None
        self.standing, self.machine = state or self.standing, machine
        self.trouble = trouble or self.trouble
        job = self.desk.job() if first or self.following is None else None
        if job is not None:
            self.following = Following(lambda reader: self.desk.attach(job, reader)).start()
        if first and land and state is not None and any(step.status != "open" for step in state.steps):
            self.position = next((n for n, step in enumerate(state.steps, 1) if step.status != "green"),
                                 len(state.steps))  # fmt: skip
        self.draw()

    def _watch(self) -> None:
        """Somebody else may have worked on it."""
        if self.following is None and self._signature is not None and self.desk.signature() != self._signature:
            self.look(False)

    def step(self) -> StepState | None:
        if self.standing is None or not 1 <= self.position <= len(self.standing.steps):
            return None
        return self.standing.steps[self.position - 1]

    # -- the running job

    def _follow(self) -> None:
        if self.following is None:
            return
        following = self.following
        for question in following.take():
            self._ask(question)
        if following.ended:
            self._ended(following)
        self.draw()

    def _ended(self, following: Following) -> None:
        self.following, self.trouble = None, following.error
        if key := following.secrets.get("api_key"):
            said = t("The key of the endpoint is {key}\nKeep it: it is shown this once, and only its hash is stored.",
                     key=key)  # fmt: skip
            kept = t("Enter: I have kept it.")
            self.push_screen(Read(self.say, t("API key"), self.say(said), kept),
                             lambda seen: self.desk.key_was_shown(following.result) if seen else None)  # fmt: skip
        self.look(False)

    def _ask(self, question: Question) -> None:
        match question.kind:
            case "licence":
                about = question.about
                title = t("Licence {spdx} of {model}", spdx=about.spdx, model=about.model)
                agree = t("Enter accepts it as {name}. Esc refuses.", name=self.desk.by)
                self.push_screen(Read(self.say, title, about.text, agree), question.reply)
            case "plan":
                agree = t("Enter begins. Esc leaves everything as it is.")
                text = plan_lines(question.about, self.say)
                self.push_screen(Read(self.say, t("What will be done"), text, agree), question.reply)
            case _:
                self.push_screen(Ask(self.say, question.about), question.reply)

    # -- drawing

    def draw(self) -> None:
        if not self.is_mounted:
            return
        with contextlib.suppress(Exception):  # a dialog is in front: drawn when it has gone
            if self.screen is not self.screen_stack[0]:
                return
        small = self.size.width < WIDTH or self.size.height < HEIGHT
        self.screen_stack[0].set_class(small, "small")
        need = t("This terminal is too small: it needs {width} columns and {height} lines.", width=WIDTH, height=HEIGHT)
        self._put("#small", self.say(need))
        self._put("#head", self._head())
        self._put("#rail", self._rail())
        step = self.step()
        self._put("#lead", self.say(LEADS.get(step.id if step else "start", "")))
        self.query_one("#place").display = step is None
        labels = {"medium": t("Medium: where it is mounted, or a bundle"),
                  "key": t("Vendor's public key (a file; not from the medium)"),
                  "by": t("Your name, for what you accept and waive")}  # fmt: skip
        for name, text in labels.items():
            self._put(f"#{name}-label", self.say(text))
        self._findings(step)
        self._put("#detail", self._detail(step))
        self._put("#keys", self._keys(step))

    def _put(self, where: str, text: str | Text) -> None:
        self.query_one(where, Static).update(Text(text) if isinstance(text, str) else text)

    def _head(self) -> str:
        left, right = f" Atoll  {self.desk.layout.name}", f"F2 {'EN' if self.language == 'en' else '한국어'} "
        if len(left) > self.size.width - 12:
            left = f" Atoll  ...{left[-(self.size.width - 24):]}"
        return left + " " * max(1, self.size.width - cell_len(left) - cell_len(right)) + right

    def _rail(self) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        rows = [("", self.say(t("Start")))]
        rows += [(step.status, self.say(step.title)) for step in (self.standing.steps if self.standing else ())]
        marks = PLAIN_MARKS if self.plain else MARKS
        for number, (status, title) in enumerate(rows):
            here = number == self.position
            text.append(f"{'>' if here else ' '}{marks.get(status, ' ')}", COLOURS.get(status) or "")
            text.append(f"{number} {title}\n", "bold" if here else "")
            if status not in ("", "open", "green"):
                text.append(f"   {self.say(STATES[status])}\n", COLOURS[status])
        return text

    def _findings(self, step: StepState | None) -> None:
        following = self.following
        shown = (following.found if following and following.found else step.findings) if step else []
        listing = self.query_one("#findings", OptionList)
        listing.display = step is not None
        drawn = (self.position, self.language, [(id(each), verdict(each)) for each in shown], self.size.width)
        if drawn == self._drawn:
            return
        self._drawn, self._shown = drawn, list(shown)
        width = max([cell_len(self.say(each.title)) for each in shown], default=0)
        listing.clear_options()
        for finding in shown:
            word, colour = VERDICTS[verdict(finding)]
            title = self.say(finding.title)
            line = Text(no_wrap=True, overflow="ellipsis").append(self.say(word), colour)
            line.append(f"  {title}{' ' * (width - cell_len(title))}  {self.say(finding.observed)}")
            listing.add_option(Option(line))
        if shown:
            listing.highlighted = next((n for n, each in enumerate(shown) if each.blocks), 0)
        if step is not None:
            listing.focus()

    def chosen(self) -> Finding | None:
        at = self.query_one("#findings", OptionList).highlighted
        return self._shown[at] if at is not None and at < len(self._shown) else None

    def _detail(self, step: StepState | None) -> str:
        if self.following is not None:
            return work_lines(self.following, self.say) or self.say(t("Starting ..."))
        if self.trouble is not None:
            return self._trouble(self.trouble)
        finding = self.chosen()
        if step is not None and finding is not None:
            return detail_of(finding, self.say)
        if step is not None and step.why:
            return self.say(t("{state}: {why}", state=STATES[step.status], why=step.why))
        return self._machine() if self.position <= 1 else self.say(t("Nothing was found yet."))

    def _machine(self) -> str:
        if self.machine is None:
            return self.say(t("Looking at this machine ..."))
        rows = [self.say(t("This machine has {memory} of memory.", memory=human(self.machine.memory_bytes)))]
        rows += [f"GPU {gpu.index}  {gpu.name}  {human(gpu.memory_bytes or 0)}" for gpu in self.machine.gpus]
        if not self.machine.gpus:
            rows.append(self.say(t("No GPU was found; models would compute on the CPU.")))
        return "\n".join(rows)

    def _trouble(self, error: InstallError) -> str:
        rows = [(t("What happened"), error.message), (t("Why"), error.why), (t("Changed"), error.changed),
                (t("Next"), error.hint)]  # fmt: skip
        return "\n".join(f"{self.say(label)}: {self.say(text)}" for label, text in rows if text)

    def _keys(self, step: StepState | None) -> str:
        if self._told:
            return f" {self.say(self._told)}"
        if self.following is not None:
            return self.say(t(" The work runs.  F8 Messages  F1 Help  F10 Leave (it goes on)"))
        forward = t("Continue") if step is None or step.status == "green" else t("Run this step")
        finding = self.chosen() if step else None
        waive = t("F9 Waive  ") if finding and finding.blocks and finding.severity == "block" else ""
        return self.say(t(" Enter {forward}  Esc Back  {waive}F1 Help  F5 Again  F6 Answers  F10 Leave",
                          forward=forward, waive=waive))  # fmt: skip

    # -- keys

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self.draw)

    def on_option_list_option_highlighted(self) -> None:
        self._put("#detail", self._detail(self.step()))

    def on_option_list_option_selected(self) -> None:  # by the mouse: it looks, and starts nothing
        self._put("#detail", self._detail(self.step()))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        order = ("medium", "key", "by")
        at = order.index(event.input.id or "by")
        if at < 2:
            self.query_one(f"#{order[at + 1]}", Input).focus()
        else:
            self.action_forward()

    def action_forward(self) -> None:
        self._told = ""
        step = self.step()
        if self.following is not None:
            self._told = t("The work runs. Wait for its end, or leave it to go on.")
        elif step is None:
            medium, key, by = (self.query_one(f"#{name}", Input).value.strip() for name in ("medium", "key", "by"))
            missing = (path for path in (medium, key) if path and not os.path.exists(os.path.expanduser(path)))
            wrong = next(missing, None)
            if wrong is not None:
                self._told = t("There is nothing at {path}.", path=wrong)
            else:
                self.desk.place(medium, key, by)
                self.trouble = None
                self.action_open(1)
                self.look(False)
        elif step.status == "green" and self.standing and self.position < len(self.standing.steps):
            self.action_open(self.position + 1)
        elif step.status != "green":
            self.action_again()
        self.draw()

    def action_again(self) -> None:
        step = self.step()
        if step is None or self.following is not None:
            return
        self.trouble, self._told = None, ""
        self.following = Following(lambda reader: self.desk.run(step.id, reader)).start()
        self.draw()

    def action_back(self) -> None:
        self.action_open(max(0, self.position - 1))

    def action_move(self, by: int) -> None:
        self.action_open(self.position + by)

    def action_open(self, position: int) -> None:
        if 0 <= position <= (len(self.standing.steps) if self.standing else 0):
            self.position, self._told, self.trouble = position, "", None
            self.query_one("#medium" if position == 0 else "#findings").focus()
            self.draw()

    def action_help(self) -> None:
        self.push_screen(Read(self.say, t("Help"), self.say(HELP)))

    def action_messages(self) -> None:
        lines = self.following.lines if self.following else ()
        text = "\n".join(self.say(line) for line in lines) or self.say(t("There are no messages."))
        self.push_screen(Read(self.say, t("Messages of the work"), text))

    def action_language(self) -> None:
        if self.language == "en" and os.environ.get("TERM") == "linux":
            self._told = t("The Linux console cannot draw Hangul. Use SSH for Korean.")
        else:
            self.language = os.environ[CHOSEN] = "ko" if self.language == "en" else "en"
            self._told = ""
        self.draw()

    def action_colours(self) -> None:
        if not self.plain:
            self.theme = THEME_NAMES[(THEME_NAMES.index(self.theme) + 1) % len(THEME_NAMES)]

    def action_export(self) -> None:
        try:
            self._told = t("Written: {path}", path=self.desk.export())
        except OSError as error:
            self._told = t("The answers could not be written: {why}", why=error.strerror or str(error))
        self.draw()

    def action_waive(self) -> None:
        finding = self.chosen() if self.step() else None
        if finding is None or not finding.blocks or finding.severity != "block":
            self._told = t("Only a check that fails can be waived, and not one that is strict.")
            self.draw()
            return

        def waived(reason: str | None) -> None:
            if reason:
                self.desk.waive(finding.id, reason)
                self._told = t("Waived: {check}. Enter runs the step with it.", check=finding.id)
            self.draw()

        question = t("Why may it go on although this check fails: {check}? It is recorded with your name.",
                     check=self.say(finding.title))  # fmt: skip
        self.push_screen(Ask(self.say, question, 3), waived)

    def action_leave(self) -> None:
        if self.following is not None:
            self.parting = t("The work goes on. See it again: {command}", command="atoll")
        self.exit()
