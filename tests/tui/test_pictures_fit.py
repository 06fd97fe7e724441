"""The pictures in the documents still fit the program: what they say is what it says. Drawn anew by `make pictures`."""

import re
from html import unescape
from pathlib import Path

import pytest
from album import FONT_FILES, png, same
from babel.messages.pofile import read_po
from cells import Cell, Look
from svg import CELL, svg

from tui.frame.pane import BODIES

REPOSITORY = Path(__file__).resolve().parents[2]
ALBUM = REPOSITORY / "docs/pictures"
CATALOGUE = REPOSITORY / "installer/locale/ko/LC_MESSAGES/atoll.po"
STEPS = {body.STEP or "start": body.LEAD for body in BODIES}
PIECE = re.compile(r'<text x="(\d+)" y="(\d+)" textLength="(\d+)"[^>]*?(?: class="([\w ]+)")?>([^<]*)</text>')
PANE = 180   # where the rail ends, in pixels


@pytest.fixture(scope="module")
def texts() -> dict[str, dict[str, str]]:
    """English text to that of each language."""
    with CATALOGUE.open("rb") as file:
        found = {str(message.id): str(message.string) for message in read_po(file, locale="ko") if message.id}
    return {"en": {english: english for english in found}, "ko": found}


def pieces(picture: str) -> list[tuple[int, int, int, bool, str]]:
    """(y, x, end, bold, words), line by line."""
    return sorted((int(y), int(x), int(x) + int(length), "b" in (kind or "").split(), unescape(words))
                  for x, y, length, kind, words in PIECE.findall(picture))  # fmt: skip


def keys(picture: str) -> list[str]:
    """The words behind the keys of the last line."""
    found = pieces(picture)
    labels: list[str] = []
    at = 0
    for y, x, end, bold, words in found:
        if y == found[-1][0]:
            if bold:
                labels.append("")
            elif labels:
                labels[-1] += (" " if labels[-1] and x - at >= CELL else "") + words.strip()
            at = end
    return labels


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def pictures(language: str) -> list[Path]:
    return sorted((ALBUM / language).glob("*.svg"))


@pytest.mark.parametrize("language", ["en", "ko"])
def test_keys_and_leads_are_those_of_the_program(language: str, texts: dict[str, dict[str, str]]) -> None:
    known = set(texts[language].values())
    assert pictures(language)
    for path in pictures(language):
        picture = path.read_text("utf-8")
        labels = keys(picture)
        assert labels, path
        others = [each for each in labels if each not in known and not re.fullmatch(r"\d+( of |/)\d+", each)]  # 1 of 2
        assert not others, f"{path}: run make pictures"
        lead = STEPS.get(path.stem.partition("-")[0])
        if lead and path.stem not in ("pilot-form", "tune-form"):  # a form covers it
            pane = squeezed("".join(words for _, x, _, _, words in pieces(picture) if x >= PANE))
            assert squeezed(texts[language][str(lead)]) in pane, f"{path}: run make pictures"


def test_both_languages_have_the_same_pictures_and_they_are_small() -> None:
    assert {path.name for path in pictures("en")} == {path.name for path in pictures("ko")}
    files = list(ALBUM.rglob("*.*"))
    assert sum(path.stat().st_size for path in files) < 6_000_000
    for path in files:
        assert path.stat().st_size < 150_000, path
        assert path.with_suffix(".svg").exists(), path
        assert path.with_suffix(".png").exists(), path


@pytest.mark.parametrize("language", ["en", "ko"])
def test_each_picture_stands_in_a_document(language: str) -> None:
    documents = "".join(path.read_text("utf-8") for path in (REPOSITORY / "docs" / language).rglob("*.md"))
    assert not [path.stem for path in pictures(language) if f"pictures/{language}/{path.stem}.png" not in documents]


def test_hangul_covers_two_cells_wherever_it_is_drawn() -> None:
    look = Look("#ffffff", "#000000")
    row = [Cell("a", 1, look), *(Cell(each, 2, look) for each in "한글"), Cell("|", 1, look)]
    drawn = svg([row], "x")
    placed = [(x, end, words) for _, x, end, _, words in pieces(drawn)]
    assert placed == [(0, CELL, "a"), (CELL, 5 * CELL, "한글"), (5 * CELL, 6 * CELL, "|")]


@pytest.mark.skipif(not all(file.exists() for file in FONT_FILES), reason="the fonts of the pictures are not installed")
def test_a_picture_becomes_a_png() -> None:
    look = Look("#ffffff", "#000000")
    assert png(svg([[Cell(each, 1, look) for each in "a한글"]], "x")).startswith(b"\x89PNG")


def test_a_picture_whose_numbers_alone_differ_is_kept() -> None:
    look = Look("#ffffff", "#000000")

    def picture(text: str) -> str:
        return svg([[Cell(each, 1, look) for each in text.ljust(30)]], "x")

    assert same(picture("first token  12.5 ms  ▃▅"), picture("first token  9 ms    ▇"))
    assert not same(picture("first token 12 ms"), picture("between tokens 12 ms"))
    assert not same(picture("first token 12 ms"), picture("first token 12 ms").replace("#ffffff", "#ff0000"))
