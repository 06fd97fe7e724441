"""`atoll plan`: what fits on a GPU, before anything is bought, copied or started."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.cli.common import Json, examples, print_json, say, say_rows, told
from installer.base.errors import ExitCode, usage_error
from installer.base.i18n import language_of, t

if TYPE_CHECKING:
    from appliance.service.planning.planner import Planned
    from appliance.service.presets.catalogue import GpuModel

_DOES_NOT_FIT = ExitCode.PREFLIGHT_FAIL


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "atoll plan gemma4-31b --gpu h100",
            "atoll plan qwen3.6-27b --gpu l40s --context 32768 --users 8",
            "atoll plan gemma4-31b/chat --gpu 96GB --json",
            "atoll plan /models/my-model --gpu a100 --quantization fp8",
            "atoll plan --table",
        )
    )(plan)


def plan(
    asked: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A model or preset that `atoll presets` lists, or a directory with a "
                       "config.json; weights are not needed."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="The GPU: h100, L40S, 80GB, … (default: this machine's)."),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", metavar="TOKENS", help="Prompt plus answer (default: the longest that "
                                                                     "fits).")
    ] = None,
    users: Annotated[
        int | None, typer.Option("--users", metavar="N", help="Requests of that length at once (default: as many as "
                                                              "fit).")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option("--quantization", metavar="FORMAT", help="fp8, or none (default: none, if it fits).")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option("--kv-cache-dtype", metavar="DTYPE", help="auto, fp8 or int8 (auto).")
    ] = None,
    share: Annotated[
        float | None,
        typer.Option("--gpu-memory-utilization", metavar="SHARE", help="Share of the GPU for the engine (0.9)."),
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Print the sizing table of every model and GPU class, as Markdown.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compute what fits on a GPU, without a GPU and without weights.

    The engine's own memory planner answers. Exit code 0: it fits; 3: it does not, and what would fit is printed.
    """
    with told(as_json):
        if table:
            _print_table(as_json)
            return
        fits = _plan(asked, gpu, context, users, quantization, kv_cache_dtype, share, as_json)
    if not fits:
        raise typer.Exit(_DOES_NOT_FIT)


def _plan(
    asked: str | None, gpu: str | None, context: int | None, users: int | None, quantization: str | None,
    kv_cache_dtype: str | None, share: float | None, as_json: bool,
) -> bool:  # fmt: skip
    from appliance.service.planning import model_and_gpu, planner
    from appliance.service.presets import resolve

    if asked is None:
        raise usage_error(t("No model is named."), t("Name one that this lists: atoll presets"))
    subject, card = model_and_gpu.subject(asked), model_and_gpu.card(gpu)
    if subject.preset is not None:
        preset = resolve.find(subject.preset, card)
        knobs, card = preset.planned.knobs, preset.card
    elif card is None:
        raise resolve.no_gpu()
    else:
        knobs = planner.Knobs()
    given = {"context": context, "users": users, "kv_cache_dtype": kv_cache_dtype, "gpu_memory_utilization": share}
    for name, value in given.items():
        if value is not None:
            knobs = planner.changed(knobs, name, value)
    if quantization is not None:
        knobs = planner.changed(knobs, "quantization", None if quantization in ("none", "bf16") else quantization)
    planner.check(knobs)
    found = planner.plan(subject.directory, card, knobs)
    if found is None and quantization is None and subject.preset is None:
        knobs = planner.smaller_weights(subject.directory, card, knobs) or knobs
        found = planner.plan(subject.directory, card, knobs)
    ways = list(planner.fitting(subject.directory, card, knobs)) if found is None else []
    turned = list(planner.what_if(subject.directory, card, found)) if found else []
    if as_json:
        print_json({
            "model": subject.title, "preset": subject.preset, "gpu": card.model_dump(by_alias=True),
            "asked": knobs.to_json(), "fits": found is not None, **(found.to_json() if found else {}),
            "refused": "" if found else planner.refusal(subject.directory, card, knobs),
            "what_if": [
                {"knob": knob, "change": text, "fits": then is not None, "context": then.context if then else None,
                 "users": then.users if then else None} for knob, text, then in turned
            ],
            "instead": [
                {"kind": kind, "change": text, "gpu": title, "context": then.context, "users": then.users,
                 "knobs": then.knobs.to_json()} for kind, text, title, then in ways
            ],
        })  # fmt: skip
    elif found:
        _print_plan(subject.title, card, found, turned)
    else:
        say(t("It does not fit: {why}", why=planner.refusal(subject.directory, card, knobs)), err=True)
        _print_ways(ways)
    return found is not None


def _print_plan(title: str, card: "GpuModel", found: "Planned", turned: list[Any]) -> None:
    numbers = found.numbers
    weights = found.knobs.quantization or "bf16"
    say(t("{model} ({weights}) on {gpu}: {fits}", model=title, weights=weights, gpu=card.title, fits=_outcome(found)))
    say()
    parts = {"weights": t("weights"), "overhead": t("context, graphs, libraries (estimated)"),
             "activations": t("activations of the largest step (upper bound)")}  # fmt: skip
    rows = [(t("usable memory"), _gib(numbers["usable"]))]
    rows += [(parts[name], _gib(size)) for name, size in numbers["parts"].items()]
    rows.append((t("request table"), _gib(numbers["request_table"])))
    rows.append((t("KV cache and states"), _gib(numbers["kv_cache"])))
    if numbers["in_host_memory"]:
        rows.append((t("additionally, in host memory"), _gib(numbers["in_host_memory"])))
    for group in numbers["kv_groups"]:
        size, layers = f"{group['bytes_per_token']:,}", group["layers"]
        if group["window"] is None:
            text = t("{size} bytes in {layers} layers of full attention", size=size, layers=layers)
        else:
            text = t("{size} bytes in {layers} layers, for the last {window} tokens only", size=size, layers=layers,
                     window=f"{group['window']:,}")  # fmt: skip
        rows.append((t("each token"), text))
    if numbers["state_bytes_per_sequence"]:
        state = t("{size} of state in recurrent layers", size=_gib(numbers["state_bytes_per_sequence"]))
        rows.append((t("each request"), state))
    say_rows(rows, indent=2)
    if turned:
        say()
        say(t("Four settings share one memory. Change one of them:"))
        say_rows([(text, _outcome(then)) for _, text, then in turned], indent=2)


def _outcome(then: "Planned | None") -> str:
    if then is None:
        return t("does not fit")
    return t("{users} × {context} tokens at once", users=f"{then.users:,}", context=f"{then.context:,}")


def _print_ways(ways: list[Any]) -> None:
    if not ways:
        say(t("No single change makes it fit. Choose a smaller model."), err=True)
        return
    say(t("What would fit instead:"), err=True)
    say_rows(
        [(text, t("{outcome}, on {gpu}", outcome=_outcome(then), gpu=title)) for _, text, title, then in ways],
        indent=2, err=True,
    )


def _print_table(as_json: bool) -> None:
    from appliance.service.planning.sizing import table

    lines = list(table(language_of()))
    if as_json:
        print_json({"markdown": "\n".join(lines)})
        return
    for line in lines:
        typer.echo(line)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= (1 << 30) // 10 else f"{size / (1 << 20):.1f} MiB"
