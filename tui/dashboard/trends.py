"""How latencies, the queue and the KV cache have moved in the last 15 minutes: a line each, where there is room."""

from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from appliance.service.dashboard import cells, history
from appliance.service.words import t
from tui.frame.front import Say
from tui.parts.plot import spark

ROWS = 4
_GAP, _VALUE = 2, 9   # cells
_TRENDS = (
    (history.FIRST, t("first token, p95"), cells.milliseconds),
    (history.BETWEEN, t("between tokens, p95"), cells.milliseconds),
    (history.WAITING, t("requests waiting"), lambda value: f"{value:.0f}"), (history.KV, t("KV cache"), cells.share),
)  # fmt: skip


def trends(seen: Mapping[str, Sequence[tuple[float, float]]], say: Say, width: int, *, plain: bool) -> Text:
    """A title, the line, and the latest value."""
    titles = [say(title) for _, title, _ in _TRENDS]
    column = max(map(cell_len, titles))
    room = width - column - _VALUE - 2 * _GAP
    text = Text(no_wrap=True, end="")
    for (name, _, told), title in zip(_TRENDS, titles, strict=True):
        points = seen.get(name, ())
        line = spark(points, room, plain=plain)
        latest = told(points[-1][1]) if points else cells.NO_TRAFFIC
        text.append("\n" if text else "").append(set_cell_size(title, column) + " " * _GAP)
        text.append(line.ljust(room), "cyan").append(f"  {latest:>{_VALUE}}")
    return text
