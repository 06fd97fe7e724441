"""`atoll trust list | add | remove | revoke`: whose bundles are accepted here. (`atoll keys`: making such keys.)"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli.common import Json, Prefix, confirm, examples, layout_for, print_json, say, say_rows, told
from appliance.cli.language.commands import Commands
from appliance.cli.view.fingerprint import grouped, word_lines
from installer.access import vendor_keys
from installer.base.errors import ExitCode, InstallError, usage_error
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.operate.lifecycle import history_of
from installer.release import release
from offline_bundle.signing.hash_words import from_words, in_words

app = Commands(
    help="Vendor keys that this installation trusts: list, add, remove, or revoke one for good.",
    no_args_is_help=True,
)

_EXIT_CODES = (
    "Exit codes: 0 ok, 2 usage or nothing installed, 10 not a usable public key or a revoked one, 13 file missing, "
    "30 the list of keys is damaged or cannot be written."
)
_LEAST = 32  # digits of a fingerprint: 128 bits, for which nobody finds a second key
Key = Annotated[
    str,
    typer.Argument(
        metavar="KEY", show_default=False,
        help="At least the first 8 digits of its fingerprint, 4 of its words, or its file name in the list.",
    ),
]


@app.command(name="list", epilog=examples("atoll trust list", "atoll trust list --json", then=_EXIT_CODES))
def list_(prefix: Prefix = None, as_json: Json = False) -> None:
    """List the keys, trusted or revoked, by fingerprint and words, and which parts of the running release each has
    signed."""
    with told(as_json):
        layout = layout_for(prefix)
        if not layout.trust.is_dir():
            history_of(layout)  # raises if nothing is installed; otherwise everybody may look
        rows = _rows(layout)
    if as_json:
        print_json({"keys": rows})
        return
    if not rows:
        say(t("No key is trusted: nothing can be installed or verified. Add one: atoll trust add FILE.pub"))
    for row in rows:
        _show(row)


@app.command(epilog=examples(
    "sudo atoll trust add vendor-2027.pub",
    "sudo atoll trust add /media/usb/vendor.pub --fingerprint '7b39 f822 9fff 6975 4a38 ea0a 5c99 3ca5'",
    then=_EXIT_CODES,
))
def add(
    key: Annotated[Path, typer.Argument(metavar="FILE", help="A vendor's public key.", show_default=False)],
    fingerprint: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Add it only if this is its fingerprint: 32 or more digits, or 16 words."),
    ] = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Trust a key from now on. Obtain it from the vendor, not from a medium, or compare its fingerprint."""
    with told(as_json):
        layout = _writable(prefix)
        loaded = vendor_keys.load(key)
        if fingerprint is not None:
            _compare(fingerprint, loaded.fingerprint)
        new = vendor_keys.add(layout, loaded, str(key))
    if as_json:
        print_json({"fingerprint": loaded.fingerprint, "changed": new})
        return
    say(t("This key is now trusted.") if new else t("This key was trusted already."))
    _show_key(loaded.fingerprint)
    if fingerprint is None:
        say(t("Compare it with the vendor's letter or by phone. If it differs: atoll trust remove {name}",
              name=loaded.fingerprint[:16]))  # fmt: skip


@app.command(epilog=examples(
    "sudo atoll trust remove 1f2e3d4c", "sudo atoll trust remove vendor.pub",
    then=_EXIT_CODES,
))
def remove(key: Key, prefix: Prefix = None, as_json: Json = False) -> None:
    """No longer trust a key. It may be added again; for a stolen key use revoke."""
    with told(as_json):
        layout = _writable(prefix)
        gone = vendor_keys.remove(layout, key)
        left = len(vendor_keys.installed_keys(layout))
    signed = _signed(layout, {entry.fingerprint for entry in gone})
    if as_json:
        print_json({"removed": [entry.fingerprint or entry.path.name for entry in gone], "signed": signed,
                    "trusted_keys_left": left})  # fmt: skip
        return
    for entry in gone:
        say(t("{key} is no longer trusted.", key=entry.fingerprint or entry.path.name))
    _say_consequences(signed, left)


@app.command(epilog=examples(
    "sudo atoll trust revoke 1f2e3d4c --reason 'stolen, letter of 3 May'",
    "sudo atoll trust revoke 1f2e3d4c --reason 'stolen, letter of 3 May' --yes --json",
    then=_EXIT_CODES,
))
def revoke(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", show_default=False,
            help="As in the list, or a public key file, or all 64 digits (32 words) of a key that was never here.",
        ),
    ],
    why: Annotated[str, typer.Option("--reason", help="The reason; it is kept with the key and in the audit log.",
                                     show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="No question.")] = False,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Refuse a key for good: nothing that it signed is accepted again, from any source. What is running continues."""
    with told(as_json):
        layout = _writable(prefix)
        if len(why.strip()) < 3:
            raise usage_error(t("A revocation needs a reason."),
                              t("Say why, in words: --reason 'stolen, letter of 3 May'"))  # fmt: skip
        fingerprint = _meant(layout, key)
        signed = _signed(layout, {fingerprint})
        if not yes:
            _confirm(fingerprint, signed)
        new = vendor_keys.revoke(layout, fingerprint, why.strip())
        left = len(vendor_keys.installed_keys(layout))
    if as_json:
        print_json({"fingerprint": fingerprint, "changed": new, "signed": signed, "trusted_keys_left": left})
        return
    if new:
        say(t("The key {fingerprint} is revoked.", fingerprint=fingerprint))
    else:
        say(t("The key {fingerprint} was revoked already.", fingerprint=fingerprint))
    _say_consequences(signed, left)


def _rows(layout: Layout) -> list[dict[str, Any]]:
    gone = vendor_keys.revoked(layout)
    live = vendor_keys.signed_by(release.read_info(layout, release.live(layout) or ""))
    rows: list[dict[str, Any]] = []
    for entry in vendor_keys.entries(layout):
        if entry.fingerprint not in gone:
            signed = [what for what, fingerprint in live.items() if fingerprint == entry.fingerprint]
            state = "unusable" if entry.problem else "trusted"
            rows.append({"fingerprint": entry.fingerprint, "state": state, "file": entry.path.name, "signed": signed,
                         "problem": entry.problem})  # fmt: skip
    for fingerprint, facts in gone.items():
        signed = [what for what, signer in live.items() if signer == fingerprint]
        rows.append({"fingerprint": fingerprint, "state": "revoked", "signed": signed,
                     **{name: facts.get(name, "") for name in ("at", "by", "reason")}})  # fmt: skip
    return [{**row, "words": in_words(row["fingerprint"])} for row in rows]


_STATES = {"trusted": t("trusted"), "revoked": t("revoked"), "unusable": t("unusable")}


def _show(row: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = [(_STATES[row["state"]], grouped(row["fingerprint"]) or row["file"])]
    if row["words"]:
        rows += [("", line) for line in word_lines(row["fingerprint"])]
    if row.get("problem"):
        rows.append(("", row["problem"]))
    if row["state"] == "revoked":
        rows.append(("", t("since {at}, by {by}: {why}", at=row["at"], by=row["by"], why=row["reason"])))
    if row["signed"]:
        rows.append(("", t("has signed what runs: {names}", names=joined(row["signed"]))))
    say_rows(rows, width=8)


def _show_key(fingerprint: str) -> None:
    say_rows([(t("fingerprint"), grouped(fingerprint)), *(("", line) for line in word_lines(fingerprint))], indent=2)


def _signed(layout: Layout, fingerprints: set[str]) -> list[str]:
    live = vendor_keys.signed_by(release.read_info(layout, release.live(layout) or ""))
    return [what for what, fingerprint in live.items() if fingerprint in fingerprints]


def _say_consequences(signed: list[str], left: int) -> None:
    if signed:
        say(t("It signed what runs now: {names}. The service continues, but `atoll verify` fails, `atoll status` "
              "reports it and a rollback to it is impossible, until you install what another key has signed: atoll "
              "install MEDIUM --trust-key NEW.pub", names=joined(signed)))  # fmt: skip
    if not left:
        say(t("No trusted key is left. The next install must name one: --trust-key FILE"))


def _confirm(fingerprint: str, signed: list[str]) -> None:
    say(t("This cannot be undone: nothing that the key {fingerprint} signed will be accepted here again.",
          fingerprint=fingerprint))  # fmt: skip
    if signed:
        say(t("It signed what runs now: {names}.", names=joined(signed)))
    confirm(t("Revoke this key?"), yes=False)


def _meant(layout: Layout, named: str) -> str:
    """The fingerprint of KEY, which may also be a public key file if it contains a path."""
    path = Path(named).expanduser()
    if ("/" in named or named.endswith(".pub")) and path.is_file():
        return vendor_keys.load(path).fingerprint
    return vendor_keys.find(layout, named)


def _compare(said: str, fingerprint: str) -> None:
    """Raise InstallError unless `said` (digits or words) is the beginning of the fingerprint, and long enough."""
    digits = "".join(said.split()).replace(":", "").lower()
    try:
        digits = from_words(said)
    except ValueError:
        pass
    if not _LEAST <= len(digits) <= len(fingerprint) or set(digits) - set("0123456789abcdef"):
        raise usage_error(
            t("This is not a fingerprint: it has 64 hex digits (or 32 words); give the first {least} or more.",
              least=_LEAST), t("The vendor sees it with: atoll keys fingerprint vendor.pub"),
        )  # fmt: skip
    if not fingerprint.startswith(digits):
        raise InstallError(
            t("The key has the fingerprint {fingerprint}, not the one that you named.", fingerprint=fingerprint),
            exit_code=ExitCode.UNTRUSTED,
            changed=t("Nothing was changed."),
            hint=t("Do not use this file; ask the vendor again, through another channel."),
        )


def _writable(prefix: Path | None) -> Layout:
    """The installation, if this user may change its keys."""
    layout = layout_for(prefix)
    if os.path.lexists(layout.trust) and not os.access(layout.trust, os.W_OK, effective_ids=True):
        raise InstallError(
            t("The trusted keys of {name} belong to another user.", name=layout.name),
            exit_code=ExitCode.IO,
            changed=t("Nothing was changed."),
            hint=t("Run it as root: sudo atoll trust …"),
        )
    history_of(layout)
    return layout
