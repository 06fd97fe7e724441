"""The steps on the left: which is open, and the state of each. A sign and a word; the colour only repeats them."""

from rich.text import Text
from textual import events
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from appliance.service.state import STATUS_WORDS, StepState
from appliance.service.words import t
from tui.frame.front import Told
from tui.look import COLOURS, MARKS, PLAIN_MARKS, SHORT


class Rail(Told, Widget):
    language = reactive("en")
    steps: reactive[tuple[StepState, ...]] = reactive(())
    position = reactive(0)

    def render(self) -> RenderResult:
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        marks = PLAIN_MARKS if self.front.plain else MARKS
        rows = [("", self.say(t("Start"))), *((step.status, self.say(SHORT[step.id])) for step in self.steps)]
        for number, (status, title) in enumerate(rows):
            here = number == self.position
            text.append(f"{'>' if here else ' '}{marks.get(status, ' ')}", COLOURS.get(status) or "")
            text.append(f" {number} {title}\n", "bold" if here else "")
            if status not in ("", "open", "green"):
                text.append(f"     {self.say(STATUS_WORDS[status])}\n", COLOURS[status])
        return text

    def on_click(self, event: events.Click) -> None:
        """A step is opened by a click on its line or on the word below it."""
        y = event.y - self.styles.padding.top
        for number, status in enumerate(["", *(step.status for step in self.steps)]):
            y -= 1 if status in ("", "open", "green") else 2
            if y < 0:
                self.front.open_step(number)
                return
