"""Which series are kept, and their names in the file: `name{label="value",…}`, labels sorted."""

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

MOST_SERIES = 4096      # per page; a gateway has a few hundred
MOST_PAGE = 8 << 20     # bytes of a page

COUNTERS = (
    "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:prompt_tokens_cached", "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits", "vllm:num_preemptions", "vllm:request_success", "http_requests",
    "atoll:engine_steps", "atoll:engine_step_failures", "atoll:engine_restarts",
)  # fmt: skip
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
)
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "atoll:engine_up",
          "atoll:kv_pages_in_use", "atoll:kv_pages_total", "atoll:state_slots_in_use",
          "atoll:state_slots_total")  # fmt: skip
UP = "atoll:scrape_up"                        # 1 if /metrics answered; a gauge of every sample
GPU = ("atoll:gpu_temperature", "atoll:gpu_memory_used", "atoll:gpu_power")
MOST = "max:"                                 # prefix of a gauge's highest value in a coarser row, beside the mean

_TYPES = {**dict.fromkeys(COUNTERS, "counter"), **dict.fromkeys(HISTOGRAMS, "histogram"),
          **dict.fromkeys(GAUGES, "gauge")}  # fmt: skip


def parsed(page: str) -> dict[str, float]:
    """The series of one page of /metrics that are kept. Raises ValueError if it is not such a page."""
    if len(page) > MOST_PAGE:
        raise ValueError("too large")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        if _TYPES.get(family.name) != family.type:
            continue
        for sample in family.samples:
            if sample.value == sample.value and abs(sample.value) != float("inf"):
                found[key(sample.name, sample.labels)] = float(sample.value)
        if len(found) > MOST_SERIES:
            raise ValueError("too many series")
    return found


def key(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return name
    return name + "{" + ",".join(f'{label}="{_escaped(labels[label])}"' for label in sorted(labels)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def split(text: str) -> tuple[str, dict[str, str]]:
    """A key's name and labels."""
    name, brace, rest = text.partition("{")
    labels: dict[str, str] = {}
    at = 0
    while brace and at < len(rest) - 1:
        label, _, after = rest[at:].partition('="')
        at += len(label) + 2
        value, stop = "", 0
        while after[stop] != '"':
            if after[stop] == "\\":
                stop += 1
                value += "\n" if after[stop] == "n" else after[stop]
            else:
                value += after[stop]
            stop += 1
        labels[label] = value
        at += stop + 2  # the closing quote, and the comma or brace
    return name, labels


def is_counter(text: str) -> bool:
    """Whether a key only grows between two restarts: counters, and the buckets, counts and sums of histograms."""
    return text.partition("{")[0].endswith(("_total", "_bucket", "_count", "_sum"))


def spellings(name: str, *, histogram: bool = False) -> frozenset[str]:
    """Also accepts `generation_tokens` for `vllm:generation_tokens_total`, and so on."""
    ends = ("",) if histogram else ("", "_total")
    return frozenset(f"{begin}{name}{end}" for begin in ("", "vllm:", "atoll:") for end in ends)
