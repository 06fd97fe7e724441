"""`atoll cost`: what a request and a million tokens cost here, with every assumption shown."""

from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli.common import Json, examples, print_json, say, say_rows, told
from installer.base.errors import usage_error
from installer.base.i18n import t

_HELP = """Compute what requests and tokens cost on this machine.

The speed is the one that was measured (--load); a second measurement (--baseline, such as plain transformers) gives
the multiplier. Every other number is an assumption, shown with its unit and source; replace it with --set or --file.
"""


def register(app: typer.Typer) -> None:
    lines = (
        "atoll cost --assumptions",
        "atoll cost --load atoll.json --baseline transformers.json",
        "atoll cost --load atoll.json --set power_price=0.15 --set gpu_price=25000",
        "atoll cost --load atoll.json --file prices.toml --json",
    )
    app.command(name="cost", help=_HELP, epilog=examples(*lines, then="Exit codes: 0 ok, 2 wrong flags or files."))(
        command
    )


def command(
    load: Annotated[
        Path | None, typer.Option("--load", metavar="FILE", help="A result of atoll bench serve --save-result.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="A result to compare with.")
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Replace an assumption; may be repeated.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Assumptions as TOML, at the top level or in [cost].")
    ] = None,
    assumptions: Annotated[bool, typer.Option("--assumptions", help="Only show the assumptions.")] = False,
    as_json: Json = False,
) -> None:
    from appliance.load.result import read_result
    from appliance.service.planning import cost

    with told(as_json):
        given = cost.of_file(file) if file else {}
        words = cost.of_words(change or [])
        values = cost.assumed(given, words)
        if not assumptions and load is None:
            raise usage_error(
                t("No measurement was given."),
                t("Measure, then give the result: atoll bench serve --save-result; atoll cost --load FILE"),
            )
        sources = {each.name: t("set by you") if each.name in given or each.name in words else each.source
                   for each in cost.ASSUMPTIONS}  # fmt: skip
        result: dict[str, Any] = {}
        if not assumptions and load is not None:
            result = cost.cost(values, read_result(load), read_result(baseline) if baseline else None)
        if as_json:
            listed = [{"name": each.name, "value": values[each.name], "unit": each.unit, "what": str(each.what),
                       "source": str(sources[each.name])} for each in cost.ASSUMPTIONS]  # fmt: skip
            print_json({"schema_version": 1, **result, "assumptions": listed})
            return
        for each in cost.ASSUMPTIONS:
            say_rows([(each.name, t("{value:g} {unit}: {what} ({source})", value=values[each.name], unit=each.unit,
                                    what=each.what, source=sources[each.name]))], width=20)  # fmt: skip
        if result:
            _print(result)


def _print(result: dict[str, Any]) -> None:
    gpus, month = result["gpus"], result["per_month"]
    parts = (("average", t("for the average load")), ("peaks", t("for peaks")), ("reserve", t("in reserve")))
    say()
    say_rows([
        *((name, t("{count:g} GPUs, {money:,.2f} a month", count=gpus[part], money=month[part]))
          for part, name in parts),
        (t("operators"), t("{money:,.2f} a month", money=month["operators"])),
        (t("total"), t("{money:,.2f} a month", money=result["total_per_month"])),
        (t("a request"), f"{result['per_request']:,.6f}"),
        (t("a million tokens"), f"{result['per_million_tokens']:,.4f}"),
    ])  # fmt: skip
    if "multiplier" in result:
        say(t("Measured here: {times:.1f} times the baseline, whose million tokens would cost {money:,.4f}.",
              times=result["multiplier"], money=result["baseline"]["per_million_tokens"]))  # fmt: skip
