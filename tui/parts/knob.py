"""A number or choice: left and right change it by one step, digits write it. Letters are passed on as keys."""

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import RenderResult
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from tui.frame.front import Told

MOST_DIGITS = 9


class Knob(Told, Widget, can_focus=True):
    """`steps`: what left and right go through; digits may write any other number where `writable`. While a number is
    being written it may be one that no step has."""

    class Turned(Message):
        def __init__(self, knob: "Knob") -> None:
            super().__init__()
            self.knob = knob

    value: reactive[str] = reactive("")
    title = reactive("")        # a Text
    remark = reactive("")       # a Text
    language = reactive("en")

    def __init__(self, name: str, *, writable: bool = True) -> None:
        super().__init__(id=f"knob-{name}")
        self.knob_name, self.writable = name, writable
        self.steps: tuple[str, ...] = ()
        self._writing = False

    def render(self) -> RenderResult:
        here = self.has_focus
        title = self.say(self.title)
        width = 18
        text = Text(no_wrap=True, overflow="crop", end="")
        text.append(("> " if here else "  ") + title + " " * max(1, width - cell_len(title)), "bold" if here else "")
        shown = f"{int(self.value):,}" if self.value.isdigit() and not self._writing else self.value or "_"
        text.append("< ", "dim").append(f"{shown:^9}", "reverse" if here else "bold").append(" >", "dim")
        return text.append(f"  {self.say(self.remark)}", "dim")

    def on_focus(self) -> None:
        self._writing = False
        self.refresh()

    def on_blur(self) -> None:
        self._writing = False
        self.refresh()

    def on_key(self, event: events.Key) -> None:
        match event.key:
            case "left" | "right":
                self._step(1 if event.key == "right" else -1)
            case "backspace" if self.writable:
                self._write(self.value[:-1] if self._writing else "")
            case "full_stop" | "comma" if self.writable and self.knob_name == "share":
                self._write((self.value if self._writing else "0").rstrip(".") + ".")
            case key if self.writable and key.isascii() and key.isdigit():
                self._write((self.value if self._writing else "") + key)
            case _:
                return
        event.stop()
        event.prevent_default()

    def on_click(self, event: events.Click) -> None:
        self.focus()
        self._step(1 if event.x >= 26 else -1 if 19 <= event.x <= 22 else 0)

    def _step(self, by: int) -> None:
        self._writing = False
        if not by or not self.steps:
            return
        if self.value in self.steps:
            at = self.steps.index(self.value) + by
        else:
            now = _float(self.value)
            above = [n for n, step in enumerate(self.steps) if _float(step) > now]
            at = (above[0] if above else len(self.steps)) - (1 if by < 0 else 0)
        self._turn(self.steps[max(0, min(len(self.steps) - 1, at))])

    def _write(self, text: str) -> None:
        self._writing = True
        self._turn(text[:MOST_DIGITS])

    def _turn(self, value: str) -> None:
        self.value = value
        self.refresh()
        self.post_message(self.Turned(self))


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
