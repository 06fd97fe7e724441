"""A GPU's memory as one bar: what takes how much of it, and what is left."""

from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.app import RenderResult
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget

from appliance.service.words import t
from tui.frame.front import Told

Parts = tuple[tuple[str, str, int], ...]   # kind, title (a Text), bytes


class MemoryBar(Told, Widget):
    """Every part has a sign of its own, so that the bar reads without colours too. Below it each part with its size."""

    SIGNS: ClassVar = {"weights": "█", "kv_cache": "▓", "states": "▒", "graphs": "▒", "spare": "░", "others": "·"}
    PLAIN_SIGNS: ClassVar = {"weights": "#", "kv_cache": "=", "states": "s", "graphs": "+", "spare": ".", "others": " "}
    COLOURS: ClassVar = {"weights": "blue", "kv_cache": "cyan", "states": "magenta", "graphs": "yellow",
                         "spare": "green", "others": ""}  # fmt: skip

    parts: reactive[Parts] = reactive((), layout=True)
    total = reactive(0, layout=True)
    language = reactive("en", layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Lines at this width. The bar's own is not known before it has been laid out once."""
        return self._drawn(width).plain.count("\n") + 1

    def render(self) -> RenderResult:
        return self._drawn(self.size.width)

    def _drawn(self, width: int) -> Text:
        text = Text(no_wrap=True, end="")
        if not self.parts or not self.total:
            return text.append(self.say(t("Does not fit.")), "red")
        signs = self.PLAIN_SIGNS if self.front.plain else self.SIGNS
        ends = "[]" if self.front.plain else ("", "")
        room = width - len("".join(ends))
        text.append(ends[0])
        done = used = 0
        for kind, _, size in self.parts:
            used += size
            upto = round(room * min(1.0, used / self.total))
            text.append(signs[kind] * (upto - done), self.COLOURS[kind])
            done = max(done, upto)
        text.append(ends[1])
        left = 0
        for kind, title, size in self.parts:
            said = f" {self.say(title)} {size / 1e9:,.1f} GB   "
            if cell_len(said) + 1 > left:
                text.append("\n")
                left = width + 3  # the spaces behind the last one may be cut off
            left -= cell_len(said) + 1
            text.append(signs[kind].strip() or "_", self.COLOURS[kind]).append(said)
        return text
