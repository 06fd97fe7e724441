"""The screen of the troubles: one at a time, with the keys that help."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import Screen

from appliance.service.trouble import Trouble
from appliance.service.words import t
from tui.dialogs.ask import Read
from tui.frame.front import Key, Told
from tui.frame.header import Header
from tui.frame.key_bar import KeyBar, NoteLine
from tui.trouble.view import TroubleView

LOOK_SECONDS = 5.0   # between two looks at what stands, while the screen is open


class TroubleScreen(Told, Screen[None]):
    """Looks again by itself: it closes when the trouble is over, and a bar moves while an engine loads.

    The error of a step's work (`step`) stays: looking finds what is wrong now, not why the work ended. F5 runs that
    step again.
    """

    BINDINGS: ClassVar = [
        Binding("escape,q", "dismiss(None)"), Binding("right,tab,n", "turn(1)"), Binding("left,p", "turn(-1)"),
        Binding("f8", "log"), Binding("f5", "again"), Binding("f7", "app.report"), Binding("f1", "help"),
        Binding("down", "scroll(1)"), Binding("up", "scroll(-1)"), Binding("enter", "dismiss(None)"),
    ]  # fmt: skip
    HELP = t(
        "One trouble stands here at a time; Left and Right show the others.\n"
        "Below \"What to do\" is a line to type in a shell for each step. Nothing runs by itself.\n"
        "The screen looks again every few seconds and closes when it is over.\n"
        "F5   look again now; after a step that failed: run it again\n"
        "F8   the log of the service\n"
        "F7   write the report of all steps to files\n"
        "Esc  back to where you were"
    )

    def __init__(self, troubles: list[Trouble], step: str = "") -> None:
        super().__init__()
        self.troubles, self.at, self.step = troubles, 0, step
        moves = ("draining", "engine-loading", "engine-failed", "stopped")
        self._live = not step and any(each.id in moves for each in troubles)

    def compose(self) -> ComposeResult:
        yield Header()
        with VerticalScroll(id="trouble"):
            yield TroubleView(self.troubles[self.at])
        yield NoteLine()
        yield KeyBar()

    def on_mount(self) -> None:
        self.watch(self.app, "language", lambda: self._draw())
        self.watch(self.app, "note", lambda: self._draw())
        if self._live:
            self.set_interval(LOOK_SECONDS, self.action_again)
        self._draw()

    def _draw(self) -> None:
        trouble = self.troubles[self.at]
        header, bar, note = self.query_one(Header), self.query_one(KeyBar), self.query_one(NoteLine)
        header.language, header.title = self.front.language, self.say(trouble.title)
        bar.language = note.language = self.front.language
        self.query_one(TroubleView).show(trouble)
        many = len(self.troubles) > 1
        place = t("{number} of {count}", number=self.at + 1, count=len(self.troubles))
        turn = [Key("Left Right", place, "screen.turn(1)")]
        bar.keys = (
            Key("Esc", t("Back"), "screen.dismiss(None)"), *(turn if many else []),
            Key("F5", t("Run it again") if self.step else t("Look again"), "screen.again"),
            Key("F8", t("Log"), "screen.log"), Key("F7", t("Report"), "app.report"),
            Key("F1", t("Help"), "screen.help"),
        )  # fmt: skip
        note.note = self.front.note

    def action_turn(self, by: int) -> None:
        self.at = (self.at + by) % len(self.troubles)
        self._draw()

    def action_scroll(self, by: int) -> None:
        self.query_one("#trouble").scroll_relative(y=by, animate=False)

    def action_help(self) -> None:
        self.app.push_screen(Read(self.say, t("Help"), self.say(self.HELP)))

    def action_log(self) -> None:
        lines = "\n".join(self.front.desk.log_tail()) or self.say(t("The log is empty."))
        self.app.push_screen(Read(self.say, t("Log of the service"), lines, at_its_end=True))

    def action_again(self) -> None:
        if self.step:
            self._run_again()
            return
        self.run_worker(self._look, thread=True, exclusive=True, group="trouble", exit_on_error=False)

    def _run_again(self) -> None:
        front, steps = self.front, self.front.standing.steps if self.front.standing else []
        position = next((number for number, each in enumerate(steps, 1) if each.id == self.step), front.position)
        self.dismiss(None)
        front.open_step(position)
        front.run_step(self.step)

    def _look(self) -> None:
        found = self.front.desk.look_for_trouble()
        self.app.call_from_thread(self._looked, found)

    def _looked(self, found: list[Trouble]) -> None:
        """The same trouble stays in front, with its new numbers; one that is over goes."""
        if not self.is_attached:
            return
        known = self.troubles[self.at].id
        if not found:
            self.dismiss(None)
            return
        self.troubles = found
        self.at = next((number for number, each in enumerate(found) if each.id == known), 0)
        self._draw()
