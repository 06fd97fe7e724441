"""`atoll keys new | fingerprint`."""

from pathlib import Path
from typing import Annotated

import typer

from installer.i18n import t
from offline_bundle.errors import USAGE, BundleError
from offline_bundle.keys import load_public, new_keypair

from .common import say_rows, spoken
from .json_output import emit, json_errors

app = typer.Typer(help="Make and look at the keys that sign bundles.", no_args_is_help=True, rich_markup_mode=None)

_EXIT_CODES = "Exit codes: 0 ok, 2 usage, 10 not a usable public key, 13 missing, 30 I/O."

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command(epilog=_EXIT_CODES)
def new(
    name: Annotated[str, typer.Option(help="Name of the pair: NAME.key and NAME.pub.")] = "vendor",
    directory: Annotated[Path, typer.Option("--dir", help="Where to put it; created 0700 if absent.")] = Path(
        typer.get_app_dir("atoll")
    )
    / "keys",
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Protect the private key by a passphrase, asked on the terminal.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a signing key (ECDSA P-256). An existing key is never overwritten.

    \b
    Example:
      atoll keys new --name vendor --dir ~/keys --encrypt
    """
    with json_errors(as_json):
        pair = new_keypair(directory, name, passphrase=_new_passphrase() if encrypt else None)
        if as_json:
            emit(
                {
                    "ok": True,
                    "private_path": str(pair.private_path),
                    "public_path": str(pair.public_path),
                    "fingerprint": pair.fingerprint,
                }
            )
            return
        say_rows([
            (t("Private key"), t("{path}  (keep it offline; whoever has it can sign for you)", path=pair.private_path)),
            (t("Public key"), t("{path}  (give it to those who verify, apart from the bundles)",
                                path=pair.public_path)),
            (t("Fingerprint"), grouped(pair.fingerprint)),
        ])


@app.command(epilog=_EXIT_CODES)
def fingerprint(
    key: Annotated[Path, typer.Argument(help="A public key file.", show_default=False)], as_json: Json = False
) -> None:
    """Show a public key's fingerprint, to compare by phone or on paper.

    \b
    Example:
      atoll keys fingerprint vendor.pub
    """
    with json_errors(as_json):
        found = load_public(key)
        if as_json:
            emit({"ok": True, "path": str(key), "fingerprint": found.fingerprint})
            return
        typer.echo(grouped(found.fingerprint))


def grouped(fingerprint: str) -> str:
    """A fingerprint in groups of four that can be read aloud."""
    return " ".join(fingerprint[i : i + 4] for i in range(0, len(fingerprint), 4))


def _new_passphrase() -> bytes:
    try:
        text = typer.prompt(spoken(t("Passphrase")), hide_input=True, confirmation_prompt=True, err=True)
    except typer.Abort as e:
        raise BundleError(t("No passphrase was given."), t("Run this on a terminal."), USAGE) from e
    return text.encode()
