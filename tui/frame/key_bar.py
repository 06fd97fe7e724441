"""The bottom: one line with news or with what blocks, and the keys that work now."""

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from tui.frame.front import Key, Told


class KeyBar(Told, Widget):
    """Keys that do not fit are left out from the end; F1 lists them all. Each is a button for the mouse too."""

    keys: reactive[tuple[Key, ...]] = reactive(())
    language = reactive("en")

    def render(self) -> RenderResult:
        text, room = Text(no_wrap=True, end=""), self.size.width - 1
        for key in self.keys:
            said = self.say(key.text)
            width = cell_len(f" {key.name} {said} ")
            if width > room:
                break
            room -= width
            is_button = key.action and not self.front.plain  # a console draws links in dark blue on black
            action = Style(meta={"@click": key.action}) if is_button else Style()
            text.append(" ").append(key.name, Style(bold=True) + action).append(f" {said} ", action)
        return text


class NoteLine(Told, Widget):
    """Empty most of the time."""

    note = reactive("")
    language = reactive("en")

    def render(self) -> RenderResult:
        return Text(f" {self.say(self.note)}" if self.note else "", no_wrap=True, overflow="ellipsis", end="")
