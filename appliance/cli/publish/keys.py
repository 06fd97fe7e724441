"""`atoll keys new | fingerprint | words`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.common import examples, print_json, say_rows, spoken
from appliance.cli.language.commands import Commands
from appliance.cli.view.fingerprint import grouped, word_lines
from appliance.cli.view.json_output import json_errors
from installer.base.i18n import t
from offline_bundle.errors import USAGE, BundleError
from offline_bundle.signing.hash_words import from_words, in_words
from offline_bundle.signing.keys import load_public, new_keypair

app = Commands(help="Make and look at the keys that sign bundles.", no_args_is_help=True)

_EXIT_CODES = "Exit codes: 0 ok, 2 usage, 10 not a usable public key, 13 missing, 30 I/O."

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command(epilog=examples("atoll keys new --name vendor --dir ~/keys --encrypt", then=_EXIT_CODES))
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
    """Make a signing key (ECDSA P-256). An existing key is never overwritten."""
    with json_errors(as_json):
        pair = new_keypair(directory, name, passphrase=_new_passphrase() if encrypt else None)
        if as_json:
            print_json(
                {
                    "ok": True,
                    "private_path": str(pair.private_path),
                    "public_path": str(pair.public_path),
                    "fingerprint": pair.fingerprint,
                    "words": in_words(pair.fingerprint),
                }
            )
            return
        say_rows([
            (t("Private key"), t("{path} (keep it offline: whoever has it can sign for you)", path=pair.private_path)),
            (t("Public key"), t("{path} (give it to those who verify bundles, separately from the bundles)",
                                path=pair.public_path)),
            (t("Fingerprint"), grouped(pair.fingerprint)),
            *(("", line) for line in word_lines(pair.fingerprint)),
        ])


@app.command(epilog=examples("atoll keys fingerprint vendor.pub", then=_EXIT_CODES))
def fingerprint(
    key: Annotated[Path, typer.Argument(metavar="FILE", help="A public key file.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show a public key's fingerprint, to compare by phone or on paper."""
    with json_errors(as_json):
        found = load_public(key)
        if as_json:
            words = in_words(found.fingerprint)
            print_json({"ok": True, "path": str(key), "fingerprint": found.fingerprint, "words": words})
            return
        typer.echo("\n".join([grouped(found.fingerprint), *word_lines(found.fingerprint)]))


@app.command(epilog=examples(
    "atoll keys words 7b39f8229fff69754a38ea0a5c993ca5",
    'atoll keys words "$(sha256sum install.sh | cut -c1-64)"',
    'atoll keys words "involve consulting upcoming brickyard"',
    then=_EXIT_CODES,
))
def words(
    digits: Annotated[
        str, typer.Argument(metavar="HEX", help="A fingerprint or another hash, such as a SHA-256.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Show a hash as words that are easy to read aloud, or words as the hash that they stand for."""
    with json_errors(as_json):
        plain = re.sub(r"[\s:]", "", digits).lower()
        try:
            if not re.fullmatch(r"([0-9a-f]{2}){1,64}", plain):
                plain = from_words(digits)
        except ValueError:
            raise BundleError(
                t("That is neither a hash nor its words."),
                t("Give an even number of hex digits, or words as this command prints them."),
                USAGE,
            ) from None
        if as_json:
            print_json({"ok": True, "hex": plain, "words": in_words(plain)})
            return
        typer.echo("\n".join([grouped(plain), *word_lines(plain)]))


def _new_passphrase() -> bytes:
    try:
        text = typer.prompt(spoken(t("Passphrase")), hide_input=True, confirmation_prompt=True, err=True)
    except typer.Abort as e:
        raise BundleError(t("No passphrase was given."), t("Run this on a terminal."), USAGE) from e
    return text.encode()
