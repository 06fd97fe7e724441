"""What a screen may use of the program around it. Screens import this and not tui/app.py, so there is no import
circle."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

from textual.dom import DOMNode

from appliance.service.desk import Desk, InstallError, MachineFacts, Person
from appliance.service.state import State, StepState
from tui.following import Following

Say = Callable[[Any], str]


class Key(NamedTuple):
    """One key at the bottom: its name on the keyboard, what it does now (a Text), and the action behind it."""

    name: str
    text: str
    action: str


class Forward(NamedTuple):
    """What Enter does (a Text). Empty: nothing now, and `why_not` says why; else it may say why it is to be done."""

    text: str
    why_not: str = ""


class Front(Protocol):
    """The program. Its attributes are reactive: a screen watches them to be drawn again."""

    desk: Desk
    plain: bool                        # ASCII and 16 colours
    language: str
    standing: State | None             # None until it was first read
    machine: MachineFacts | None
    position: int                      # 0: the start; then the steps, from 1 on
    following: Following | None        # the job that runs
    trouble: InstallError | None       # what the last work ended with
    watched: Person | None             # the operator in control, if somebody else: this program only watches then
    note: str                          # one line (a Text) above the keys

    def say(self, text: Any) -> str: ...

    def step(self) -> StepState | None:
        """The step that is open; None at the start."""
        ...

    def run_step(self, name: str) -> None:
        """Start the step as a job and follow it."""
        ...

    def look_again(self) -> None:
        """Read the state of the checklist again."""
        ...

    def open_step(self, position: int) -> None: ...


class Told:
    """Mixin of a widget: the program it is in, and its texts in the operator's language."""

    @property
    def front(self) -> Front:
        return cast(Front, cast(DOMNode, self).app)

    def say(self, text: Any) -> str:
        return self.front.say(text)
