"""The flags of `atoll bench serve`, one type each."""

from pathlib import Path
from typing import Annotated

import typer

Backend = Annotated[
    str | None,
    typer.Option(
        "--backend", metavar="NAME",
        help="openai or vllm (/v1/completions), openai-chat, or transformers: a baseline that runs here.",
    ),
]
BaseUrl = Annotated[str | None, typer.Option("--base-url", metavar="URL", help="The endpoint, as https://llm:8443.")]
Host = Annotated[str | None, typer.Option("--host", metavar="HOST", help="Its host, without --base-url (127.0.0.1).")]
Port = Annotated[int | None, typer.Option("--port", metavar="N", min=1, max=65535, help="Its port (8000).")]
Endpoint = Annotated[str | None, typer.Option("--endpoint", metavar="PATH", help="Path, if not the usual one.")]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Name of the model (the first that is served)."),
]
ServedModelName = Annotated[
    str | None,
    typer.Option("--served-model-name", metavar="NAME", help="Its name in the API, if it differs."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help="File that holds the API key ($OPENAI_API_KEY)."),
]
Ca = Annotated[Path | None, typer.Option("--ca", metavar="FILE", help="Certificate authority of the endpoint, PEM.")]
Header = Annotated[list[str] | None, typer.Option("--header", metavar="KEY=VALUE", help="Further headers.")]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile", metavar="NAME|FILE",
        help="Traffic profile: chat, documents, batch, single, or a file. Flags below change it.",
    ),
]
DatasetName = Annotated[
    str | None,
    typer.Option("--dataset-name", metavar="NAME", help="random (made here), sharegpt or custom (from a file)."),
]
DatasetPath = Annotated[Path | None, typer.Option("--dataset-path", metavar="FILE", help="The file of prompts.")]
InputLen = Annotated[
    int | None,
    typer.Option("--input-len", "--random-input-len", metavar="TOKENS", min=1, help="Tokens of a prompt (1024)."),
]
OutputLen = Annotated[
    int | None,
    typer.Option(
        "--output-len", "--random-output-len", "--sharegpt-output-len", "--custom-output-len", metavar="TOKENS", min=1,
        help="Tokens of an answer (128).",
    ),
]
RangeRatio = Annotated[
    float | None,
    typer.Option(
        "--random-range-ratio", metavar="R", min=0.0, max=0.99,
        help="Share by which lengths vary, up and down (0).",
    ),
]
PrefixLen = Annotated[
    int | None,
    typer.Option(
        "--random-prefix-len", metavar="TOKENS", min=0,
        help="Tokens of a prefix that all prompts share (0).",
    ),
]
NumPrompts = Annotated[int | None, typer.Option("--num-prompts", metavar="N", min=1, help="Requests (1000).")]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", metavar="S", min=0.1, help="Run for this time instead of a number of requests."),
]
NumWarmups = Annotated[
    int | None,
    typer.Option("--num-warmups", metavar="N", min=0, help="Requests before the clock starts (0)."),
]
RequestRate = Annotated[
    str | None,
    typer.Option(
        "--request-rate", metavar="RATE",
        help="Requests a second, or inf: as fast as --max-concurrency allows (inf).",
    ),
]
Burstiness = Annotated[
    float | None,
    typer.Option("--burstiness", metavar="B", help="1: Poisson; below: burstier; above: more even (1)."),
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option("--max-concurrency", metavar="N", min=1, help="Most requests at once."),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option("--ignore-eos/--no-ignore-eos", help="Answers always have their full length."),
]
Temperature = Annotated[float | None, typer.Option("--temperature", help="Sampling parameter, sent along.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Sampling parameter, sent along.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Sampling parameter, sent along.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Sampling parameter, sent along.")]
FrequencyPenalty = Annotated[float | None, typer.Option("--frequency-penalty", help="Sampling parameter, sent along.")]
PresencePenalty = Annotated[float | None, typer.Option("--presence-penalty", help="Sampling parameter, sent along.")]
RepetitionPenalty = Annotated[float | None, typer.Option("--repetition-penalty", help="Sampling parameter, sent "
                                                                                      "along.")]
ExtraBody = Annotated[str | None, typer.Option("--extra-body", metavar="JSON", help="Additional fields for every "
                                                                                    "request.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", min=0, help="Seed of lengths and arrivals (0).")]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        "--goodput", metavar="NAME:MS",
        help="Targets of each request: ttft, tpot, itl, e2el, in milliseconds.",
    ),
]
FindUsers = Annotated[bool, typer.Option("--find-users", help="Find how many users the --goodput targets allow.")]
PercentileMetrics = Annotated[
    str | None,
    typer.Option("--percentile-metrics", metavar="LIST", help="Accepted: all of ttft,tpot,itl,e2el are reported."),
]
MetricPercentiles = Annotated[str, typer.Option("--metric-percentiles", metavar="LIST", help="Percentiles to report.")]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size", metavar="N", min=1, max=1024,
        help="With --backend transformers: requests in one static batch.",
    ),
]
SaveResult = Annotated[bool, typer.Option("--save-result", help="Save the result as JSON.")]
SaveDetailed = Annotated[bool, typer.Option("--save-detailed", help="Save each request too.")]
AppendResult = Annotated[bool, typer.Option("--append-result", help="Append to the file as another line.")]
ResultDir = Annotated[Path | None, typer.Option("--result-dir", metavar="DIR", help="Where to save (here).")]
ResultFilename = Annotated[Path | None, typer.Option("--result-filename", metavar="FILE", help="Name of the file.")]
Label = Annotated[str | None, typer.Option("--label", metavar="NAME", help="Prefix of the file's name.")]
Metadata = Annotated[list[str] | None, typer.Option("--metadata", metavar="KEY=VALUE", help="Notes to save with it.")]
Baseline = Annotated[Path | None, typer.Option("--baseline", metavar="FILE", help="Compare with this saved result.")]
DisableTqdm = Annotated[bool, typer.Option("--disable-tqdm", "--quiet", "-q", help="Show no progress.")]
