"""Bring the catalogue up to date: extract texts, merge them into atoll.po, compile atoll.mo. For developers (Babel)."""

import io
import sys
from pathlib import Path

from babel.messages import Catalog
from babel.messages.extract import extract_from_dir
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ROOMS = ("appliance/cli", "installer", "tui")
PO = HERE / "ko/LC_MESSAGES/atoll.po"


def extracted() -> Catalog:
    """Every text of the code, with the files that use it."""
    catalogue = Catalog(project="atoll", charset="utf-8", fuzzy=False)
    for room in ROOMS:
        found = extract_from_dir(ROOT / room, method_map=[("**.py", "python")], keywords={"t": None})
        for file, _, message, _, _ in found:
            catalogue.add(message, locations=[(f"{room}/{file}", 0)])
    return catalogue


def current() -> Catalog:
    with PO.open("rb") as file:
        return read_po(file, locale="ko")


def write(catalogue: Catalog) -> None:
    """atoll.po, with a header that does not change from day to day."""
    header = "# Atoll's Korean texts. Made by installer/locale/update.py; the translations are written here by hand.\n"
    for message in catalogue:
        message.flags.discard("fuzzy")
    buffer = io.BytesIO()
    write_po(buffer, catalogue, sort_output=True, omit_header=True, width=110, include_lineno=False)
    start = 'msgid ""\nmsgstr ""\n"Language: ko\\n"\n"Content-Type: text/plain; charset=utf-8\\n"\n\n'
    PO.write_bytes((header + start).encode() + buffer.getvalue())


def main() -> int:
    fresh, catalogue = extracted(), current() if PO.exists() else Catalog(locale="ko")
    catalogue.update(fresh, no_fuzzy_matching=True)
    catalogue.obsolete.clear()
    write(catalogue)
    with PO.with_suffix(".mo").open("wb") as file:
        write_mo(file, catalogue)
    empty = [message.id for message in catalogue if message.id and not message.string]
    for text in empty:
        print(f"no Korean yet: {text}")
    print(f"{len(catalogue)} texts, {len(empty)} without a translation")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
