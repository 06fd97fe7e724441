"""`atoll audit show | verify`: who accepted, waived or changed what, and whether the log is intact."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, say, told
from appliance.cli.language.commands import Commands
from installer.audit import anchor, check, log
from installer.base.errors import ExitCode, usage_error
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.operate.lifecycle import history_of
from installer.support.logs import printable

app = Commands(
    help="The audit log: who accepted, waived or changed what, and whether the log is intact.",
    no_args_is_help=True,
)

_EXIT_CODES = (
    "Exit codes: 0 the log is intact, 2 usage or nothing installed, 11 it was edited, cut short or rewritten, 13 it is "
    "missing, 30 it cannot be read."
)
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_HASH = re.compile(r"\b([0-9a-f]{16})[0-9a-f]{16,}\b")
_SHOWN = ("at", "event", "who", "prev", "hash")


@app.command(epilog=examples("atoll audit show", "atoll audit show --since 30d", "atoll audit show --json"))
def show(
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start time: 12h, 30d, 8w, or a date such as 2027-01-31 (UTC).")
    ] = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Show the entries, and the head of the log: a line to write down, which shows later whether entries are missing.

    Shows what follows the chain; `atoll audit verify` judges. Long hashes are shortened; --json has them whole.
    """
    with told(as_json):
        layout = _layout(prefix)
        start = _start(since) if since else ""
        records, broken = log.read(layout.audit)
        chosen = [record for record in records if str(record.get("at")) >= start]
        head = log.head(layout.audit)
        if as_json:
            print_json({"schema_version": 1, "entries": chosen, "head": {"count": head.count, "hash": head.hash},
                        "broken": broken})  # fmt: skip
        else:
            for record in chosen:
                typer.echo(_line(record))
            say(t("head: {count} entries, {words}", count=head.count, words=_grouped(head.hash)))
            say(t("write this down: {head}", head=str(head)))
            if broken:
                say(broken, err=True)
    if broken:
        raise typer.Exit(ExitCode.CONTENT_MISMATCH)


@app.command(epilog=examples(
    "atoll audit verify",
    "atoll audit verify --head 3f9a61c0d2e4b587:42",
    then=_EXIT_CODES,
))
def verify(
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="HASH:COUNT", show_default=False,
                     help="A head that you wrote down, with 16 or more digits of the hash. Repeatable."),
    ] = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Check the log's chain, and compare it with the heads that journald keeps and those that you give."""
    with told(as_json):
        layout = _layout(prefix)
        given = [check.parse_head(text) for text in head or ()]
        kept = anchor.sent(layout.audit)
        verdict = check.check(layout.audit, [*(kept or ()), *given])
    if as_json:
        print_json({**verdict.to_json(), "journal": kept is not None})
    else:
        _say(verdict, kept, given)
    if verdict.exit_code:
        raise typer.Exit(verdict.exit_code)


def _say(verdict: check.Verdict, kept: list[log.Head] | None, given: list[log.Head]) -> None:
    if verdict.message:
        say(verdict.message)
        say(verdict.next)
    elif verdict.anchors:
        say(t("The audit log is intact: {count} entries; {anchors} heads that were kept elsewhere agree.",
              count=verdict.entries, anchors=verdict.anchors))
    else:
        say(t("The hash chain of the audit log is intact: {count} entries. There was nothing to tell whether it was "
              "cut short.",
              count=verdict.entries))
    if verdict.anchors and verdict.unanchored and not verdict.message:
        say(t("No kept head covers the newest {count} entries.", count=verdict.unanchored))
    if verdict.torn_bytes:
        say(t("Its last line is torn, as a power cut leaves it; the next entry removes it."))
    if kept is None and not given:
        say(t("The heads in the system's journal cannot be read here; give one that you wrote down: --head HASH:COUNT"))
    say(t("head: {head}", head=str(verdict.head)))


def _layout(prefix: Any) -> Layout:
    layout = layout_for(prefix)
    if not layout.audit.exists():
        history_of(layout)  # says that there is no installation
    return layout


def _line(record: dict[str, Any]) -> str:
    who = record.get("who")
    user = who.get("user", "?") if isinstance(who, dict) else "?"
    rest = "  ".join(f"{name}={_value(value)}" for name, value in record.items() if name not in _SHOWN and value != "")
    return printable(f"{record.get('at')}  {record.get('event'):20} {user}  {rest}".rstrip())


def _value(value: Any) -> str:
    """Hashes are shortened here; `--json` has them whole."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(each)}" for name, each in value.items())
    return _HASH.sub(r"\1…", str(value))


def _grouped(digits: str) -> str:
    """To read out: the first half of the hash, in groups of four."""
    return " ".join(digits[i : i + 4] for i in range(0, 32, 4))


def _start(text: str) -> str:
    """The earliest time that `--since` includes, in the format of the log's times."""
    try:
        if text[-1:] in _UNITS and text[:-1].isdecimal():
            moment = datetime.now(UTC) - timedelta(**{_UNITS[text[-1]]: int(text[:-1])})
        else:
            moment = datetime.fromisoformat(text)
            moment = moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError):
        raise usage_error(t("'{text}' is not a time.", text=text[:80]),
                          t("Use 12h, 30d, 8w, or a date such as 2027-01-31.")) from None
