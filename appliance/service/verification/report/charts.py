"""Charts as inline SVG: no script, no font, no file beside the page."""

from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 640, 180
_LEFT, _BOTTOM, _TOP = 64, 22, 12


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> str:
    """Groups of horizontal bars: (name, [(what, value)]), each group on a scale of its own."""
    line, gap = 18, 12
    height = sum(line * len(values) + gap + 16 for _, values in rows)
    parts, y = [], 0
    for name, values in rows:
        parts.append(f'<text x="0" y="{y + 12}" class="name">{escape(name)}</text>')
        y += 16
        most = max((value for _, value in values), default=0.0) or 1.0
        for what, value in values:
            width = max(1.0, value / most * (_WIDTH - 240))
            parts.append(f'<text x="52" y="{y + 13}" text-anchor="end">{escape(what)}</text>'
                         f'<rect x="60" y="{y + 3}" width="{width:.1f}" height="12" class="bar"/>'
                         f'<text x="{66 + width:.1f}" y="{y + 13}">{value:,.1f} {escape(unit)}</text>')  # fmt: skip
            y += line
        y += gap
    return _svg(height, "".join(parts))


def line(at: Sequence[float], values: Sequence[float], unit: str) -> str:
    """One series over seconds; empty for fewer than two points."""
    if len(at) < 2 or len(at) != len(values):
        return ""
    most = max(values) or 1.0
    span = (at[-1] - at[0]) or 1.0
    inner = _HEIGHT - _TOP - _BOTTOM
    points = " ".join(
        f"{_LEFT + (x - at[0]) / span * (_WIDTH - _LEFT - 8):.1f},{_TOP + (1 - value / most) * inner:.1f}"
        for x, value in zip(at, values, strict=True)
    )
    axis = (
        f'<line x1="{_LEFT}" y1="{_TOP}" x2="{_LEFT}" y2="{_HEIGHT - _BOTTOM}" class="axis"/>'
        f'<line x1="{_LEFT}" y1="{_HEIGHT - _BOTTOM}" x2="{_WIDTH - 8}" y2="{_HEIGHT - _BOTTOM}" class="axis"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end">{most:,.4g}</text>'
        f'<text x="{_LEFT - 6}" y="{_HEIGHT - _BOTTOM}" text-anchor="end">0</text>'
        f'<text x="{_LEFT + 4}" y="{_TOP + 8}">{escape(unit)}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{at[0]:,.0f} s</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 6}" text-anchor="end">{at[-1]:,.0f} s</text>'
    )
    return _svg(_HEIGHT, f'{axis}<polyline points="{points}" class="line"/>')


def _svg(height: float, inner: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" xmlns="http://www.w3.org/2000/svg">{inner}</svg>'
