"""Where pictures are kept. A picture is written again only when more than its numbers has changed."""

import re
from html import unescape
from pathlib import Path

from cells import Row, shape
from svg import svg

FONTS = Path("/usr/share/fonts/truetype")
FONT_FILES = [FONTS / name for name in (
    "dejavu/DejaVuSansMono.ttf", "dejavu/DejaVuSansMono-Bold.ttf",
    "nanum/NanumGothicCoding.ttf", "nanum/NanumGothicCodingBold.ttf",
)]  # fmt: skip
_COLOUR = re.compile(r'fill="(#\w+)"')
_TEXT = re.compile(r'<text x="(\d+)" y="(\d+)"[^>]*>([^<]*)</text>')


def text_of(picture: str) -> str:
    """The lines of the screen that an SVG shows, without their distances."""
    lines: dict[int, list[tuple[int, str]]] = {}
    for x, y, words in _TEXT.findall(picture):
        lines.setdefault(int(y), []).append((int(x), unescape(words)))
    return "\n".join(" ".join(words for _, words in sorted(line)) for _, line in sorted(lines.items()))


def same(old: str, new: str) -> bool:
    """Whether they differ in numbers alone: equal size, equal colours, equal words."""
    if old.split(">", 1)[0] != new.split(">", 1)[0] or set(_COLOUR.findall(old)) != set(_COLOUR.findall(new)):
        return False

    def squeezed(text: str) -> str:
        return re.sub(r"\s", "", shape(text))

    return squeezed(text_of(old)) == squeezed(text_of(new))


def keep(folder: Path, name: str, title: str, rows: list[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path, drawn = folder / f"{name}.svg", svg(rows, title)
    if path.exists() and same(path.read_text("utf-8"), drawn) and path.with_suffix(".png").exists():
        return
    path.write_text(drawn, "utf-8")
    path.with_suffix(".png").write_bytes(png(drawn))


def png(drawn: str) -> bytes:
    import resvg_py

    missing = [str(file) for file in FONT_FILES if not file.exists()]
    assert not missing, f"Pictures need these fonts (apt install fonts-dejavu-core fonts-nanum-coding): {missing}"
    return bytes(resvg_py.svg_to_bytes(svg_string=drawn, skip_system_fonts=True, font_files=list(map(str, FONT_FILES))))
