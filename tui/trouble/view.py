"""One trouble: what happened, the likely cause, what was not changed, what to do, the evidence."""

from rich.cells import cell_len
from rich.text import Text
from textual.app import RenderResult
from textual.widgets import Static

from appliance.service.trouble import Trouble
from appliance.service.words import t
from tui.frame.front import Told

_INDENT = 3
_BAR = 40
LABELS = (t("What happened"), t("Likely cause"), t("Not changed"), t("What to do"), t("Evidence"))


class TroubleView(Told, Static):
    """As wide as its place; lines are broken between words, and stay below their text, not below the label."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__("", markup=False, classes="trouble")
        self.trouble = trouble

    def show(self, trouble: Trouble) -> None:
        self.trouble = trouble
        self.refresh(layout=True)

    def render(self) -> RenderResult:
        width = self.content_size.width or self.app.size.width
        labels = [self.say(label) for label in LABELS]
        column = _INDENT + max(cell_len(label) for label in labels) + 3
        text, told = Text(end=""), self.trouble
        parts = [[told.happened], [told.cause] if told.cause else [], [told.unchanged], [], list(told.evidence)]
        for label, part in zip(labels, parts, strict=True):
            rows = [Text(self.say(each)) for each in part]
            if label == labels[0] and told.progress is not None:
                rows.append(self._bar(told.progress))
            if label == labels[3]:
                rows = self._actions(max(20, width - column - 1))
            if rows:
                self._block(text, label, rows, column, max(20, width - column - 1))
        return text

    def _actions(self, room: int) -> list[Text]:
        rows = []
        for number, action in enumerate(self.trouble.actions, 1):
            said = [Text(self.say(action.text)), *([Text(self.say(action.command), "bold")] if action.command else [])]
            lines = [line for text in said for line in text.wrap(self.app.console, room - 3)]
            rows += [Text(f"{number}  " if at == 0 else "   ").append_text(line) for at, line in enumerate(lines)]
        return rows

    def _bar(self, part: float) -> Text:
        full, done, rest = round(part * _BAR), "#" if self.front.plain else "█", "." if self.front.plain else "░"
        return Text(f"{done * full}{rest * (_BAR - full)}  {part * 100:.0f} %")

    def _block(self, text: Text, label: str, rows: list[Text], column: int, room: int) -> None:
        if text:
            text.append("\n\n")
        head = " " * _INDENT + label
        text.append(head + " " * (column - cell_len(head)), "bold")
        lines = [line for row in rows for line in row.wrap(self.app.console, room)]
        for number, line in enumerate(lines):
            if number:
                text.append("\n" + " " * column)
            line.rstrip()
            text.append_text(line)
