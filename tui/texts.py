"""How plans, sizes and times are put into words."""

from typing import Any

from rich.cells import cell_len, set_cell_size

from appliance.service.install_words import DEEDS, KINDS
from appliance.service.words import human_bytes, t
from tui.frame.front import Say


def plan_lines(plan: Any, say: Say) -> str:
    """Everything that is new or changes; what stays is counted."""
    lines = [say(t("Release {release}", release=plan.release)), ""]
    changed = [(say(DEEDS[item.deed]), say(KINDS[item.kind]), item) for item in plan.items if item.deed != "keep"]
    widths = [max((cell_len(row[column]) for row in changed), default=0) for column in (0, 1)]
    for deed, kind, item in changed:
        more = [human_bytes(item.bytes) if item.bytes else "", say(item.note)]
        head = f"{set_cell_size(deed, widths[0])}  {set_cell_size(kind, widths[1])}  {item.what}"
        lines.append("  ".join(each for each in (head, *more) if each))
    kept = sum(1 for item in plan.items if item.deed == "keep")
    said = t("{size} to write; unchanged: {kept}.", size=human_bytes(plan.bytes), kept=kept)
    return "\n".join([*lines, "", say(said)])


def duration(seconds: float) -> str:
    """0:42, 12:03, 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def long_time(seconds: float) -> str:
    """A Text: 40 s, 12 min, 5 h, 3 days."""
    for unit, text in ((86_400, t("{count} days", count=f"{seconds / 86_400:.3g}")),
                       (3600, t("{count} h", count=f"{seconds / 3600:.3g}")),
                       (60, t("{count} min", count=f"{seconds / 60:.3g}"))):  # fmt: skip
        if seconds >= unit:
            return text
    return t("{seconds} s", seconds=f"{seconds:.0f}")
