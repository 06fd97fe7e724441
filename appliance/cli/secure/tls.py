"""`atoll tls show | renew | import | export-ca`: the endpoint's certificate."""

from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli.common import Json, Prefix, examples, layout_for, print_json, say, say_rows, told
from appliance.cli.language.commands import Commands
from installer.audit import log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.base.lock import InstallLock
from installer.operate.lifecycle import history_of
from installer.release import config
from installer.service.prefix import PrefixService
from installer.service.reload import reload_gateway
from installer.tls import custom as imports
from installer.tls import endpoint as tls_endpoint

app = Commands(
    help="The endpoint's certificate: show it, renew it, use your own, export what clients must trust.",
    no_args_is_help=True,
)

_EXIT_CODES = "Exit codes: 0 ok, 2 usage or not accepted, 30 a file cannot be used, 75 another command is running."
Name = Annotated[
    list[str] | None,
    typer.Option("--name", metavar="NAME", help="A name or address that clients will use; repeatable.",
                 show_default=False),
]


@app.command(epilog=examples("atoll tls show", "atoll tls show --json", then="Exit code 1 if it has expired."))
def show(prefix: Prefix = None, as_json: Json = False) -> None:
    """Show the served certificate: its names, issuer, expiry and fingerprint."""
    with told(as_json):
        found = _facts(layout_for(prefix))
    if as_json:
        print_json(found)
    else:
        _print(found)
    if found["days_left"] < 0:
        raise typer.Exit(1)


@app.command(epilog=examples(
    "atoll tls renew", "atoll tls renew --name llm.corp.local", "atoll tls renew --new-ca --name 10.1.2.3",
    then=_EXIT_CODES,
))
def renew(
    name: Name = None,
    new_ca: Annotated[
        bool, typer.Option("--new-ca", help="Create a new local CA as well; every client must then trust the new one.")
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Replace an imported certificate with one made here.")
    ] = False,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Make a new key and certificate with the local CA, for all names of this machine and those given."""
    with told(as_json):
        layout = _installed(prefix)
        with InstallLock(layout.lock, "tls renew"):
            host = config.standing(layout).host
            names = tls_endpoint.wanted_names(host, name or [])
            required = tls_endpoint.required_names(host, name or [])
            made = tls_endpoint.renew(layout, names, required=required, new_ca=new_ca, local=local)
            note = _apply(layout)
            found = _facts(layout)
            log.append(layout.audit, "certificate-renewed", sha256=found["sha256"], new_ca=made.new_ca)
    _done(found, note, as_json, new_ca=made.new_ca)


@app.command(name="import", epilog=examples(
    "atoll tls import --cert server-chain.pem --key server.key",
    "atoll tls import --cert server-chain.pem --key server.key --name llm.corp.local",
    then=_EXIT_CODES,
))
def import_(
    cert: Annotated[Path, typer.Option(metavar="FILE", help="PEM: the server's certificate, then its issuers'.")],
    key: Annotated[Path, typer.Option(metavar="FILE", help="PEM: its private key, not readable by other users.")],
    name: Name = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Use a certificate of your own issuer. Its key, dates, chain order and names are checked first."""
    with told(as_json):
        layout = _installed(prefix)
        pair = imports.check_import(cert, key, tls_endpoint.required_names(config.standing(layout).host, name or []))
        with InstallLock(layout.lock, "tls import"):
            tls_endpoint.install_import(layout, pair)
            note = _apply(layout)
            found = _facts(layout)
            log.append(layout.audit, "certificate-imported", sha256=found["sha256"], file=str(cert))
    _done(found, note, as_json)


@app.command(name="export-ca", epilog=examples(
    "atoll tls export-ca > atoll-ca.crt", "atoll tls export-ca --out /media/usb/atoll-ca.crt",
    then=_EXIT_CODES,
))
def export_ca(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write to instead of stdout.")] = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Export the certificate that clients must trust (not secret), with its fingerprint to compare."""
    with told(as_json):
        layout = layout_for(prefix)
        found = _facts(layout)
        if found["ca"] is None:
            raise InstallError(
                t("The served certificate was not made here: clients need its issuer's root, not ours."),
                exit_code=ExitCode.USAGE,
                why=t("Its issuer is {issuer}.", issuer=found["issuer"]),
                hint=t("Most clients in your organisation already trust that root; otherwise ask its issuer for it."),
            )
        text = tls_endpoint.ca_file(layout).read_text()
        if out is not None:
            fs.write_atomic(out, text, 0o644)
    if as_json:
        print_json({"file": str(out) if out else None, "pem": text, "sha256": found["ca"]["sha256"],
                    "not_after": found["ca"]["not_after"]})
        return
    if out is None:
        typer.echo(text, nl=False)
    say(
        t("SHA-256 fingerprint, to compare by phone or on paper: {sha256}", sha256=found["ca"]["sha256"]), err=True
    )
    where = out or "atoll-ca.crt"
    for line in (
        f"  curl, Python        curl --cacert {where} …   SSL_CERT_FILE={where}",
        f"  Debian, Ubuntu      sudo cp {where} /usr/local/share/ca-certificates/ && sudo update-ca-certificates",
        f"  Red Hat, Rocky      sudo cp {where} /etc/pki/ca-trust/source/anchors/ && sudo update-ca-trust",
        f"  Windows             certutil -addstore Root {where}",
    ):
        typer.echo(line, err=True)


def _installed(prefix: Path | None) -> Layout:
    layout = layout_for(prefix)
    try:
        history_of(layout)
        fs.make_dir(layout.credentials, 0o700)
        next(layout.credentials.iterdir(), None)
    except (PermissionError, InstallError) as error:
        if isinstance(error, InstallError) and error.exit_code != ExitCode.IO:
            raise
        raise InstallError(
            t("The certificate of {name} belongs to another user.", name=layout.name),
            exit_code=ExitCode.IO,
            changed=t("Nothing was changed."),
            hint=t("Run it as root: sudo atoll tls …"),
        ) from None
    return layout


def _facts(layout: Layout) -> dict[str, Any]:
    found = tls_endpoint.facts(layout)
    if found is None:
        history_of(layout)
        raise InstallError(
            t("The endpoint has no certificate: it speaks plain HTTP, on loopback only."),
            exit_code=ExitCode.USAGE,
            hint=t("Make one: atoll tls renew. Or use your own: atoll tls import --cert FILE --key FILE"),
        )
    return found


def _apply(layout: Layout) -> str | None:
    """Have the new certificate served. Returns what is left to do."""
    if layout.system:
        return reload_gateway(layout)
    text = config.read_text(layout.config)
    if text is not None:
        changed = config.render(text, tls_endpoint.settings(layout), layout.config)
        if changed != text:
            fs.write_atomic(layout.config, changed, 0o644)
    if PrefixService(layout).state().up:
        return t("To serve it: {command}", command=f"atoll restart{layout.prefix_option}")
    return None


def _done(found: dict[str, Any], note: str | None, as_json: bool, *, new_ca: bool = False) -> None:
    if as_json:
        print_json({**found, "new_ca": new_ca, "note": note})
        return
    _print(found)
    if new_ca:
        say(t("The local CA is new: every client must trust it. Export it: atoll tls export-ca"))
    if note:
        say(note)


def _print(found: dict[str, Any]) -> None:
    left = found["days_left"]
    ends = t("{at}  ({days} days left)", at=found["not_after"], days=left)
    if left < 0:
        ends = t("{at}  (EXPIRED)", at=found["not_after"])
    rows = [
        (t("made"), t("here, by the local CA") if found["source"] == "local" else t("elsewhere, and imported")),
        (t("issuer"), found["issuer"]),
        (t("names"), ", ".join(found["names"])),
        (t("ends"), ends),
        ("SHA-256", found["sha256"]),
    ]
    if found["ca"]:
        rows.append(("CA SHA-256", found["ca"]["sha256"]))
        rows.append((t("CA ends"), t("{not_after}; clients trust {file}", not_after=found["ca"]["not_after"],
                                  file=found["ca"]["file"])))
    if found["missing_names"]:
        rows.append((t("missing"), t("{names}: to add them, atoll tls renew --new-ca",
                                  names=joined(found["missing_names"]))))
    say_rows(rows, width=10)
