"""Cells as an SVG picture that needs no special font.

Every run of characters says where it begins and how long it is. A run ends where the width of the cells changes, so
Hangul covers two cells in whatever font the viewer has, and the frames beside it stay straight.
"""

from collections import Counter
from collections.abc import Iterator
from html import escape
from itertools import groupby

from cells import Cell, Row

CELL, LINE, BASE = 10, 19, 15   # pixels: a cell, a line, and the base line of its text
LATIN, HANGUL = 16, 19          # sizes that fill one cell and two
EDGE = 8
_BITS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))   # of a Braille character: column and line
LATINS = "'DejaVu Sans Mono',Menlo,Consolas,'Liberation Mono',monospace"
HANGULS = "'NanumGothicCoding','D2Coding','Noto Sans Mono CJK KR','Malgun Gothic','Apple SD Gothic Neo',monospace"


def svg(rows: list[Row], title: str) -> str:
    columns = max(sum(cell.width for cell in row) for row in rows)
    width, height = columns * CELL + 2 * EDGE, len(rows) * LINE + 2 * EDGE
    paper = Counter(cell.look.paper for row in rows for cell in row).most_common(1)[0][0]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">\n<title>{escape(title)}</title>\n'
        f"<style>text{{font:{LATIN}px {LATINS};white-space:pre}}text.w{{font:{HANGUL}px {HANGULS}}}"
        "text.b{font-weight:bold}</style>\n"
        f'<rect width="{width}" height="{height}" rx="6" fill="{paper}"/>\n<g transform="translate({EDGE} {EDGE})">\n'
    )
    body = [line for number, row in enumerate(rows) for line in (*_papers(row, number, paper), *_texts(row, number))]
    return head + "\n".join(body) + "\n</g>\n</svg>\n"


def _placed(row: Row) -> Iterator[tuple[int, Cell]]:
    at = 0
    for cell in row:
        yield at, cell
        at += cell.width


def _papers(row: Row, number: int, paper: str) -> Iterator[str]:
    for look, run in groupby(_placed(row), key=lambda each: each[1].look):
        found = list(run)
        x, width = found[0][0] * CELL, sum(cell.width for _, cell in found) * CELL
        if look.paper != paper:
            yield f'<rect x="{x}" y="{number * LINE}" width="{width}" height="{LINE}" fill="{look.paper}"/>'
        if look.underlined:
            yield f'<rect x="{x}" y="{number * LINE + BASE + 2}" width="{width}" height="1" fill="{look.ink}"/>'


def _texts(row: Row, number: int) -> Iterator[str]:
    def kind_of(placed: tuple[int, Cell]) -> tuple[str, bool, int]:
        return placed[1].look.ink, placed[1].look.bold, placed[1].width

    for (ink, bold, width), run in groupby(_placed(row), key=kind_of):
        found = list(run)
        if dots := "".join(_dots(at * CELL, number * LINE, cell.text) for at, cell in found):
            yield f'<path d="{dots}" fill="{ink}"/>'
        for start, words in _words("".join(" " if _is_dots(cell.text) else cell.text for _, cell in found)):
            kind = " ".join(name for name, on in (("b", bold), ("w", width == 2)) if on)
            marked = f' class="{kind}"' if kind else ""
            # Latin is stretched to its cells, so that lines of frames meet; Hangul only moves apart.
            fit = ' lengthAdjust="spacingAndGlyphs"' if width == 1 else ""
            yield (
                f'<text x="{(found[0][0] + start * width) * CELL}" y="{number * LINE + BASE}" '
                f'textLength="{len(words) * width * CELL}"{fit} fill="{ink}"{marked}>'
                f"{escape(words, quote=False)}</text>"
            )


def _is_dots(character: str) -> bool:
    return "\u2800" <= character <= "\u28ff"


def _dots(x: int, y: int, character: str) -> str:
    """Braille, which plots are made of and many fonts lack: each dot as a square."""
    if not _is_dots(character):
        return ""
    found = ord(character) - 0x2800
    return "".join(f"M{x + 2 + 5 * column} {y + 2 + 5 * line}h2v2h-2z"
                   for bit, (column, line) in enumerate(_BITS) if found >> bit & 1)  # fmt: skip


def _words(text: str) -> Iterator[tuple[int, str]]:
    """Where each part begins and what it is; two spaces or more divide parts."""
    start = 0
    for part in text.split("  "):
        if words := part.strip(" "):
            yield start + len(part) - len(part.lstrip(" ")), words
        start += len(part) + 2
