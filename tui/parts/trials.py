"""A sweep: every trial with its numbers, a plot of them, and at the end before and after."""

from typing import Any

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from appliance.service.words import t
from tui.frame.front import Told
from tui.parts.plot import Plot
from tui.parts.table import Table
from tui.texts import duration

_TOKENS = t("Tokens/s")   # left out where the table is narrow: the plot has it
_COLUMNS = (t("Trial"), t("Changed"), t("Requests/s"), _TOKENS, t("First token"), t("Between"))
_WIDE = 70


class Trials(Told, Vertical):
    """First token and between tokens: milliseconds, 95th percentile."""

    has_something = False
    _drawn: object = None
    _shown: tuple[Any, ...] | None = None

    DEFAULT_CSS = "Trials { height: auto; }"

    def compose(self) -> ComposeResult:
        yield Static("", id="trials-head", markup=False)
        yield Table(id="trials", cursor_type="none", show_cursor=False)
        yield Plot(id="trials-plot")

    def on_resize(self) -> None:
        """The columns take the width that there is, which is not known before the first layout."""
        if self._shown is not None:
            self._show(*self._shown)

    def show_live(self, told: list[dict[str, Any]], progressed: tuple[str, int, int] | None) -> None:
        """The last that was said of each trial."""
        latest: dict[object, dict[str, Any]] = {}
        for each in told:
            latest[(each["number"], each["confirms"])] = each
        again = self.say(t("again"))
        rows = [(again if each["confirms"] else str(each["number"]), each["what"], each.get("result"),
                 each.get("why", ""), each["status"]) for each in latest.values()]  # fmt: skip
        head = ""
        if latest:
            last = list(latest.values())[-1]
            spent, budget = duration(last["spent"]), duration(last["budget"])
            head = self.say(t("Trial {number}; {spent} of at most {budget}", number=last["number"], spent=spent,
                              budget=budget))  # fmt: skip
        self._show(head, rows)

    def show_result(self, result: dict[str, Any] | None) -> None:
        if result is None:
            self.has_something = False
            return
        rows = []
        start = result["trials"][0]["setting"]
        for number, trial in enumerate(result["trials"], 1):
            other = ", ".join(f"{name} {value}" for name, value in trial["setting"].items() if value != start[name])
            rows.append((str(number), other or t("the current settings"), trial["result"], trial["why"],
                         "done" if trial["result"] else "failed"))  # fmt: skip
        before, after = result["before"], result["after"]
        head = self.say(t("Before {before} requests/s, now {after}.", before=f"{before['goodput']:.2f}",
                          after=f"{after['goodput']:.2f}"))  # fmt: skip
        self._show(head, rows)

    def _show(self, head: str, rows: list[tuple[str, Any, dict[str, Any] | None, Any, str]]) -> None:
        self.has_something, self._shown = bool(rows), (head, rows)
        drawn = (self.front.language, head, [(row[0], row[4]) for row in rows], self.size.width)
        if drawn == self._drawn or not self.size.width:
            return
        self._drawn = drawn
        self.query_one("#trials-head", Static).update(Text(head))
        table = self.query_one("#trials", Table)
        narrow = self.size.width < _WIDE
        heads = [self.say(each) for each in _COLUMNS if not (narrow and each is _TOKENS)]
        room = self.size.width - 2 * len(heads) - 1 - sum(cell_len(each) for each in (heads[0], *heads[2:]))
        points: list[tuple[float, float]] = []
        lines: list[list[str | Text]] = []
        for at, (name, what, result, why, status) in enumerate(rows, 1):
            changed = Text(self.say(what))
            changed.truncate(max(8, room), overflow="crop" if self.front.plain else "ellipsis")
            if result is None:
                said = self.say(t("running")) if status == "running" else self.say(why)
                lines.append([name, changed, Text(said, "red" if status == "failed" else "")])
                continue
            latency = result["latency_ms"]
            rate = () if narrow else (f"{result['rate']:.1f}",)
            lines.append([name, changed, f"{result['goodput']:.2f}", *rate, _ms(latency, "ttft"), _ms(latency, "itl")])
            points.append((float(at), float(result["rate"])))
        table.fill(heads, lines)
        table.scroll_end(animate=False)
        plot = self.query_one(Plot)
        plot.title, plot.points, plot.x_unit = t("tokens/s of each trial"), tuple(points), ""
        plot.display = len(points) > 1


def _ms(latency: dict[str, Any], name: str) -> str:
    return f"{latency[name]['p95']:,.0f} ms" if name in latency else ""
