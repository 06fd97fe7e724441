"""A form of a few fields, and a list to pick one line from. Esc closes them, and changes nothing."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label, OptionList, Static
from textual.widgets.option_list import Option

from appliance.service.words import t
from tui.frame.front import Say

MOST_TALL = 5   # fields that stand below their titles


class Field(NamedTuple):
    """`title` and `hint` are texts; `restrict` a pattern of what may be typed at all."""

    name: str
    title: str
    value: str = ""
    hint: str = ""
    restrict: str | None = None


class Form(ModalScreen[dict[str, str] | None]):
    """`take` tries the values and returns what is wrong with them (a Text); empty: they are taken.

    Many fields stand in one line each, so that they fit 24 lines, and F5 takes them from any field.
    """

    BINDINGS: ClassVar = [Binding("escape", "dismiss(None)"), Binding("down", "app.focus_next"),
                          Binding("up", "app.focus_previous"), Binding("f5", "take")]  # fmt: skip

    def __init__(
        self, say: Say, title: str, fields: list[Field], take: Callable[[dict[str, str]], str], about: str = ""
    ) -> None:
        super().__init__()
        self.say, self.heading, self.fields, self.take, self.about = say, title, fields, take, about

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(Text(self.say(self.heading), style="bold"))
            if self.about:
                yield Static(Text(self.say(self.about)))
            column = max(cell_len(self.say(field.title)) for field in self.fields) if self.is_long else 0
            for field in self.fields:
                hint = f"  {self.say(field.hint)}" if field.hint else ""
                title = self.say(field.title)
                label = Label(Text(title + " " * (column - cell_len(title))).append(hint, "dim"))
                entry = Input(field.value, id=f"field-{field.name}", max_length=200, restrict=field.restrict)
                if self.is_long:
                    yield Horizontal(label, entry, classes="row")
                else:
                    yield from (label, entry)
            leave = t("Enter: the next one. F5 takes them all, Esc leaves them as they are.") if self.is_long else t(
                "Enter continues, Esc leaves it as it is.")
            yield Static(Text(self.say(leave)), id="hint")

    @property
    def is_long(self) -> bool:
        return len(self.fields) > MOST_TALL

    def on_mount(self) -> None:
        self.query(Input).first().focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        inputs = list(self.query(Input))
        at = inputs.index(event.input)
        if at + 1 < len(inputs):
            inputs[at + 1].focus()
        else:
            self.action_take()

    def action_take(self) -> None:
        values = {field.name: self.query_one(f"#field-{field.name}", Input).value.strip() for field in self.fields}
        wrong = self.take(values)
        if wrong:
            self.query_one("#hint", Static).update(Text(self.say(wrong), "bold"))
        else:
            self.dismiss(values)


class Pick(ModalScreen[str | None]):
    """One of several lines, by its name."""

    BINDINGS: ClassVar = [Binding("escape", "dismiss(None)")]

    def __init__(self, say: Say, title: str, choices: dict[str, str], about: str = "") -> None:
        super().__init__()
        self.say, self.heading, self.choices, self.about = say, title, choices, about

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(Text(self.say(self.heading), style="bold"))
            if self.about:
                yield Static(Text(self.say(self.about)))
            yield OptionList(*(Option(Text(self.say(text)), id=name) for name, text in self.choices.items()))
            yield Static(Text(self.say(t("Up and down choose, Enter takes it, Esc leaves it as it is."))), id="hint")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option.id)
