"""`atoll models`: add and remove models and replicas while the others serve."""

from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli.common import Json, examples, layout_for, print_json, say, say_rows, told
from appliance.cli.install.install import Accept, TrustKey, Yes, run_options
from appliance.cli.language.commands import Commands
from installer.base.errors import InstallError, usage_error
from installer.base.i18n import joined, t
from installer.base.timeouts import DRAIN_TIMEOUT
from installer.decide.install_options import InstallOptions, ModelChoice, ReplicaChoice
from installer.operate.lifecycle import history_of
from installer.release import config, release
from installer.service import model_reload

app = Commands(
    help="Add and remove models and replicas of a server while the others serve.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The model's name, or the replica's.")]
Gpu = Annotated[str | None, typer.Option("--gpus", metavar="GPU,…", help="GPUs by index or UUID.")]
Bundle = Annotated[Path | None, typer.Option("--bundle", metavar="DIR", help="The bundle of a new model.")]
Of = Annotated[
    str | None,
    typer.Option("--replica-of", metavar="MODEL", help="Add one more engine for this model, under the same name."),
]
Drain = Annotated[
    float, typer.Option("--drain", min=0, max=3600, metavar="SECONDS", help="What its running requests get (30).")
]
Device = Annotated[str | None, typer.Option(help="Device of a new model: auto, cuda or cpu (auto).")]


@app.command("list", epilog=examples("atoll models list", "atoll models list --json"))
def list_models(as_json: Json = False) -> None:
    """Each engine: its model, its GPUs, and what it does.

    What it does is known to root only.
    """
    with told(as_json):
        layout = layout_for(None)
        committed = history_of(layout).committed or {}
        text = config.read_text(layout.config)
        tables, copies = config.model_tables(text, layout.config), config.replicas(text, layout.config)
        bundles = release.bundles_of(release.read_info(layout, str(committed.get("release"))))
        names = [str(facts["instance"]) for facts in bundles]
        seen = {row["engine"]: row for row in (model_reload.read(layout) or {}).get("engines", ())}
        rows: list[dict[str, Any]] = [
            {"engine": name, "model": copies.get(name, name), "replica": name in copies,
             "gpus": tables.get(name, {}).get("gpus", []), "state": seen.get(name, {}).get("state"),
             "in_flight": seen.get(name, {}).get("in_flight")}
            for name in [*names, *sorted(copies)]]
        if as_json:
            print_json({"engines": rows})
            return
        say_rows((row["engine"], _told(row)) for row in rows)


def _told(row: dict[str, Any]) -> str:
    words: list[str] = [t("replica of {model}", model=row["model"])] if row["replica"] else []
    if row["gpus"]:
        words.append("GPU " + ",".join(map(str, row["gpus"])))
    if row["state"]:
        words += [str(row["state"]), t("{count} requests", count=row["in_flight"])]
    return joined(words, "  ")


@app.command(
    epilog=examples("sudo atoll models add code --bundle /media/usb/coder --gpus 1",
                    "sudo atoll models add chat-2 --replica-of chat --gpus 1"))
def add(
    name: Name, bundle: Bundle = None, replica_of: Of = None, gpus: Gpu = None, device: Device = None,
    trust_key: TrustKey = None, accept_license: Accept = None, yes: Yes = False, as_json: Json = False,
) -> None:
    """Start a new model from a signed bundle, or one more engine for a model that is here.

    The gateway connects it without a restart; answers that are under way go on.
    """
    with told(as_json):
        if (bundle is None) == (replica_of is None):
            raise _usage(t("Say what to add: either --bundle DIR or --replica-of MODEL."))
        chosen = tuple(int(gpu) if gpu.isdigit() else gpu for gpu in (gpus or "").split(",") if gpu)
        options = InstallOptions(
            trust_keys=trust_key or [], accept_licenses=accept_license or [], confirmed=yes,
            models=[ModelChoice(bundle, name, chosen or None, device)] if bundle is not None else [],
            replicas=[ReplicaChoice(name, replica_of, chosen)] if replica_of is not None else [])
        _run(options, as_json)


@app.command(epilog=examples("sudo atoll models remove code", "sudo atoll models remove chat-2 --drain 300"))
def remove(name: Name, drain: Drain = DRAIN_TIMEOUT, yes: Yes = False, as_json: Json = False) -> None:
    """Take a model with its replicas, or one replica, out of service.

    It gets no new requests at once, and is stopped when the running ones have ended or the seconds are over.
    The model's files stay as long as a rollback may need them.
    """
    with told(as_json):
        _run(InstallOptions(confirmed=yes, remove=[name], drain_timeout=drain), as_json)


def _run(options: InstallOptions, as_json: bool) -> None:
    layout = layout_for(None)
    if history_of(layout).committed is None:
        raise _usage(t("Nothing is installed here."))
    run_options(options, layout, purpose="install", interactive=True, as_json=as_json)
    if not as_json:
        say(t("See: atoll models list"))


def _usage(message: str) -> InstallError:
    return usage_error(message, "atoll models add --help")
