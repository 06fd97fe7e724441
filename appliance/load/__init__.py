"""Realistic load on any OpenAI endpoint, and its measured result.

    profile.py      what requests look like and when they come        lengths.py, prompts.py, datasets.py
    generator.py    run_load: the load itself                         senders.py, openai_stream.py, http_client.py
    result.py       numbers, in the names of `vllm bench serve`       statistics.py, slo.py, compare.py
    users.py        how many users a service level allows

The names below load their module, and NumPy, when they are first used: a dry run from a medium has no NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from appliance.load.generator import LoadInterrupted, Progress, run_load
    from appliance.load.profile import TrafficProfile, built_in, find_profile
    from appliance.load.result import LoadResult
    from appliance.load.slo import Slo, parse_slo
    from appliance.load.target import Target, read_key

_HOMES = {
    "LoadInterrupted": "generator", "Progress": "generator", "run_load": "generator",
    "TrafficProfile": "profile", "built_in": "profile", "find_profile": "profile",
    "LoadResult": "result", "Slo": "slo", "parse_slo": "slo", "Target": "target", "read_key": "target",
}  # fmt: skip

__all__ = [
    "LoadInterrupted", "LoadResult", "Progress", "Slo", "Target", "TrafficProfile", "built_in", "find_profile",
    "parse_slo", "read_key", "run_load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
