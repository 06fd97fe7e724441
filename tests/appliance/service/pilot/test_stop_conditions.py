"""Each stop condition of a stage, judged from samples in a real time series: it holds beyond its limit, not at it."""

from pathlib import Path
from typing import Any

import pytest

from appliance.series import Series, Store
from appliance.service.pilot.kpi import tripped
from appliance.service.pilot.plan import Stop

MODEL = 'engine="0",model_name="m"'
SAMPLES = 7
HANDLER = 'handler="/v1/chat/completions",method="POST"'


def sample(number: int, seconds: float) -> dict[str, float]:
    """Ten requests a sample, one of them with an error; all of them take `seconds`; a warm GPU and half a cache."""
    told: dict[str, float] = {
        f'http_requests_total{{{HANDLER},status="2xx"}}': 9.0 * number,
        f'http_requests_total{{{HANDLER},status="5xx"}}': 1.0 * number,
        f"vllm:kv_cache_usage_perc{{{MODEL}}}": 0.5,
        'atoll:gpu_temperature{gpu="0"}': 70.0, 'atoll:gpu_temperature{gpu="1"}': 84.0,
    }  # fmt: skip
    for name in ("time_to_first_token", "inter_token_latency"):
        for bound in (0.1, 0.5, 1.0):
            told[f'vllm:{name}_seconds_bucket{{{MODEL[:10]},le="{bound}",{MODEL[11:]}}}'] = (
                10.0 * number if seconds <= bound else 0.0)  # fmt: skip
        told[f'vllm:{name}_seconds_bucket{{{MODEL[:10]},le="+Inf",{MODEL[11:]}}}'] = 10.0 * number
        told[f"vllm:{name}_seconds_count{{{MODEL}}}"] = 10.0 * number
        told[f"vllm:{name}_seconds_sum{{{MODEL}}}"] = 10.0 * number * seconds
    return told


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("series") / "series.db"
    with Store(path) as store:
        for number in range(SAMPLES):
            store.add(1000.0 + 10 * number, sample(number, 0.4))
    return path


def stop(**limits: Any) -> Stop:
    return Stop(**{"error_rate": None, "window": 60.0, **limits})


@pytest.mark.parametrize(
    ("below", "above", "said"),
    [
        ({"error_rate": 0.1}, {"error_rate": 0.09}, "error rate 10.0%, limit 9.0%"),
        ({"ttft": 500}, {"ttft": 100}, "TTFT p95"),
        ({"itl": 500}, {"itl": 100}, "ITL p95"),
        ({"kv_usage": 0.5}, {"kv_usage": 0.49}, "KV cache 50.0% in use, limit 49.0%"),
        ({"temperature": 84}, {"temperature": 83}, "GPU at 84 °C, limit 83 °C"),
    ],
)
def test_a_condition_holds_beyond_its_limit(series: Path, below: dict, above: dict, said: str) -> None:
    with Series(series) as opened:
        window = opened.window(1000, 1060)
        assert tripped(window, stop(**below)) == []
        (why,) = tripped(window, stop(**above))
        assert said in why


def test_rates_wait_for_enough_requests(series: Path) -> None:
    with Series(series) as opened:
        window = opened.window(1000, 1060)
        assert tripped(window, stop(requests=61, error_rate=0.01, ttft=1, itl=1)) == []
        assert len(tripped(window, stop(requests=60, error_rate=0.01, ttft=1, itl=1))) == 3


def test_all_that_hold_are_told(series: Path) -> None:
    with Series(series) as opened:
        assert len(tripped(opened.window(1000, 1060), stop(error_rate=0.01, kv_usage=0.1, temperature=50))) == 3
