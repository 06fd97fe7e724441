"""The screen of the checklist: header, steps, the open step, keys."""

from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Static

from appliance.service.words import t
from tui.frame.front import Key, Told
from tui.frame.header import Header
from tui.frame.key_bar import KeyBar, NoteLine
from tui.frame.pane import Pane
from tui.frame.rail import Rail
from tui.look import TOO_SMALL, is_too_small
from tui.steps.body import Body


class Checklist(Told, Screen[None]):
    """Watches the program's state and hands each part of it to the widget that shows it."""

    AUTO_FOCUS: ClassVar[str | None] = ""  # a hidden field must not take keys

    def compose(self) -> ComposeResult:
        yield Header()
        with Horizontal(id="body"):
            yield Rail()
            yield Pane()
        yield NoteLine()
        yield KeyBar()
        yield Static("", id="small", markup=False)

    async def on_mount(self) -> None:
        self.query_one(Header).title = self.front.desk.layout.name
        self.watch(self.app, "standing", self._stands)
        self.watch(self.app, "language", self._speaks)
        self.watch(self.app, "position", self._opens, init=False)
        self.watch(self.app, "note", self._notes)
        self.watch(self.app, "watched", self._watched)
        await self._opens(self.front.position)  # the state may have been read before this was mounted

    @property
    def pane(self) -> Pane:
        return self.query_one(Pane)

    def _stands(self) -> None:
        standing = self.front.standing
        self.query_one(Rail).steps = tuple(standing.steps) if standing else ()
        self.query_one(Rail).refresh()

    def _speaks(self, language: str) -> None:
        for widget in (self.query_one(Header), self.query_one(Rail), self.query_one(NoteLine), self.query_one(KeyBar)):
            widget.language = language
        self._fits()

    async def _opens(self, position: int) -> None:
        self.query_one(Rail).position = position
        await self.pane.open(position)

    def _watched(self) -> None:
        self.query_one(Header).show_operator(self.front.watched)
        self._tell_keys()

    def _notes(self) -> None:
        self._tell_keys()

    def on_body_changed(self, message: Body.Changed) -> None:
        self._tell_keys()

    def _tell_keys(self) -> None:
        body = self.pane.current
        if body is None or not body.is_open:
            return
        forward = body.forward()
        self.query_one(NoteLine).note = self.front.note or forward.why_not
        enter = [Key("Enter", forward.text, "app.forward")] if forward.text else []
        back = [Key("Esc", t("Back"), "app.back")] if self.front.position else []
        own = [key for key in body.keys() if self.front.watched is None or key.action in body.LOOKS]  # noqa: SIM118
        seat = [Key("F11", t("Ask to work here"), "app.seat")] if self.front.watched is not None else []
        log = [Key("F8", t("Log"), "app.messages")] if self.front.following is not None else []
        always = [Key("F1", t("Help"), "app.help"), Key("F3", t("Menu"), "app.command_palette"),
                  Key("F10", t("Leave"), "app.leave"), Key("F6", t("Answers"), "app.export"),
                  Key("F7", t("Report"), "app.report"),
                  *([] if self.front.plain else [Key("F4", t("Colours"), "app.colours")])]  # fmt: skip
        self.query_one(KeyBar).keys = (*seat, *enter, *own, *back, *log, *always)

    def on_resize(self, event: events.Resize) -> None:
        self._fits()

    def _fits(self) -> None:
        self.set_class(is_too_small(self.size), "small")
        self.query_one("#small", Static).update(Text(self.say(TOO_SMALL)))
