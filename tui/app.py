"""The program of the screens: language, colours, what keys do everywhere, and the one job that is followed."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from textwrap import dedent
from typing import Any, ClassVar, cast

from textual import work
from textual.app import App
from textual.command import CommandPalette
from textual.filter import LineFilter
from textual.reactive import reactive
from textual.screen import Screen
from textual.scrollbar import ScrollBar, ScrollBarRender

from appliance.service.desk import Desk, InstallError, Layout, MachineFacts, Person
from appliance.service.findings import Finding
from appliance.service.state import State, StepState
from appliance.service.trouble import Trouble
from appliance.service.words import CHOSEN, t, told
from tui import keys, pauses
from tui.dialogs.ask import Ask, Read
from tui.driver import Driver, WithoutColours
from tui.following import Following, Question
from tui.frame import places
from tui.frame.checklist import Checklist
from tui.frame.front import Front
from tui.look import DARK_COLOURS, LIGHT_COLOURS, PLAIN_SIGNS, PLAIN_THEME, THEME_NAMES, THEMES
from tui.menu import Menu
from tui.operators import Operators
from tui.parts.bar import PlainScrollBar
from tui.steps.body import Body, StepBody
from tui.texts import plan_lines
from tui.trouble import TroubleScreen

FOLLOW_SECONDS = 0.1       # between two looks at what the job has said
DRAW_SECONDS = 0.2         # between two drawings of it; on a serial line PLAIN_SECONDS
PLAIN_SECONDS = 5.0


class Wizard(App[None]):
    """`position` 0 is the start; from 1 on the steps of the checklist. It is the `Front` of all screens."""

    CSS_PATH: ClassVar = ["sheets/frame.tcss"]
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar = {Menu}
    COMMAND_PALETTE_BINDING = "f3"
    BINDINGS: ClassVar = keys.BINDINGS

    language: reactive[str] = reactive("en", init=False)
    standing: reactive[State | None] = reactive(None, init=False, always_update=True)
    machine: reactive[MachineFacts | None] = reactive(None, init=False)
    trouble: reactive[InstallError | None] = reactive(None, init=False)
    following: reactive[Following | None] = reactive(None, init=False)
    position = reactive(0, init=False)
    note = reactive("", init=False)
    watched: reactive[Person | None] = reactive(None, init=False)   # the operator in control, if that is somebody else
    pulse = reactive(0, init=False)   # counts what the job has said; screens that show work watch it

    def __init__(
        self, layout: Layout, language: str, *, plain: bool = False, colours: bool = True, dashboard: bool = False
    ) -> None:
        super().__init__(driver_class=Driver, ansi_color=True if plain else None)  # None: as the theme says
        ScrollBar.renderer = PlainScrollBar if plain else ScrollBarRender
        self.desk = Desk(layout)
        self.operators = Operators(self)
        self._opens_dashboard = dashboard
        self.plain = plain
        self._without_colours = [] if colours else [WithoutColours()]
        self.parting = ""
        self.set_reactive(Wizard.language, language)
        self._signature: object = None
        self._drawn_at = 0.0
        self._dirty = False   # the job has said something that is not drawn yet

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), *self._without_colours]

    def get_default_screen(self) -> Screen[None]:
        return Checklist()

    @property
    def front(self) -> Front:
        """This program, as screens know it: a type checker does not see that a reactive attribute reads as its
        value."""
        return cast(Front, self)

    @property
    def checklist(self) -> Checklist:
        screen = self.screen_stack[0]
        assert isinstance(screen, Checklist)
        return screen

    def on_mount(self) -> None:
        for theme in THEMES:
            self.register_theme(theme)
        self.ansi_theme_dark, self.ansi_theme_light = DARK_COLOURS, LIGHT_COLOURS
        asked = os.environ.get("ATOLL_THEME")
        self.theme = PLAIN_THEME if self.plain else asked if asked in THEME_NAMES else THEME_NAMES[0]
        self.set_class(self.plain, "plain")
        if self.plain:
            self.animation_level = "none"
        for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):
                asyncio.get_running_loop().add_signal_handler(name, self.action_leave)
        self.operators.sit_down()
        self._look(True)
        if self._opens_dashboard:
            self.action_dashboard()
        self.set_interval(FOLLOW_SECONDS, self._follow)
        self.set_interval(PLAIN_SECONDS if self.plain else 1.0, self._watch)
        self.set_interval(pauses.IDLE_SECONDS, pauses.collect_when_quiet)

    def on_unmount(self) -> None:
        self.desk.close()

    def say(self, text: Any) -> str:
        said = str(told(text, self.language))
        return said.translate(PLAIN_SIGNS) if self.plain else said

    # -- the state

    def look_again(self) -> None:
        self._look(False)

    @work(thread=True, exclusive=True, group="look", exit_on_error=False)
    def _look(self, first: bool) -> None:
        """Read the state. The first time, open the step where work continues, and attach to a running job."""
        signature = self.desk.signature()  # before it: what changes meanwhile is then looked at once more
        try:
            state, trouble = self.desk.state(), None
        except InstallError as error:
            state, trouble = None, error
        machine = self.machine or self.desk.machine()
        if first:
            self.desk.look_for_trouble()
        self.call_from_thread(self._looked, state, signature, trouble, machine, first)

    def _looked(
        self, state: State | None, signature: object, trouble: InstallError | None, machine: MachineFacts, first: bool
    ) -> None:
        self._signature = signature
        self.machine, self.trouble = machine, trouble or self.trouble
        self.watched = self.desk.somebody_else()
        self.standing = state or self.standing
        job = self.desk.job() if self.following is None else None
        if job is not None:
            step = next(iter(job.spec.get("given", {}).get("steps", ())), "")
            self.following = Following(lambda reader: self.desk.attach(job, reader), step).start()
        if first and state is not None and any(step.status != "open" for step in state.steps):
            self.open_step(next((n for n, step in enumerate(state.steps, 1) if step.status != "green"),
                                len(state.steps)))  # fmt: skip
        if first and (screen := places.trouble_at_start(self.front)) is not None:
            self.push_screen(screen)

    def _watch(self) -> None:
        """Somebody else may have worked on it."""
        if self.following is None and self._signature is not None and self.desk.signature() != self._signature:
            self._look(False)

    def step(self) -> StepState | None:
        if self.standing is None or not 1 <= self.position <= len(self.standing.steps):
            return None
        return self.standing.steps[self.position - 1]

    @property
    def body(self) -> Body | None:
        """The open pane."""
        return self.checklist.pane.current

    # -- the running job

    def run_step(self, name: str) -> None:
        if self.desk.somebody_else() is not None:
            self.action_seat()
        elif self.following is None:
            self.trouble, self.note = None, ""
            self.following = Following(lambda reader: self.desk.run(name, reader), name).start()

    def _follow(self) -> None:
        following = self.following
        if following is None:
            return
        before = following.news
        for question in following.take():
            self._ask(question)
        if following.ended:
            self._ended(following)
        elif following.news != before:
            self._dirty = True
        now = asyncio.get_running_loop().time()
        if self._dirty and now - self._drawn_at >= (PLAIN_SECONDS if self.plain else DRAW_SECONDS):
            self._dirty, self._drawn_at = False, now
            self.pulse += 1

    def _ended(self, following: Following) -> None:
        self.following, self.trouble = None, following.error
        if key := following.secrets.get("api_key"):
            said = t("The key of the endpoint is {key}\n"
                     "Keep it: it is shown only once, and only its hash is stored.",
                     key=key)  # fmt: skip
            kept = t("Enter: I have kept it.")

            def read(seen: bool | None) -> None:
                if seen:
                    self.desk.key_was_shown(following.result)
                self._look(False)

            self.push_screen(Read(self.say, t("API key"), self.say(said), kept), read)
        elif following.error is not None and (
            screen := places.trouble(self.front, following.error, following.at_step)
        ) is not None:
            self.push_screen(screen)
        self._look(False)

    def _ask(self, question: Question) -> None:
        match question.kind:
            case "licence":
                about = question.about
                title = t("Licence {spdx} of {model}", spdx=about.spdx, model=about.model)
                agree = t("Enter accepts it as {name}. Esc refuses.", name=self.desk.by)
                self.push_screen(Read(self.say, title, dedent(about.text), agree), question.reply)
            case "plan":
                agree = t("Enter starts. Esc leaves everything as it is.")
                text = plan_lines(question.about, self.say)
                self.push_screen(Read(self.say, t("What will be done"), text, agree), question.reply)
            case _:
                self.push_screen(Ask(self.say, question.about), question.reply)

    # -- keys

    def action_seat(self) -> None:
        self.operators.ask_to_take_over()

    async def action_forward(self) -> None:
        if self.screen is not self.checklist:
            return
        body = await self.checklist.pane.open(self.position)  # a key may come before the step that it is meant for
        self.note = ""
        if body.forward().text:
            body.go()

    async def action_again(self) -> None:
        body = await self.checklist.pane.open(self.position)
        if isinstance(body, StepBody) and self.following is None:
            body.run()

    def action_back(self) -> None:
        self.open_step(max(0, self.position - 1))

    def action_move(self, by: int) -> None:
        self.open_step(self.position + by)

    def action_open(self, position: int) -> None:
        self.open_step(position)

    def open_step(self, position: int) -> None:
        if 0 <= position <= (len(self.standing.steps) if self.standing else 0):
            self.note, self.trouble = "", None
            self.position = position

    def action_help(self) -> None:
        body = self.body
        own = self.say(body.HELP) if body is not None and body.HELP else ""
        text = "\n\n".join(each for each in (own, self.say(keys.HELP)) if each)
        self.push_screen(Read(self.say, t("Help"), text))

    def action_messages(self) -> None:
        lines = self.following.lines if self.following else ()
        text = "\n".join(self.say(line) for line in lines) or self.say(t("There are no messages."))
        self.push_screen(Read(self.say, t("Messages of the work"), text, at_its_end=True))

    def action_language(self) -> None:
        if self.plain:
            self.note = t("This terminal shows ASCII only. Korean needs one with UTF-8, such as over SSH.")
        else:
            self.note = ""
            self.language = os.environ[CHOSEN] = "ko" if self.language == "en" else "en"

    def action_colours(self) -> None:
        if self.plain:
            self.note = t("This terminal has only its own 16 colours.")
        else:
            self.theme = THEME_NAMES[(THEME_NAMES.index(self.theme) + 1) % len(THEME_NAMES)]

    def action_redraw(self) -> None:
        self.refresh(repaint=True, layout=True)

    def action_export(self) -> None:
        try:
            self.note = t("Written: {path}", path=self.desk.export())
        except OSError as error:
            self.note = t("The answers could not be written: {why}", why=error.strerror or str(error))

    @work(thread=True, exclusive=True, group="report", exit_on_error=False)
    def action_report(self) -> None:
        try:
            written = self.desk.report()
            mine = next((each for each in written if each.name.endswith(f".{self.language}.md")), written[0])
            said = t("Written: {path}", path=mine)
        except InstallError as error:
            said = error.message
        except OSError as error:
            said = t("The report could not be written: {why}", why=error.strerror or str(error))
        self.call_from_thread(setattr, self, "note", said)

    def action_waive(self) -> None:
        body = self.body
        if isinstance(body, StepBody) and not body.may_decide():
            return
        finding = body.chosen() if isinstance(body, StepBody) else None
        if finding is None or not finding.blocks or finding.severity != "block":
            self.note = t("Only a check that fails can be waived, and not one that is strict.")
            return

        def waived(reason: str | None) -> None:
            if reason:
                self.desk.waive(finding.id, reason)
                self.trouble = None  # that this check blocks is settled
                self.pulse += 1
                self.note = self._after_waiving(finding)

        question = t("Why may this check fail: {check}? The reason is recorded with your name.",
                     check=self.say(finding.title))  # fmt: skip
        self.push_screen(Ask(self.say, question, 3), waived)

    def _after_waiving(self, finding: Finding) -> str:
        left = len(self.body.blocking()) if isinstance(self.body, StepBody) else 0
        if left:
            return t("Waived: {check}. Failing checks that are left: {count}.", check=finding.title, count=left)
        return t("Waived: {check}. Enter runs the step with it.", check=finding.title)

    @work(thread=True, exclusive=True, group="trouble", exit_on_error=False)
    def action_trouble(self) -> None:
        found = self.desk.look_for_trouble()
        self.call_from_thread(self._tell_trouble, found)

    def _tell_trouble(self, found: list[Trouble]) -> None:
        if found:
            self.push_screen(TroubleScreen(found))
        else:
            self.note = t("Nothing is wrong.")

    def action_dashboard(self) -> None:
        if places.has_dashboard():
            self.push_screen(places.dashboard(self.front))

    def action_leave(self) -> None:
        if self.following is not None:
            self.parting = t("The work continues. See it again: {command}", command="atoll")
        self.exit()

    # -- the menu

    def action_command_palette(self) -> None:
        if not CommandPalette.is_open(cast(App[object], self)):
            placeholder = self.say(t("What do you want to do?"))
            self.push_screen(CommandPalette(id="--command-palette", placeholder=placeholder))
