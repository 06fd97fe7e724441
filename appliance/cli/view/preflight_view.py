"""The output of the preflight: a table on a terminal, plain lines elsewhere, in Korean or English.

Markup is never read from data, and a status is always a word, not only a colour.
"""

import contextlib
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from installer.base.i18n import joined, language_of, t, told
from installer.preflight import CheckRecord
from installer.preflight.report import verdict

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "waived": "magenta"}
_WORDS = {"pass": "PASS", "warn": "WARN", "fail": "FAIL", "waived": "WAIV"}


def print_checks(
    records: Sequence[CheckRecord], *, everything: bool, console: Console | None = None, language: str | None = None
) -> None:
    """The checks in their order; without `everything` only those that need attention. Each of these with its remedy."""
    console = console or Console(highlight=False)
    language = language or language_of()
    shown = [record for record in records if everything or record.status != "pass"]
    if not shown:
        return
    with contextlib.suppress(OSError):  # a terminal that is gone is no reason to stop
        if console.is_terminal:
            console.print(_table(shown, language))
        else:
            for record in shown:
                console.print(_line(record, language), markup=False, soft_wrap=True)
        for record in shown:
            if record.status != "pass":
                _remedy(record, language, console)


def print_verdict(records: Sequence[CheckRecord], seconds: float, console: Console, language: str) -> None:
    """How many of each status, and what that means."""
    counts = {word: sum(_state(record) == word for record in records) for word in _STYLES}
    numbers = t("{good} passed, {warn} warnings, {fail} failed, {waived} waived, in {seconds} s",
                seconds=f"{seconds:.1f}", good=counts["pass"], warn=counts["warn"], fail=counts["fail"],
                waived=counts["waived"])  # fmt: skip
    if counts["fail"]:
        hard = [record.id for record in records if record.status == "fail" and record.strict]
        meaning = t("This machine is not ready. Nothing was changed.")
        if hard:
            strict = t("These cannot be waived: {names}.", names=", ".join(hard))
            meaning = joined([meaning, strict], " ")
    elif counts["warn"]:
        meaning = t("This machine can be used; read the warnings first.")
    else:
        meaning = t("This machine is ready.")
    style = "bold red" if verdict(records) else "yellow" if counts["warn"] else "green"
    with contextlib.suppress(OSError):
        console.print(f"\n{escape(told(numbers, language))}", soft_wrap=True)
        console.print(told(meaning, language), style=style, markup=False, soft_wrap=True)


def _state(record: CheckRecord) -> str:
    return "waived" if record.waived is not None else record.status


def _table(records: Sequence[CheckRecord], language: str) -> Table:
    heads = [told(head, language) for head in ("", "#", t("CHECK"), t("SEEN"), t("NEEDED"))]
    table = Table(*heads, box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.columns[1].justify = "right"
    table.columns[3].overflow = table.columns[4].overflow = "fold"
    for group in _groups(records):
        table.add_row(*_row(group, language))
    return table


def _groups(records: Sequence[CheckRecord]) -> list[list[CheckRecord]]:
    """Neighbours that pass for the same reason ("not needed: …") share a row."""
    groups: list[list[CheckRecord]] = []
    for record in records:
        last = groups[-1][-1] if groups else None
        if last is not None and record.status == last.status == "pass" and record.observed == last.observed:
            groups[-1].append(record)
        else:
            groups.append([record])
    return groups


def _row(group: list[CheckRecord], language: str) -> list[str]:
    """One row of the table: the check's title and, unless it passed, the id that a waiver needs."""
    first, last, state = group[0], group[-1], _state(group[0])
    title, observed, required = (escape(told(text, language)) for text in (first.title, first.observed, first.required))
    mark = f"[{_STYLES[state]}]{_WORDS[state]}[/]"
    if len(group) > 1:
        return [mark, f"{first.number}–{last.number}", f"{title} …", observed, ""]
    if state == "pass":
        return [mark, str(first.number or ""), title or first.id, observed, required]
    word = t("strict")
    strict = f" ({told(word, language)})" if first.strict else ""
    return [mark, str(first.number or ""), f"{title}\n[dim]{first.id}{strict}[/]", observed, required]


def _line(record: CheckRecord, language: str) -> str:
    return f"{_WORDS[_state(record)]}  {record.number:>2}  {record.id:18}  {told(record.observed, language)}"


def _remedy(record: CheckRecord, language: str, console: Console) -> None:
    """Why it matters, what is needed and what to do; or who waived it."""
    state = _state(record)
    console.print(f"\n[{_STYLES[state]}]{_WORDS[state]}[/] {record.id}: {escape(told(record.observed, language))}",
                  soft_wrap=True)  # fmt: skip
    rows = [(t("needed"), record.required), (t("why"), record.why), (t("do"), record.fix)]
    if record.waived is not None:
        rows = [(t("why"), record.why), (t("waived"), record.waived)]
    for name, text in rows:
        if text:
            console.print(f"  {told(name, language)}: {told(text, language)}", markup=False, soft_wrap=True)
    if record.command and record.waived is None:
        console.print(f"    $ {record.command}", markup=False, soft_wrap=True)
