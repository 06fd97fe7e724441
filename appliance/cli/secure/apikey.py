"""`atoll apikey new | list | revoke`: the keys that open the endpoint. (`atoll keys`: keys that sign bundles.)"""

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len

from appliance.cli.common import Json, Prefix, examples, layout_for, padded, print_json, say, say_rows, spoken, told
from appliance.cli.language.commands import Commands
from installer.access import api_keys
from installer.audit import log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError, usage_error
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.operate.lifecycle import history_of
from installer.service.reload import reload_gateway

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--file", metavar="FILE", show_default=False,
        help="A separate key file, as `atoll serve --api-key-file` reads it; no installation is needed.",
    ),
]

app = Commands(
    help="API keys of the endpoint: who may use it, for what, until when. (Keys that sign bundles: atoll keys.)",
    no_args_is_help=True,
)

_UNITS = {"h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}
_STATES = {"active": t("active"), "expired": t("expired"), "revoked": t("revoked")}
_MOST = 10 * 365 * 86400
_EXIT_CODES = "Exit codes: 0 ok, 2 usage or nothing installed, 30 the key file is damaged or cannot be written."


@app.command(epilog=examples(
    "atoll apikey new --name 'team a'",
    "atoll apikey new --name grafana --scope metrics --expires 1y",
    "atoll apikey new --name 'search bot' --group search",
    "atoll apikey new --name batch --expires 2027-01-31 --out /root/batch.key",
    "atoll apikey new --name laptop --file keys.json   # for atoll serve",
    then=_EXIT_CODES,
))
def new(
    name: Annotated[str, typer.Option(help="Who or what will use it.", show_default=False)],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="serve, metrics, priority or admin (all); repeatable. Without it: serve.", show_default=False),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            help="Keys of one group share cached prompts. Without it, this key shares with no other.", metavar="NAME",
            show_default=False,
        ),
    ] = "",
    expires: Annotated[
        str, typer.Option(help="When it expires: 12h, 90d, 8w, 1y, a date such as 2027-01-31 (UTC), or never.")
    ] = "never",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the key to a new file (0600) and do not show it.")
    ] = None,
    file: KeyFile = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Make a key. It is shown only once; only its hash is stored."""
    with told(as_json):
        keys, layout = _keys_of(prefix, file)
        lifetime = _lifetime(expires)
        api_keys.check_name(name)
        scopes = scope or ["serve"]
        api_keys.check_scopes(scopes)
        api_keys.check_group(group)
        if out is not None and out.exists():
            raise InstallError(
                t("{out} already exists.", out=out), exit_code=ExitCode.USAGE, changed=t("No key was made."),
                hint=t("Give --out a new file: a key is never written over something else."),
            )
        key = api_keys.add(keys, name, lifetime=lifetime, scopes=scopes, group=group)
        if out is not None:
            _write(out, key, keys)
        note = _changed(layout, "api-key-created", key=key.id, name=name, scopes=scopes, group=group or None,
                        expires=expires)
        entry = api_keys.find(api_keys.people(keys), key.id)
    if as_json:
        shown = {} if out else {"key": key.text}
        print_json({**_facts(entry), **shown, "file": str(out) if out else None, "note": note})
        return
    made = [(t("key"), t("written to {out}, which only you can read", out=out))]
    if out is None:
        made = [(t("key"), key.text), ("", t("Keep it: it is shown only once, and only its hash is stored."))]
    revoking = t("{id}   (to revoke it: atoll apikey revoke {id}{where})", id=key.id, where=_where(prefix, file))
    allowed = t("{names}; {until}", names=joined(api_keys.scopes_of(entry)), until=_until(entry))
    sharing = [(t("group"), t("{group}: shares cached prompts with the other keys of the "
                              "group", group=group))] if group else []
    say_rows([*made, ("id", revoking), (t("may"), allowed), *sharing], width=8)
    _say_note(note)


@app.command(name="list", epilog=examples("atoll apikey list", "atoll apikey list --json", then=_EXIT_CODES))
def list_(file: KeyFile = None, prefix: Prefix = None, as_json: Json = False) -> None:
    """List the keys: id, name, scopes, expiry. Their text is stored nowhere."""
    with told(as_json):
        keys, _ = _keys_of(prefix, file)
        entries = api_keys.people(keys)
    if as_json:
        print_json({"keys": [_facts(entry) for entry in entries]})
        return
    if not entries:
        say(t("There is no API key: nobody can use the endpoint. Make one: atoll apikey new --name NAME"))
        return
    rows: list[tuple[str, ...]] = [("ID", t("STATE"), t("SCOPES"), t("GROUP"), t("MADE"), t("ENDS"), t("NAME"))]
    for entry in entries:
        ends = entry["expires"][:10] if entry.get("expires") else t("never")
        made, scopes = str(entry.get("created", ""))[:10], ",".join(api_keys.scopes_of(entry))
        group = entry.get("group") or "-"
        state, name = _STATES[api_keys.state(entry)], api_keys.shown_name(entry)
        rows.append((entry["id"], state, scopes, group, made, ends, name))
    widths = [max(cell_len(spoken(row[column])) for row in rows) for column in range(6)]
    for row in rows:
        cells = [padded(cell, width) for cell, width in zip(row, widths, strict=False)]
        typer.echo("  ".join([*cells, spoken(row[6])]).rstrip())


@app.command(epilog=examples("atoll apikey revoke 1f0c9a2e", "atoll apikey revoke 'team a'", then=_EXIT_CODES))
def revoke(
    key: Annotated[
        str,
        typer.Argument(metavar="KEY", help="Id, the first 4 or more characters of one, or name.", show_default=False),
    ],
    file: KeyFile = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Refuse a key from now on, for good. It stays in the list."""
    with told(as_json):
        keys, layout = _keys_of(prefix, file)
        _not_a_key(key)
        before = api_keys.find(api_keys.people(keys), key)
        entry = api_keys.revoke(keys, before["id"])
        event = None if before.get("revoked") else "api-key-revoked"
        note = _changed(layout, event, key=entry["id"], name=entry.get("name", ""))
        left = len(api_keys.usable(keys))
    if as_json:
        print_json({**_facts(entry), "changed": not before.get("revoked"), "active_keys_left": left, "note": note})
        return
    facts = {"id": entry["id"], "name": api_keys.shown_name(entry)}
    if before.get("revoked"):
        say(t("The key {id} ({name}) was revoked already.", **facts))
    else:
        say(t("The key {id} ({name}) is revoked.", **facts))
    if not left:
        say(t("No active key is left: nobody can use the endpoint. Make one: atoll apikey new --name NAME"))
    _say_note(note)


def _keys_of(prefix: Path | None, file: Path | None) -> tuple[Path, Layout | None]:
    """The key file that is meant, and the installation that it belongs to, if any."""
    if file is None:
        layout = _layout(prefix)
        return layout.api_keys, layout
    if prefix is not None:
        raise usage_error(t("--file and --prefix each name a key file."), t("Give one of them."))
    return file, None


def _changed(layout: Layout | None, event: str | None, **facts: Any) -> str | None:
    """An installation records the event and notifies its gateway. The server that uses a separate file reads it again
    by itself."""
    if layout is None:
        return None
    if event:
        log.append(layout.audit, event, **facts)
    return reload_gateway(layout)


def _layout(prefix: Path | None) -> Layout:
    """The installation, if this user may manage its keys."""
    layout = layout_for(prefix)
    try:
        history_of(layout)
        if layout.api_keys.exists():
            layout.api_keys.open("rb").close()
        fs.make_dir(layout.credentials, 0o700)
    except (PermissionError, InstallError) as error:
        if isinstance(error, InstallError) and error.exit_code != ExitCode.IO:
            raise
        raise InstallError(
            t("The keys of {name} belong to another user.", name=layout.name),
            exit_code=ExitCode.IO,
            changed=t("Nothing was changed."),
            hint=t("Run it as root: sudo atoll apikey …"),
        ) from None
    return layout


def _write(out: Path, key: api_keys.NewKey, keys: Path) -> None:
    """A key that could not be delivered must not stay valid."""
    try:
        fs.write_atomic(out, key.text + "\n", 0o600)
    except OSError:
        api_keys.remove(keys, {key.id})
        raise


def _lifetime(text: str) -> float | None:
    """Seconds from now; None for never. Raises InstallError (usage)."""
    if text == "never":
        return None
    seconds = 0.0
    if match := re.fullmatch(r"([1-9][0-9]{0,4})([hdwy])", text):
        seconds = float(int(match[1]) * _UNITS[match[2]])
    else:
        try:
            end = datetime.fromisoformat(text)
            seconds = (end if end.tzinfo else end.replace(tzinfo=UTC)).timestamp() - time.time()
        except (ValueError, OverflowError):
            seconds = -1.0
    if not 0 < seconds <= _MOST:
        raise InstallError(
            t("'{text}' is not a time in the next 10 years.", text=text),
            exit_code=ExitCode.USAGE,
            changed=t("No key was made."),
            hint=t("Use --expires 90d, 12h, 8w, 1y, 2027-01-31, or never."),
        )
    return seconds


def _not_a_key(text: str) -> None:
    """A key on the command line is in the shell's history and in the list of processes."""
    if text.startswith("sk-") and len(text) > 20:
        raise InstallError(
            t("This looks like a key itself, not like its id."),
            exit_code=ExitCode.USAGE,
            why=t("On a command line other users may have seen it."),
            changed=t("Nothing was changed."),
            hint=t("Find its id with `atoll apikey list` and revoke that."),
        )


def _facts(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": entry["id"], "name": entry.get("name", ""), "state": api_keys.state(entry),
        "scopes": api_keys.scopes_of(entry),
        "group": entry.get("group") or None, "created": entry.get("created"), "expires": entry.get("expires"),
        "revoked_at": entry.get("revoked_at"),
    }


def _until(entry: dict[str, Any]) -> str:
    return t("ends {expires}", expires=entry["expires"]) if entry.get("expires") else t("never expires")


def _say_note(note: str | None) -> None:
    if note:
        say(note, err=True)


def _where(prefix: Path | None, file: Path | None = None) -> str:
    return f" --prefix {prefix}" if prefix else f" --file {file}" if file else ""


