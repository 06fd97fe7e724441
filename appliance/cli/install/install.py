"""`atoll install|upgrade`: flags and output; `installer` does the work."""

import contextlib
import hashlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli.common import Json, Prefix, examples, layout_for, told
from appliance.cli.install.preflight import read_waivers
from appliance.cli.view.install_view import Terminal, print_result
from appliance.service.installing import run_install
from installer.base import fs
from installer.base.errors import usage_error
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.base.timeouts import START_TIMEOUT
from installer.decide.answers import Answers, read_answers
from installer.decide.install_options import InstallOptions, ModelChoice, TlsChoice
from installer.operate.install import Installer, key_was_shown
from installer.operate.lifecycle import history_of
from installer.preflight.model_needs import RUNTIME
from installer.release.code_tree import code_tree, read_facts, upgrade_command
from offline_bundle import limits
from offline_bundle.bundle.manifest import MANIFEST

Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port of the endpoint (default: as installed, else 8443; under a "
                                                    "prefix 8000).")
]
Host = Annotated[
    str | None, typer.Option(metavar="ADDRESS",
                             help="Address to listen on (default: as installed, else 0.0.0.0; under a prefix "
                                  "127.0.0.1).")
]
Waive = Annotated[
    list[str] | None,
    typer.Option("--waive", metavar="CHECK=REASON", help="Continue although CHECK fails; the reason is recorded."),
]
Media = Annotated[
    list[Path] | None, typer.Argument(metavar="MEDIUM", help="The mounted disk, or a bundle's directory.")
]
Bundle = Annotated[
    list[str] | None,
    typer.Option("--bundle", metavar="[NAME=]DIR", help="This bundle, under this name; may be given for several."),
]
Gpus = Annotated[
    list[str] | None,
    typer.Option("--gpus", metavar="[NAME=]GPU,…", help="GPUs of a model, by index or UUID (default: as installed, "
                                                        "else all)."),
]
TrustKey = Annotated[
    list[Path] | None,
    typer.Option(
        "--trust-key", metavar="PUB",
        help="The vendor's public key, obtained through a separate channel. It is then the only one that counts.",
    ),
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-license", "--accept-licence", metavar="SPDX@SHA256[:REFERENCE]",
        help="Accept this licence and this text of it (at least 8 hex digits). A gated model also takes the reference "
             "of the agreement that covers its use. Without it you are asked.",
    ),
]
AnswersFile = Annotated[
    Path | None, typer.Option("--answers", metavar="FILE", help="Answers for an unattended install (TOML).")
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop with 4 if the preflight has warnings.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Stop after the plan; write nothing.")]
Yes = Annotated[
    bool, typer.Option("--yes-nothing-else", help="Confirm the plan. This accepts no licence and waives no check.")
]
StartTimeout = Annotated[
    float | None, typer.Option(min=1, help="Seconds until the service must be ready (900).")
]
Device = Annotated[
    str | None, typer.Option(metavar="auto|cuda|cpu", help="Device for the models: auto, cuda or cpu (auto).")
]
Remove = Annotated[
    list[str] | None, typer.Option("--remove", metavar="NAME", help="Remove this model; the others keep running.")
]
Downgrade = Annotated[
    str | None,
    typer.Option("--allow-downgrade", metavar="REASON", help="Accept an older bundle than the installed one; "
                                                             "recorded."),
]
TlsCert = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="FILE", help="Your own certificate with its chain, PEM.")
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key, PEM.")]
TlsName = Annotated[
    list[str] | None, typer.Option("--tls-name", metavar="NAME", help="A further name in the certificate made here.")
]
Tls = Annotated[bool, typer.Option("--tls", help="TLS on loopback too (a server always has it).")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the `atoll` command tree."""
    app.command(
        help=_INSTALL,
        epilog=examples(
            "sudo atoll install /media/usb --trust-key vendor.pub",
            "atoll install /media/usb --dry-run",
            "atoll install --answers answers.toml --json",
            "atoll install --prefix ~/atoll --bundle /media/usb/model --trust-key vendor.pub",
            "atoll install --bundle chat=/media/usb/qwen --gpus chat=0 --bundle code=/media/usb/coder --gpus code=1",
        ),
    )(install)
    lines = ("atoll upgrade /media/usb", "atoll upgrade /media/usb --trust-key new.pub", "atoll upgrade --dry-run")
    app.command(help=_UPGRADE, epilog=examples(*lines))(upgrade)


_INSTALL = """Verify what is on the medium, install it, start the service and ask it a first question.

As root it installs on this server, with systemd; with --prefix below a directory, with no privilege at all.
Nothing is written before the plan is confirmed, nothing that runs is touched before everything is staged, and a service
that does not answer is rolled back. If it is killed, the same command continues. The API key is shown once, at the end.
"""
_UPGRADE = """Install what is on the medium beside the running release, switch over, and go back if it does not answer.

The previous release stays on the disk: `atoll rollback` needs no medium. Settings, keys and other models stay.
"""

_PURPOSE = "ATOLL_PURPOSE"  # what was typed, for the code that a hand-over starts


def install(
    ctx: typer.Context,
    media: Media = None,
    bundle: Bundle = None,
    gpus: Gpus = None,
    prefix: Prefix = None,
    trust_key: TrustKey = None,
    accept_license: Accept = None,
    port: Port = None,
    host: Host = None,
    device: Device = None,
    answers: AnswersFile = None,
    waive: Waive = None,
    strict: Strict = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    remove: Remove = None,
    allow_downgrade: Downgrade = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    tls: Tls = False,
    start_timeout: StartTimeout = None,
    as_json: Json = False,
) -> None:
    with told(as_json):
        given = read_answers(answers) if answers else Answers(schema_version=1)
        layout = layout_for(prefix or given.prefix)
        # `upgrade` runs through here, and so does the code that took over from it: the job is named after it.
        purpose = os.environ.pop(_PURPOSE, "") or ctx.info_name
        purpose = "upgrade" if purpose == "upgrade" else "install"
        _hand_over(media or given.medium, layout, purpose)
        only = _models(bundle, gpus)
        options = InstallOptions(
            prefix=None if layout.system else layout.prefix,
            bundle=None if only or given.models else given.bundle,
            media=media or given.medium,
            models=only or [_answered(model) for model in given.models],
            only_these=bool(given.models) and not only,
            remove=remove or [],
            trust_keys=trust_key or given.trust_keys,
            accept_licenses=[*(accept_license or []), *given.accept_licenses],
            host=host or given.host,
            port=port or given.port,
            device=device or given.device,
            waivers={**given.waivers, **read_waivers(waive)},
            strict=strict or given.strict,
            dry_run=dry_run,
            confirmed=yes or given.confirm_plan,
            allow_downgrade=_reason(allow_downgrade) or given.allow_downgrade,
            start_timeout=start_timeout or given.start_timeout or START_TIMEOUT,
            tls=_tls(given, tls_cert, tls_key, tls_name, tls),
        )
        run_options(options, layout, purpose=purpose, interactive=answers is None, as_json=as_json)


def upgrade(
    ctx: typer.Context,
    media: Media = None,
    bundle: Bundle = None,
    prefix: Prefix = None,
    trust_key: TrustKey = None,
    accept_license: Accept = None,
    answers: AnswersFile = None,
    waive: Waive = None,
    strict: Strict = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    allow_downgrade: Downgrade = None,
    start_timeout: StartTimeout = None,
    as_json: Json = False,
) -> None:
    with told(as_json):
        layout = layout_for(prefix)
        if history_of(layout).committed is None:
            raise usage_error(t("Nothing is installed here that could be upgraded."),
                              t("Install it: atoll install MEDIUM"))  # fmt: skip
    install(
        ctx, media=media, bundle=bundle, prefix=prefix, trust_key=trust_key, accept_license=accept_license,
        answers=answers, waive=waive, strict=strict, dry_run=dry_run, yes=yes, allow_downgrade=allow_downgrade,
        start_timeout=start_timeout, as_json=as_json,
    )  # fmt: skip


def _hand_over(media: list[Path], layout: Layout, purpose: str = "install") -> None:
    """If a medium brings other code than the running code, the installed install.sh takes over: it trusts only the
    installed keys, verifies the code, unpacks it, and calls that code's `atoll install` with the same flags."""
    tree = code_tree()
    for medium in media:
        manifest = medium / RUNTIME / MANIFEST
        if tree is None or not manifest.is_file():
            continue
        text, facts = fs.read_regular(manifest, limits.MAX_MANIFEST)
        if facts.st_size > limits.MAX_MANIFEST:
            continue  # install.sh would refuse it; the bundles beside it do not depend on it
        brought = hashlib.sha256(text).hexdigest()
        command = upgrade_command(medium, layout) if brought != read_facts(tree)["digest"] else None
        if command is not None:
            sys.stdout.flush()
            flags = [word for word in sys.argv[2:] if not word or Path(word) not in media]
            os.environ[_PURPOSE] = purpose  # install.sh knows one command; code from before this variable ignores it
            os.execv(command[0], [*command, *flags])  # noqa: S606
        return


def run_options(options: InstallOptions, layout: Layout, *, purpose: str, interactive: bool, as_json: bool) -> None:
    """Install with these options, and print the result."""
    with Terminal(layout.prefix, to_stderr=as_json) as terminal:
        terminal.interactive = interactive and sys.stdin.isatty()
        if options.dry_run:  # short, and writes nothing: no job is needed
            result = Installer(options, terminal, layout=layout).run()
        else:
            result = run_install(
                options, layout, terminal, interactive=terminal.interactive, purpose=purpose, make=Installer
            )
    with contextlib.suppress(OSError):  # stdout is closed: the key was not shown, and the next run makes another
        print_result(result, layout, as_json)
        sys.stdout.flush()
        if result.api_key:
            key_was_shown(layout, result.key_ids)


def _models(bundles: list[str] | None, gpus: list[str] | None) -> list[ModelChoice]:
    """`--bundle [NAME=]DIR` and `--gpus [NAME=]0,1`, combined by name."""
    chosen: dict[str, tuple[int | str, ...]] = {}
    for text in gpus or []:
        name, sep, listed = text.rpartition("=")
        if not sep and len(bundles or []) > 1:
            raise usage_error(t("--gpus {text}: for which model?", text=text),
                              t("Name it: --gpus NAME={text}", text=text))  # fmt: skip
        chosen[name] = tuple(int(gpu) if gpu.isdigit() else gpu for gpu in listed.split(",") if gpu)
    models = []
    for text in bundles or []:
        name, sep, directory = text.partition("=")
        if not sep or "/" in name:
            name, directory = "", text
        given = chosen.pop(name) if name in chosen else chosen.pop("", None)
        models.append(ModelChoice(Path(directory), name or None, given))
    # GPUs for a model that is already installed, or (without a name) for the one on the medium.
    models += [ModelChoice(name=name or None, gpus=gpu) for name, gpu in chosen.items()]
    return models


def _answered(model: Any) -> ModelChoice:
    gpus = None if model.gpus is None else tuple(model.gpus)
    return ModelChoice(model.bundle, model.name, gpus, model.device, model.settings)


def _tls(
    given: Answers, certificate: Path | None, key: Path | None, names: list[str] | None, wanted: bool
) -> TlsChoice:
    told = given.tls
    return TlsChoice(
        certificate or (told.certificate if told else None),
        key or (told.private_key if told else None),
        tuple(names or (told.names if told else ())),
        wanted or (told.wanted if told else False),
    )


def _reason(text: str | None) -> str | None:
    if text is not None and len(text.strip()) < 3:
        raise usage_error(t("--allow-downgrade needs a reason."),
                          t("Say why, in words: --allow-downgrade 'ticket 4711'"))  # fmt: skip
    return text
