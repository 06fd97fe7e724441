"""What a step found: a list of one line each, and below it what the chosen one means and what to do."""

from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.binding import Binding
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from appliance.service.desk import InstallError
from appliance.service.findings import Finding
from appliance.service.words import t
from tui.frame.front import Say, Told
from tui.look import VERDICTS, verdict


class Findings(Told, OptionList):
    """Enter goes forward here too: it never opens a line by surprise."""

    BINDINGS: ClassVar = [Binding("enter", "app.forward", show=False)]

    class Chosen(Message):
        """Another line is highlighted."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.shown: list[Finding] = []
        self._drawn: object = None

    def show(self, findings: list[Finding]) -> None:
        """Keeps the highlighted line if the same check is still there."""
        drawn = (self.front.language, [(each.id, each.observed, verdict(each)) for each in findings])
        if drawn == self._drawn:
            return
        before = self.chosen()
        self._drawn, self.shown = drawn, list(findings)
        width = min(28, max([cell_len(self.say(each.title)) for each in findings], default=0))
        self.clear_options()
        self.add_options([Option(self._line(each, width)) for each in findings])
        if findings:
            same = next((n for n, each in enumerate(findings) if before and each.id == before.id), None)
            first = next((n for n, each in enumerate(findings) if each.blocks), 0)
            self.highlighted = first if same is None or findings[first].blocks else same

    def _line(self, finding: Finding, width: int) -> Text:
        word, colour = VERDICTS[verdict(finding)]
        title = Text(self.say(finding.title))
        title.set_length(len(title))
        title.truncate(width, overflow="ellipsis" if not self.front.plain else "crop", pad=True)
        line = Text(no_wrap=True, overflow="crop" if self.front.plain else "ellipsis")
        return line.append(self.say(word), colour).append("  ").append(title).append("  ").append(
            self.say(finding.observed))  # fmt: skip

    def chosen(self) -> Finding | None:
        at = self.highlighted
        return self.shown[at] if at is not None and at < len(self.shown) else None

    def on_resize(self) -> None:
        """The chosen line stays on the screen when the terminal, or what stands below the list, changes its size."""
        self.call_after_refresh(self.scroll_to_highlight)

    def on_option_list_option_highlighted(self) -> None:
        self.post_message(self.Chosen())

    def on_option_list_option_selected(self) -> None:  # by the mouse: it looks, and starts nothing
        self.post_message(self.Chosen())


class Detail(Told, Static):
    """Rows of a label and a text."""

    def __init__(self) -> None:
        super().__init__("", classes="detail", markup=False)

    def rows(self, rows: list[tuple[str, str]]) -> None:
        text = Text()
        for label, said in rows:
            if said:
                if text:
                    text.append("\n")
                if label:
                    text.append(f"{self.say(label)}: ", "bold")
                text.append(self.say(said))
        self.update(text)
        self.display = bool(text)


def meaning_of(finding: Finding, say: Say) -> list[tuple[str, str]]:
    """Why it matters, what is needed, what was seen, and what to do where there is something to do."""
    todo = [(t("Fix"), finding.fix), (t("Command"), finding.command)] if not finding.ok else []
    rows: list[tuple[str, str]] = [
        (t("Seen"), finding.observed), (t("Needed"), finding.required), (t("Why"), finding.why), *todo,
        (t("Evidence"), finding.evidence),
    ]  # fmt: skip
    if finding.waiver is not None:
        said = t("{by}: {reason}", by=finding.waiver.by, reason=finding.waiver.reason)
        rows.insert(0, (t("Waived"), said))
    return rows


def trouble_of(error: InstallError) -> list[tuple[str, str]]:
    return [(t("What happened"), error.message), (t("Why"), error.why), (t("Changed"), error.changed),
            (t("Next"), error.hint)]  # fmt: skip
