"""A question with a line to type in, and a text to read."""

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from appliance.service.words import t
from tui.frame.front import Say


class Ask(ModalScreen[str | None]):
    """A question that is answered in words; None if the dialog was closed."""

    BINDINGS = [Binding("escape", "dismiss(None)")]  # noqa: RUF012

    def __init__(self, say: Say, question: str, least: int = 0) -> None:
        super().__init__()
        self.say, self.question, self.least = say, question, least

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(Text(self.say(self.question)))
            yield Input(max_length=500)
            yield Static(Text(self.say(t("Enter answers, Esc leaves it open."))), id="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()  # the screen below would take it for one of its own fields
        said = event.value.strip()
        if len(said) < self.least:
            short = t("Write at least {count} characters.", count=self.least)
            self.query_one("#hint", Static).update(Text(self.say(short)))
            return
        self.dismiss(said)


class Read(ModalScreen[bool]):
    """A text. With `agree` it is a question, whose Enter counts only when the end was on the screen. A log is opened
    `at_its_end`: the news is there."""

    BINDINGS = [  # noqa: RUF012
        Binding("enter", "agree"), Binding("escape", "dismiss(False)"), Binding("f1,f8", "dismiss(False)"),
        Binding("pagedown,space", "page(1)"), Binding("pageup", "page(-1)"),
    ]  # fmt: skip

    def __init__(self, say: Say, title: str, text: str, agree: str = "", *, at_its_end: bool = False) -> None:
        super().__init__()
        self.say, self.heading, self.text, self.agree = say, title, text, agree
        self.at_its_end = at_its_end
        self._told = ""

    def compose(self) -> ComposeResult:
        with Vertical(classes="box tall"):
            yield Static(Text(self.say(self.heading), style="bold"))
            with VerticalScroll():
                yield Static(Text(self.text))
            yield Static("", id="hint", markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        if self.at_its_end:
            self.query_one(VerticalScroll).scroll_end(animate=False)
        self.set_interval(0.2, self._tell)
        self.call_after_refresh(self._tell)

    def at_end(self) -> bool:
        if not self.is_running or not self.query(VerticalScroll):
            return False  # nobody has seen anything yet
        pane = self.query_one(VerticalScroll)
        return pane.size.height > 0 and pane.scroll_offset.y >= pane.max_scroll_y

    def _is_long(self) -> bool:
        return self.query_one(VerticalScroll).max_scroll_y > 0

    def _tell(self) -> None:
        at_end = self.at_end()
        if self.agree:
            hint = self.agree if at_end else t("Read to the end first: Page Down. Esc refuses.")
        else:
            hint = t("Page Down shows more. Esc closes this.")
            if at_end:
                hint = t("Esc closes this.")
            if at_end and self.at_its_end and self._is_long():
                hint = t("Page Up shows what came before. Esc closes this.")
        if hint != self._told:
            self._told = hint
            self.query_one("#hint", Static).update(Text(self.say(hint)))

    def action_page(self, by: int) -> None:
        pane = self.query_one(VerticalScroll)
        pane.scroll_to(y=pane.scroll_offset.y + by * max(1, pane.size.height - 1), animate=False)

    def action_agree(self) -> None:
        if not self.agree:
            self.dismiss(False)
        elif self.at_end():
            self.dismiss(True)
