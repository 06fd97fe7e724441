"""Load like real traffic on any OpenAI endpoint, and what it came to.

    profile.py      what requests look like and when they come        lengths.py, prompts.py, datasets.py
    generator.py    run_load: the load itself                         senders.py, openai_stream.py, http_client.py
    result.py       numbers, in the names of `vllm bench serve`       statistics.py, slo.py, compare.py
    users.py        how many users a service level allows
"""

from appliance.load.generator import LoadInterrupted, Progress, run_load
from appliance.load.profile import TrafficProfile, built_in, find_profile
from appliance.load.result import LoadResult
from appliance.load.slo import Slo, parse_slo
from appliance.load.target import Target, read_key

__all__ = [
    "LoadInterrupted", "LoadResult", "Progress", "Slo", "Target", "TrafficProfile", "built_in", "find_profile",
    "parse_slo", "read_key", "run_load",
]  # fmt: skip
