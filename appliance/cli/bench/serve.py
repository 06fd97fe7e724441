"""`atoll bench serve`: the load generator, with the flags of `vllm bench serve`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from appliance.cli.bench import options
from appliance.cli.bench.flags import VllmCommand
from appliance.cli.bench.request import dataset_of, extra_of, percentiles_of, profile_of, target_of
from appliance.cli.bench.view import load_progress, print_comparison, print_result
from appliance.cli.common import Json, examples, print_error, print_json, say, spoken, told
from appliance.load.result import LoadResult, read_result, save_result
from installer.base.errors import ExitCode, io_error, usage_error
from installer.base.i18n import t

if TYPE_CHECKING:
    from appliance.load.profile import TrafficProfile

_EXIT_CODES = "Exit codes: 0 measured, 2 wrong flags or profile, 40 the endpoint answered nothing, 130 interrupted."


def register(app: typer.Typer) -> None:
    lines = (
        "atoll bench serve --base-url https://llm:8443 --ca atoll-ca.crt --api-key-file key --profile chat",
        "atoll bench serve --base-url http://127.0.0.1:8000 --request-rate 4 --num-prompts 200 --goodput ttft:500",
        "atoll bench serve --base-url http://127.0.0.1:8000 --profile chat --find-users --goodput ttft:1000 tpot:60",
        "atoll bench serve --backend transformers --model /models/chat --profile single --save-result",
    )
    app.command(name="serve", cls=VllmCommand, epilog=examples(*lines, then=_EXIT_CODES))(serve)


def serve(
    backend: options.Backend = None,
    base_url: options.BaseUrl = None,
    host: options.Host = None,
    port: options.Port = None,
    endpoint: options.Endpoint = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    api_key_file: options.ApiKeyFile = None,
    ca: options.Ca = None,
    header: options.Header = None,
    profile: options.Profile = None,
    dataset_name: options.DatasetName = None,
    dataset_path: options.DatasetPath = None,
    input_len: options.InputLen = None,
    output_len: options.OutputLen = None,
    range_ratio: options.RangeRatio = None,
    prefix_len: options.PrefixLen = None,
    num_prompts: options.NumPrompts = None,
    seconds: options.Seconds = None,
    num_warmups: options.NumWarmups = None,
    request_rate: options.RequestRate = None,
    burstiness: options.Burstiness = None,
    max_concurrency: options.MaxConcurrency = None,
    ignore_eos: options.IgnoreEos = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    repetition_penalty: options.RepetitionPenalty = None,
    extra_body: options.ExtraBody = None,
    seed: options.Seed = None,
    goodput: options.Goodput = None,
    find_users: options.FindUsers = False,
    percentile_metrics: options.PercentileMetrics = None,
    metric_percentiles: options.MetricPercentiles = "90,95,99",
    batch_size: options.BatchSize = 1,
    save_result: options.SaveResult = False,
    save_detailed: options.SaveDetailed = False,
    append_result: options.AppendResult = False,
    result_dir: options.ResultDir = None,
    result_filename: options.ResultFilename = None,
    label: options.Label = None,
    metadata: options.Metadata = None,
    baseline: options.Baseline = None,
    disable_tqdm: options.DisableTqdm = False,
    as_json: Json = False,
) -> None:
    """Put load on an OpenAI endpoint and measure it; flags and JSON as in `vllm bench serve`.

    Prompts are made of words, as long as asked by the endpoint's own counts; no tokenizer and no network are needed.
    Ctrl-C ends a run and shows what was measured.
    """
    given = dict(locals())
    with told(as_json):
        notes, before = _notes(given["metadata"]), _read(baseline)
        result, chosen, interrupted = _measure(given, quiet=as_json or disable_tqdm)
        values = result.to_json() | ({"users": chosen} if find_users else {}) | {"label": label} | notes
        if as_json:
            print_json(values)
        else:
            print_result(result)
            if find_users:
                say(t("Users within the targets: {users}", users=chosen))
            if baseline is not None and before is not None:
                _print_against(baseline, before, result)
        # Shown first: a full disk must not lose the measurement.
        code = _save(given, result, values) if save_result or append_result or result_filename else 0
        code = ExitCode.INTERRUPTED if interrupted else code or (0 if result.completed else ExitCode.UNHEALTHY)
        if code:
            raise typer.Exit(code)


def _measure(given: dict[str, Any], *, quiet: bool) -> tuple[LoadResult, Any, bool]:
    """The result, the users if they were asked for, and whether it was interrupted."""
    from appliance.load.generator import LoadInterrupted, run_load
    from appliance.load.slo import parse_slo
    from appliance.load.users import find_users

    slo = parse_slo(given["goodput"] or [])
    if given["find_users"] and not slo:
        raise usage_error(t("--find-users needs targets."), t("Give them: --goodput ttft:1000 tpot:60"))
    profile = profile_of(given)
    more = {
        "requests": None if given["seconds"] is not None and given["num_prompts"] is None else profile.requests,
        "seconds": given["seconds"], "slo": slo, "dataset": dataset_of(given, profile),
        "detailed": given["save_detailed"], "percentiles": percentiles_of(given["metric_percentiles"]),
    }  # fmt: skip
    if given["backend"] == "transformers":
        if given["find_users"]:
            raise usage_error(t("--find-users needs an endpoint."), t("Give --base-url."))
        return _transformers(given, profile, more, quiet=quiet)
    target = target_of(given)
    if given["find_users"]:

        def on_point(clients: int) -> Any:
            if not quiet:
                say(t("trying {clients} users", clients=clients), err=True)

        found = find_users(target, profile, slo, on_point=on_point)
        best = [result for clients, _, result in found.points if clients == found.users] or [found.points[0][2]]
        return best[0], found.users, False
    extra = extra_of(given["extra_body"])
    with load_progress(quiet=quiet) as on_progress:
        try:
            return run_load(target, profile, on_progress=on_progress, extra=extra, **more), None, False
        except LoadInterrupted as stopped:
            return stopped.result, None, True


def _transformers(
    given: dict[str, Any], profile: "TrafficProfile", more: dict[str, Any], *, quiet: bool
) -> tuple[LoadResult, Any, bool]:
    from appliance.load.generator import Load, LoadInterrupted
    from appliance.load.transformers_baseline import TransformersSender

    if not given["model"]:
        raise usage_error(t("--backend transformers needs the model's directory."), t("Give it: --model DIR"))

    def sender() -> TransformersSender:
        return TransformersSender(Path(given["model"]), batch_size=given["batch_size"],
                                  sampling=profile.sampling.body(), ignore_eos=profile.ignore_eos)  # fmt: skip

    with load_progress(quiet=quiet) as on_progress:
        try:
            return Load(sender, profile, on_progress=on_progress, **more).run_to_end(), None, False
        except LoadInterrupted as stopped:
            return stopped.result, None, True


def _notes(pairs: list[str] | None) -> dict[str, str]:
    notes = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name or name in LoadResult.model_fields:
            raise usage_error(t("'{pair}' cannot be saved as a note.", pair=pair), t("Write --metadata NAME=VALUE."))
        notes[name] = value
    return notes


def _read(baseline: Path | None) -> LoadResult | None:
    return None if baseline is None else read_result(baseline)


def _save(given: dict[str, Any], result: LoadResult, values: dict[str, Any]) -> int:
    """The exit code."""
    name = given["result_filename"]
    if name is None:
        rate = "inf" if result.request_rate is None else f"{result.request_rate:g}"
        at_once = f"-concurrency{given['max_concurrency']}" if given["max_concurrency"] else ""
        short = result.model_id.rsplit("/", 1)[-1] or "model"
        first, now = given["label"] or result.backend, time.strftime("%Y%m%d-%H%M%S")
        name = Path(f"{first}-{rate}qps{at_once}-{short}-{now}.json")
    path = (given["result_dir"] or Path()) / name
    try:
        save_result(path, values, append=given["append_result"])
    except OSError as error:
        print_error(io_error(t("save the result as {path}", path=path), error))
        return ExitCode.IO
    say(t("Saved: {path}", path=path), err=True)
    return 0


def _print_against(baseline: Path, before: LoadResult, result: LoadResult) -> None:
    from appliance.load.compare import compare, differences

    say()
    names = (baseline.name, spoken(t("now")))
    print_comparison(compare(before, result), differences(before, result), names)
