"""`atoll bundle build | inspect | verify`."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli.common import examples, layout_for, print_json, say, say_rows, spoken
from appliance.cli.language.commands import Commands
from appliance.cli.publish import bundle_runtime
from appliance.cli.view.byte_progress import byte_progress
from appliance.cli.view.json_output import json_errors
from appliance.service.words import human_bytes
from installer.access.vendor_keys import keyring
from installer.base.errors import InstallError
from installer.base.i18n import joined, t
from offline_bundle.errors import USAGE, BundleError
from offline_bundle.model.build import build_bundle
from offline_bundle.model.manifest import BundleManifest, Requires
from offline_bundle.model.verify import inspect_bundle, verify_bundle
from offline_bundle.runtime.verify import is_runtime
from offline_bundle.signing.keys import Keyring, is_encrypted, refuse_from_medium

app = Commands(help="Build, inspect and verify signed model bundles.", no_args_is_help=True)

_LABELS = {"copy": t("Copying and hashing"), "verify": t("Verifying")}
_EXIT_CODES = (
    "Exit codes: 0 ok, 2 usage, 10 untrusted or missing signature, 11 content differs or is not allowed, "
    "12 older than accepted before, 13 something is missing, 30 space or I/O."
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle's directory.", show_default=False)]


class TorchChoice(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class AcceptanceChoice(StrEnum):
    none = "none"
    click = "click"
    gated = "gated"


@app.command(epilog=examples(
    "atoll bundle build ./Qwen3-4B --name qwen3-4b --version 1.0.0 --sequence 1 --license Apache-2.0 "
    "--source-repo Qwen/Qwen3-4B --source-revision 1cfa9a7 --key ~/.config/atoll/keys/vendor.key --exclude '.git*' "
    "--out /mnt/usb",
    "atoll bundle build --runtime /mnt/usb --torch cuda --sequence 7 --key ~/.config/atoll/keys/vendor.key "
    "--python /usr/bin/python3.12",
    "atoll bundle build --runtime /mnt/usb --gpu h100 --gpu l40s --for-model qwen3.6-27b --sequence 8 "
    "--key ~/.config/atoll/keys/vendor.key",
    then=_EXIT_CODES,
))
def build(
    key: Annotated[Path, typer.Option(help="Private signing key (made by 'atoll keys new').", show_default=False)],
    sequence: Annotated[
        int, typer.Option(help="A number that grows with every release of one name.", show_default=False)
    ],
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL", help="Model directory: config.json, *.safetensors, tokenizer.", show_default=False
        ),
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Version of this bundle, such as 1.2.0.", show_default=False)
    ] = None,
    license_id: Annotated[
        str | None, typer.Option("--license", help="SPDX identifier, such as Apache-2.0.", show_default=False)
    ] = None,
    source_repo: Annotated[str | None, typer.Option(help="Where the model came from.", show_default=False)] = None,
    source_revision: Annotated[str | None, typer.Option(help="Its exact revision there.", show_default=False)] = None,
    license_file: Annotated[Path | None, typer.Option(help="The licence's text.", show_default="MODEL/LICENSE")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the bundle.", show_default="MODEL's name")] = None,
    out: Annotated[Path, typer.Option(help="Directory that receives NAME-VERSION.")] = Path("."),
    acceptance: Annotated[
        AcceptanceChoice, typer.Option(help="What an installer must obtain before it uses the model.")
    ] = AcceptanceChoice.click,
    requires: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", show_default=False,
            help="What a server must have: runtime, driver_min, cuda, compute_cap, vram_gib, host_ram_bytes or "
                 "disk_bytes, such as runtime='>=0.1,<0.2'; repeatable.",
        ),
    ] = None,
    license_url: Annotated[str | None, typer.Option(help="Where the licence is published.", show_default=False)] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Shell pattern of files to leave out; repeatable.", show_default=False)
    ] = None,
    runtime: Annotated[
        Path | None,
        typer.Option(
            metavar="MEDIUM", help="Build the code instead: install.sh and runtime/ in MEDIUM.", show_default=False
        ),
    ] = None,
    torch: Annotated[
        TorchChoice, typer.Option(help="With --runtime: for servers with or without a GPU.")
    ] = TorchChoice.cuda,
    python: Annotated[
        list[Path] | None,
        typer.Option(help="With --runtime: a Python of the servers' version; repeatable.", show_default="this one"),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option(help="With --runtime: take packages from this directory, not from an index.", show_default=False),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", show_default="all of 'atoll presets'",
            help="With --runtime: compile the kernels for this GPU, such as h100; repeatable; none for no kernels.",
        ),
    ] = None,
    for_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", show_default="all of 'atoll presets'",
            help="With --runtime: compile the kernels of this model of 'atoll presets', or of this model directory; "
                 "repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a signed bundle of a model directory, or (--runtime) of the code that serves it.

    A model bundle holds only safetensors weights, tokenizer data and text; code, pickles and links are refused.
    A runtime holds Atoll's wheel, every package it needs (chosen by pip with your pip settings), pip itself, documents
    and licences, the compiled GPU kernels, and install.sh, which needs only a shell and python3 on the server.
    The passphrase of an encrypted key is asked for on the terminal.
    """
    with json_errors(as_json):
        if runtime is not None:
            if model is not None:
                raise BundleError(
                    t("Give a model or --runtime, not both."), t("Build the two one after the other."), USAGE
                )
            kernels = bundle_runtime.kernel_wishes(torch.value, gpu or (), for_model or ())
            passphrase = _ask_passphrase(key) if is_encrypted(key) else None
            more = {"pythons": python or [], "wheels": wheels, "passphrase": passphrase, "kernels": kernels}
            bundle_runtime.build(runtime, key, sequence, torch.value, **more, as_json=as_json)
            return
        needed = {"MODEL": model, "--version": version, "--license": license_id}
        bundle_runtime.require(needed | {"--source-repo": source_repo, "--source-revision": source_revision})
        assert model is not None
        assert version is not None
        assert license_id is not None
        assert source_repo is not None
        assert source_revision is not None
        passphrase = _ask_passphrase(key) if is_encrypted(key) else None
        with byte_progress(_LABELS, quiet=as_json) as progress:
            path = build_bundle(
                model,
                out,
                name=name or model.resolve().name,
                version=version,
                sequence=sequence,
                license_id=license_id,
                license_file=license_file or model / "LICENSE",
                license_url=license_url,
                acceptance=acceptance.value,
                requires=_requirements(requires or ()),
                source_repo=source_repo,
                source_revision=source_revision,
                private_key=key,
                passphrase=passphrase,
                exclude=exclude or (),
                progress=progress,
            )
        made = inspect_bundle(path)
        if as_json:
            print_json(
                {"ok": True, "path": str(path), "key_fingerprint": made.claimed_fingerprint}
                | _summary(made.manifest, made.digest)
            )
            return
        say(t("Built {path}", path=path))
        _print(made.manifest, made.digest, (t("signed by"), made.claimed_fingerprint or ""))
        say(t("Next: {command}", command=f"atoll bundle verify {path} --key {key.with_suffix('.pub')}"))


def _requirements(given: Sequence[str]) -> dict[str, str | int]:
    """`--requires` as the manifest's fields; build_bundle judges the values."""
    found: dict[str, str | int] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in Requires.model_fields:
            raise BundleError(
                t("'{text}' is not a requirement.", text=text[:80]),
                t("Known requirements: {names}", names=joined(Requires.model_fields)),
                USAGE,
            )
        found[name] = int(value) if name.endswith(("_bytes", "_gib")) and value.isdecimal() else value
    return found


@app.command(epilog=examples("atoll bundle inspect /mnt/usb/qwen3-4b-1.0.0", then=_EXIT_CODES))
def inspect(bundle: Bundle, as_json: Json = False) -> None:
    """Show what a bundle says about itself, without any key. Proves nothing."""
    with json_errors(as_json):
        if is_runtime(bundle):
            bundle_runtime.inspect(bundle, as_json=as_json)
            return
        found = inspect_bundle(bundle)
        if as_json:
            print_json(
                {
                    "ok": True,
                    "verified": False,
                    "path": str(bundle),
                    "claimed_key_fingerprint": found.claimed_fingerprint,
                }
                | _summary(found.manifest, found.digest)
                | {"manifest": found.manifest.model_dump(mode="json")}
            )
            return
        say(t("NOT VERIFIED: this is what the bundle claims. Check it with: atoll bundle verify --key PUB"))
        claimed = found.claimed_fingerprint or t("none: there is no readable signature")
        _print(found.manifest, found.digest, (t("claims key"), claimed))
        say(joined(["  ", t("files")], ""))
        for entry in found.manifest.files:
            typer.echo(f"    {human_bytes(entry.size):>10}  {entry.role:<9}  {entry.path}")


@app.command(epilog=examples(
    "atoll bundle verify /mnt/usb/qwen3-4b-1.0.0 --key vendor.pub",
    "atoll bundle verify /mnt/usb/qwen3-4b-1.0.0 --key vendor.pub --full --json",
    then=_EXIT_CODES,
))
def verify(
    bundle: Bundle,
    key: Annotated[
        list[Path],
        typer.Option(
            help="Trusted public key, obtained separately from the bundle; repeatable: any one of them may have "
                 "signed.",
            show_default=False,
        ),
    ],
    full: Annotated[bool, typer.Option("--full", help="Also recompute every whole-file hash.")] = False,
    min_sequence: Annotated[
        int | None, typer.Option(help="Refuse a bundle with a lower sequence.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Check signature, manifest, file set, every byte and the content rules. Changes nothing."""
    with json_errors(as_json):
        pinned = _not_revoked(key)
        if is_runtime(bundle):
            bundle_runtime.verify(bundle, pinned, min_sequence, as_json=as_json)
            return
        refuse_from_medium(pinned, bundle)
        with byte_progress(_LABELS, quiet=as_json) as progress:
            found = verify_bundle(bundle, pinned, full=full, min_sequence=min_sequence, progress=progress)
        if as_json:
            print_json(
                {"ok": True, "verified": True, "path": str(bundle), "key_fingerprint": found.key_fingerprint}
                | _summary(found.manifest, found.digest)
            )
            return
        say(t("VERIFIED: {bundle}", bundle=bundle))
        _print(found.manifest, found.digest, (t("signed by"), found.key_fingerprint))


def _not_revoked(named: list[Path]) -> Keyring:
    """The named keys without those that were revoked in this machine's installation, if there is one."""
    try:
        return keyring(layout_for(None), named)
    except InstallError as error:
        raise BundleError(error.message, error.hint, error.exit_code) from None


def _ask_passphrase(key: Path) -> bytes:
    try:
        return typer.prompt(spoken(t("Passphrase of {key}", key=key)), hide_input=True, err=True).encode()
    except typer.Abort as e:
        raise BundleError(
            t("The private key {key} is encrypted and no passphrase was given.", key=key),
            t("Run this on a terminal."),
            USAGE,
        ) from e


def _summary(manifest: BundleManifest, digest: str) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "version": manifest.version,
        "sequence": manifest.sequence,
        "created": manifest.created,
        "digest": digest,
        "bytes": manifest.total_bytes,
        "files": len(manifest.files),
        "license": manifest.license.spdx,
        "license_acceptance": manifest.license.acceptance,
        "source": manifest.source.model_dump(),
        "chat_template_sha256": manifest.chat_template_sha256,
    }


def _print(manifest: BundleManifest, digest: str, signer: tuple[str, str]) -> None:
    weights = sum(f.size for f in manifest.files if f.role == "weights")
    rows = [
        (t("bundle"), t("{name} {version} (sequence {sequence}, {created})", name=manifest.name,
                        version=manifest.version, sequence=manifest.sequence, created=manifest.created)),
        (t("source"), f"{manifest.source.repo} @ {manifest.source.revision}"),
        (t("licence"), t("{spdx} (acceptance: {acceptance})", spdx=manifest.license.spdx,
                         acceptance=manifest.license.acceptance)),
        (t("content"), t("{count} files, {size}, of which weights {weights}", count=len(manifest.files),
                         size=human_bytes(manifest.total_bytes), weights=human_bytes(weights))),
        (t("template"), manifest.chat_template_sha256 or t("no chat template")),
        (t("digest"), digest),
        signer,
    ]
    say_rows(rows, indent=2, width=10, gap=1)
