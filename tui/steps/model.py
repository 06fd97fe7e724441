"""Model and licence: what the medium offers and whether it fits, what it is used for, and the licences."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import work
from textual.binding import Binding
from textual.widget import Widget
from textual.widgets import Static

from appliance.service.desk import InstallError
from appliance.service.words import human_bytes, t
from tui.dialogs.form import Pick
from tui.frame.front import Forward, Key
from tui.keys import letter
from tui.look import FITS
from tui.parts.table import Table
from tui.pauses import keep_loaded
from tui.steps.body import StepBody

if TYPE_CHECKING:
    from appliance.service.planning.offers import Offer

_COLUMNS = (t("Model"), t("Size"), t("Weights"), t("Context"), t("Fits"), t("Licence"))
_NARROW = (_COLUMNS[0], _COLUMNS[1], *_COLUMNS[4:])   # beside a rail in 80 columns
_WIDE = 80
_PADDING = 2       # cells beside each column
_LEAST_NAME = 12


class ModelBody(StepBody):
    STEP = "model"
    LEAD = t("Choose the model, and read each licence to its end.")
    HELP = t(
        "The list shows every model of the medium: its size, the precision of its weights, its longest context, "
        "whether it fits on this machine, and its licence.\n"
        "If the medium holds several, Space chooses which of them run.\n"
        "U sets what they are used for, which decides the engine's first settings.\n"
        "Enter shows each licence. You can accept it only after its end was on the screen; your name, the time and "
        "the hash of the text are recorded."
    )
    BINDINGS: ClassVar = [Binding("space", "choose"), letter("u", "use")]

    def __init__(self) -> None:
        super().__init__()
        self.offers: list[Offer] = []
        self.uses: dict[str, dict[str, str]] = {}
        self.problem: InstallError | None = None
        self.looked = False
        self._drawn: object = None

    def parts(self) -> Iterator[Widget]:
        yield Table(id="offers", cursor_type="row", show_row_labels=False)
        yield Static("", id="use", markup=False)

    def open(self) -> None:
        super().open()
        self._look()

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _look(self) -> None:
        from appliance.service.planning.offers import uses

        found, problem = [], None
        try:
            found = self.front.desk.offers()
        except InstallError as error:
            problem = error
        keep_loaded()
        self.app.call_from_thread(self._looked, found, uses(), problem)

    def _looked(self, found: "list[Offer]", known: dict[str, dict[str, str]], problem: InstallError | None) -> None:
        self.offers, self.uses, self.problem, self.looked = found, known, problem, True
        if not self._is_chosen_yet() and len(found) == 1:
            self._drawn = None
        if not self.is_open:
            return
        self.draw()
        if len(found) > 1 and not self._chosen_paths() and self.screen.is_current:
            self.query_one("#offers", Table).focus()

    # -- drawing

    def on_resize(self) -> None:
        """The table has more columns where there is room for them."""
        if self.is_open:
            self.draw_facts()

    def draw_facts(self) -> None:
        table = self.query_one("#offers", Table)
        table.can_focus = len(self.offers) > 1
        table.display = bool(self.offers) and not self.at_work
        self._fill(table)
        self.query_one("#use", Static).update(Text(self._use()))
        self.query_one("#use", Static).display = not self.at_work

    def _fill(self, table: Table) -> None:
        offered = [(each.name, each.fit) for each in self.offers]
        drawn = (self.front.language, offered, self._chosen_paths(), self.size.width)
        if drawn == self._drawn or not self.size.width:
            return
        self._drawn, row = drawn, table.cursor_row
        wide = self.size.width >= _WIDE
        heads = ["", *(self.say(each) for each in (_COLUMNS if wide else _NARROW))]
        rows = [self._row(offer, wide=wide) for offer in self.offers]
        others = [max([cell_len(heads[at]), *(row[at].cell_len for row in rows if len(row) == len(heads))])
                  for at in range(len(heads)) if at != 1]  # fmt: skip
        room = self.size.width - sum(others) - _PADDING * len(heads) - 1
        for cells in rows:  # the whole name stands below the table
            cells[1].truncate(max(_LEAST_NAME, room), overflow="crop" if self.front.plain else "ellipsis")
        table.fill(heads, rows)
        if self.offers:
            table.move_cursor(row=min(row, len(self.offers) - 1))

    def _row(self, offer: "Offer", *, wide: bool) -> list[Text]:
        if offer.problem:
            return [Text("   "), Text(offer.name), Text(self.say(offer.problem), "red")]
        mark = "[x]" if str(offer.path) in self._chosen_paths() else "[ ]"
        word, colour = FITS[offer.fit]
        more = [Text(offer.precision), Text(f"{offer.context:,}" if offer.context else "?")] if wide else []
        alone = sum(each.name == offer.name for each in self.offers) == 1
        name = offer.name if alone and not wide else f"{offer.name} {offer.version}"
        return [Text(mark), Text(name), Text(human_bytes(offer.bytes)), *more, Text(self.say(word), colour),
                Text(offer.spdx)]  # fmt: skip

    def _use(self) -> str:
        if self.problem is not None:
            return self.say(self.problem.message)
        if not self.looked:
            return self.say(t("Looking at the medium ..."))
        fits = "\n".join(self._about(offer) for offer in self.offers if offer.fit_text)
        title = self.uses.get(self.front.desk.answers.preset.workload, {}).get(self.front.language, "")  # type: ignore[attr-defined]
        use = self.say(t("Used for: {use}", use=title or self.front.desk.answers.preset.workload))  # type: ignore[attr-defined]
        return "\n".join(each for each in (fits, use) if each)

    def _about(self, offer: "Offer") -> str:
        known = t("up to {context} tokens", context=f"{offer.context:,}") if offer.context else ""
        said = [offer.version, offer.precision, self.say(known), self.say(offer.fit_text)]
        return f"{offer.name}: {', '.join(each for each in said if each)}"

    # -- what is chosen

    def _chosen_paths(self) -> set[str]:
        models = self.front.desk.answers.models
        if models:
            named = {str(each.bundle) for each in models}
            return {str(offer.path) for offer in self.offers if str(offer.path) in named or offer.name in named}
        return {str(self.offers[0].path)} if len(self.offers) == 1 else set()

    def _is_chosen_yet(self) -> bool:
        return bool(self.front.desk.answers.models) or len(self.offers) <= 1

    def forward(self) -> Forward:
        idle = self.front.following is None and self.front.watched is None
        if idle and len(self.offers) > 1 and not self._chosen_paths():
            return Forward("", t("The medium holds {count} models. Space chooses one.", count=len(self.offers)))
        return super().forward()

    def run_words(self) -> str:
        return t("Read the licences")

    def empty(self) -> str:
        return t("Enter shows the licences, one after another.")

    def focus_first(self) -> None:
        if len(self.offers) > 1 and not self._chosen_paths():
            self.query_one("#offers", Table).focus()
        else:
            super().focus_first()

    def keys(self) -> list[Key]:
        if self.front.following is not None:
            return []
        choose = [Key("Space", t("Choose"), "choose")] if len(self.offers) > 1 else []
        return [*choose, Key("U", t("Use"), "use"), *super().keys()]

    def action_choose(self) -> None:
        """One model below a prefix; on a server any number."""
        if len(self.offers) < 2 or not self.may_decide():
            return
        offer = self.offers[self.query_one("#offers", Table).cursor_row]
        if offer.problem:
            self.front.note = offer.problem
            return
        chosen = self._chosen_paths()
        one = self.front.machine is None or self.front.machine.form == "prefix"
        chosen = {str(offer.path)} if one else chosen ^ {str(offer.path)}
        self._take(models=[{"bundle": path} for path in sorted(chosen)] or None)

    def action_use(self) -> None:
        if not self.may_decide():
            return
        choices = {name: titles[self.front.language] for name, titles in self.uses.items()}

        def use(name: str | None) -> None:
            if name is not None:
                self._take(preset={"workload": name})
                self._look()

        self.app.push_screen(
            Pick(self.say, t("What are the models used for?"), choices,
                 t("This decides the engine's first settings: context, users at once, memory.")), use)  # fmt: skip

    def _take(self, **tables: object) -> None:
        try:
            self.front.desk.amend(**tables)  # type: ignore[arg-type]
        except InstallError as error:
            self.front.note = error.message
        self.front.look_again()
        self.draw()
