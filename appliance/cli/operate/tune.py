"""`atoll tune`: find the engine settings that serve this traffic best. It handles flags and output."""

from typing import Annotated, Any

import typer

from appliance.cli.common import Json, Prefix, confirm, examples, layout_for, print_json, say, say_rows, told
from appliance.cli.language.commands import Commands
from appliance.cli.view.install_view import Terminal
from installer.base.errors import ExitCode, usage_error
from installer.base.i18n import joined, t

_HELP = """Find the engine settings that serve your traffic best, on the running service.

Each trial restarts the engine with other settings and puts load like yours on it. The best settings are kept if they
are better than the current ones; otherwise nothing changes. If the tuning is cancelled or killed, or the machine
restarts, the previous settings are restored; run the same command again to continue. Your own values in atoll.toml are
not changed.

Exit code 0: done; 3: done, but no settings meet the target; 40: the service cannot bear the load; 75: another command
is running; 130: cancelled.
"""
Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="The model, if several run on this server.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, although every trial restarts the service.")]
By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who decides (recorded in the audit log).")]

app = Commands(
    help=_HELP,
    epilog=examples(
        "sudo atoll tune --target ttft=500ms,itl=40ms --budget 10m",
        "sudo atoll tune --profile documents --budget 30m --yes",
        "sudo atoll tune --profile traffic.toml --only max-num-seqs --only kv-cache-dtype",
        "atoll tune show --json",
    ),
)


@app.callback(invoke_without_command=True)
def tune(
    ctx: typer.Context,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="LIMITS", help="What users need at the 95th percentile, such as "
                     "ttft=500ms,itl=40ms. Without it: as many requests a second as possible."),
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="Total time, such as 90s, 10m or 1h.")
    ] = "10m",
    profile: Annotated[
        str,
        typer.Option("--profile", metavar="NAME|FILE", help="The load: chat, documents, batch, single, or a "
                     "profile's file."),
    ] = "chat",
    model: Model = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="NAME", help="The preset that the settings come from: its values may change."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="SETTING", help="Tune exactly this setting, even if the value is your own. May "
                     "be repeated."),
    ] = None,
    load_seconds: Annotated[
        float | None, typer.Option("--load-seconds", metavar="S", help="Load of one trial (default: a twentieth of the "
                                                                       "budget).")
    ] = None,
    start_timeout: Annotated[
        float, typer.Option("--start-timeout", metavar="S", help="Seconds until a start must be ready.")
    ] = 900.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Do not continue an interrupted tuning; repair a damaged record.")
    ] = False,
    yes: Yes = False,
    by: By = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    if ctx.invoked_subcommand is not None:
        return
    with told(as_json):
        from appliance.load.slo import parse_slo
        from appliance.service.tuning.request import seconds_of
        from appliance.service.tuning.work import run_tuning

        layout = layout_for(prefix)
        request = _request(
            target=parse_slo(target or []).to_json(), budget=seconds_of(budget), profile=profile, model=model,
            preset=preset, only=tuple(only or ()), load_seconds=load_seconds, start_timeout=start_timeout, fresh=fresh,
            by=by,
        )  # fmt: skip
        confirm(t("Every trial restarts the service and cuts off running requests. Continue?"), yes=yes)
        with Terminal(layout.prefix, to_stderr=as_json) as terminal:
            result = run_tuning(layout, request, terminal)
    _print(result, as_json)
    if result["target_met"] is False:
        raise typer.Exit(ExitCode.PREFLIGHT_FAIL)


@app.command(epilog=examples("atoll tune show", "atoll tune show --json"))
def show(model: Model = None, prefix: Prefix = None, as_json: Json = False) -> None:
    """Show the result of the last tuning."""
    with told(as_json):
        from appliance.service.tuning.work import last

        result = last(layout_for(prefix), model)
    if result is None:
        if as_json:
            print_json({"tuned": False})
        else:
            say(t("Nothing has been tuned here."))
        return
    _print({"tuned": True, **result}, as_json)


@app.command(epilog=examples("sudo atoll tune reset", "sudo atoll tune reset --model chat --yes"))
def reset(model: Model = None, yes: Yes = False, by: By = None, prefix: Prefix = None, as_json: Json = False) -> None:
    """Go back to the settings from before the first tuning: the preset's, if one was installed."""
    with told(as_json):
        from appliance.service.tuning.work import run_reset

        layout = layout_for(prefix)
        confirm(t("This restarts the service. Continue?"), yes=yes)
        with Terminal(layout.prefix, to_stderr=as_json) as terminal:
            result = run_reset(layout, model, terminal, by=by)
    if as_json:
        print_json(result)
    else:
        say(t("These settings apply again: {settings}.", settings=_settings(result["setting"])))


def _request(**given: Any) -> Any:
    """Raises InstallError (usage) for values out of bounds."""
    from pydantic import ValidationError

    from appliance.service.tuning.request import TuneRequest

    try:
        return TuneRequest(**given)
    except ValidationError as error:
        entry = error.errors(include_url=False)[0]
        flag = "--" + str(entry["loc"][0]).replace("_", "-")
        raise usage_error(t("{flag} {value} cannot be used.", flag=flag, value=str(entry["input"])[:40]),
                          t("For the allowed values: {command}", command="atoll tune --help")) from None


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    from appliance.service.tuning import advice
    from appliance.service.tuning.measure import measured_of

    typer.echo()
    rows = [(t("model"), result["model"]), (t("load"), result["profile"])]
    if result["target"]:
        limits = joined(f"{name} {limit:g} ms" for name, limit in result["target"].items())
        met = t("met") if result["target_met"] else t("not met")
        rows.append((t("target"), t("{limits}: {met}", limits=limits, met=met)))
    rows += [
        (t("before"), advice.numbers(measured_of(result["before"]))),
        (t("now"), advice.numbers(measured_of(result["after"]))),
        (t("settings"), _changed(result)),
        (t("why"), result["reason"]),
        (t("trials"), t("{count}, in {seconds} s; ended because {why}", count=len(result["trials"]),
                        seconds=f"{result['seconds']:.0f}", why=result["stopped"])),
    ]  # fmt: skip
    rows += [(t("would help") if number == 0 else "", text) for number, text in enumerate(result["helps"])]
    say_rows(rows, indent=2, width=8)


def _changed(result: dict[str, Any]) -> str:
    from appliance.service.tuning import advice

    if not result["changed"]:
        return t("unchanged: {settings}", settings=_settings(result["setting"]))
    return joined(f"{name} {advice.shown(old)} → {advice.shown(new)}" for name, (old, new) in result["changed"].items())


def _settings(setting: dict[str, Any]) -> str:
    from appliance.service.tuning import advice

    return joined(f"{name} {advice.shown(value)}" for name, value in setting.items())
