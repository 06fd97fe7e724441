"""Two operators at one installation: asking to take over, and giving way."""

import time
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from appliance.service.desk import Person
from appliance.service.words import t
from tui.frame.front import Say


class _Decide(ModalScreen[bool | None]):
    """Two sentences and a yes or no."""

    def __init__(self, say: Say, heading: str, text: str, keys: str) -> None:
        super().__init__()
        self.say, self.heading, self.text, self.keys = say, heading, text, keys

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(Text(self.say(self.heading), style="bold"))
            yield Static(Text("\n" + self.say(self.text)))
            yield Static(Text("\n" + self.say(self.keys)), id="hint")


class TakeOver(_Decide):
    """For the operator who watches."""

    BINDINGS: ClassVar = [Binding("enter", "dismiss(True)"), Binding("escape", "dismiss(None)")]

    def __init__(self, say: Say, other: Person) -> None:
        since = time.strftime("%H:%M", time.localtime(other.since))
        super().__init__(
            say, t("{user} ({origin}) works here since {time}.", user=other.user, origin=other.origin, time=since),
            t("You see the same screens, and cannot change anything. You can ask to take over: the other operator has "
              "60 seconds to answer. Running work continues either way."),
            t("Enter asks. Esc keeps watching."),
        )  # fmt: skip


class GiveWay(_Decide):
    """For the operator in control. Enter is not an answer: it may have been meant for the screen below."""

    BINDINGS: ClassVar = [Binding("f9", "dismiss(True)"), Binding("escape", "dismiss(False)")]

    def __init__(self, say: Say, person: Person) -> None:
        super().__init__(
            say, t("{user} ({origin}) asks to take over.", user=person.user, origin=person.origin),
            t("If you give way, you still see everything. Running work continues. Without an answer, they take over "
              "in 60 seconds."),
            t("F9 gives way. Esc keeps your place."),
        )  # fmt: skip
