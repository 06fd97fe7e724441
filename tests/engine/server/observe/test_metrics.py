"""The names and numbers of /metrics: vLLM's names, closed label sets, and values that follow the requests."""

import re

import httpx
import pytest
from gateways import RunningServer
from prometheus_client.parser import text_string_to_metric_families

from engine.core.params import SamplingParams
from engine.core.request import EngineStats, FinishReason, RequestTimes, StepOutput
from engine.server.ipc.client import EngineClient
from engine.server.ipc.replicas import Replicas
from engine.server.observe.metrics import Metrics, one_two_five

VLLM_NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens",
    "vllm:generation_tokens", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions",
    "vllm:prompt_tokens_cached", "vllm:request_success", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_inference_time_seconds", "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens", "vllm:iteration_tokens_total", "vllm:request_params_n",
    "vllm:request_params_max_tokens", "http_requests", "vllm:num_requests_waiting_by_reason",
    "vllm:admission_rejections", "vllm:request_num_preemptions", "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_max_num_generation_tokens", "vllm:engine_sleep_state", "vllm:cache_config_info",
}


@pytest.fixture
def client() -> EngineClient:
    return EngineClient("/nonexistent")


@pytest.fixture
def metrics(client: EngineClient) -> Metrics:
    return Metrics({"llama": Replicas(client), "alias": Replicas(client)})


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(sample name, the label that tells samples apart) → value."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    out = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            out[sample.name, ",".join(labels.values())] = sample.value
    return out


def test_every_name_of_vllm_is_there_from_the_start(metrics: Metrics) -> None:
    families = {f.name for f in text_string_to_metric_families(metrics.render()[0].decode())}
    assert families >= VLLM_NAMES
    got = samples(metrics)
    for reason in ("stop", "length", "abort", "error"):
        assert got["vllm:request_success_total", reason] == 0


def test_a_request_is_counted_once_under_its_models_first_name(metrics: Metrics) -> None:
    tracker = metrics.track("alias", prompt_tokens=40, params=SamplingParams(max_tokens=100, n=2))
    tracker.on_output(StepOutput("r", [1], num_cached_tokens=32))
    tracker.on_output(StepOutput("r", [2, 3]))
    tracker.on_output(StepOutput("r", [4], finish_reason=FinishReason.LENGTH, times=RequestTimes(10, 11, 13, 17, 3)))
    tracker.finish(FinishReason.ABORT)  # a `finally` of the caller changes nothing
    got = samples(metrics)
    assert got["vllm:request_success_total", "length"] == 1
    assert got["vllm:request_success_total", "abort"] == 0
    assert got["vllm:time_to_first_token_seconds_count", ""] == 1
    assert got["vllm:inter_token_latency_seconds_count", ""] == 2
    assert got["vllm:request_generation_tokens_sum", ""] == 4
    assert got["vllm:request_prompt_tokens_sum", ""] == 40
    assert got["vllm:prompt_tokens_cached_total", ""] == 32
    assert got["vllm:request_prefill_kv_computed_tokens_sum", ""] == 8
    assert got["vllm:request_num_preemptions_sum", ""] == 3
    assert got["vllm:request_params_max_tokens_sum", ""] == 100
    assert got["vllm:request_queue_time_seconds_sum", ""] == 1
    assert got["vllm:request_prefill_time_seconds_sum", ""] == 2
    assert got["vllm:request_decode_time_seconds_sum", ""] == 4
    assert got["vllm:request_inference_time_seconds_sum", ""] == 6
    names = set(re.findall(r'model_name="([^"]*)"', metrics.render()[0].decode()))
    assert names == {"llama", "unknown"}, "unknown: refused before its model was known"


def test_a_stop_string_found_by_the_gateway_counts_as_stop(metrics: Metrics) -> None:
    tracker = metrics.track("llama", prompt_tokens=3, params=SamplingParams())
    tracker.on_output(StepOutput("r", [1]))
    tracker.finish("stop")
    tracker.on_output(StepOutput("r", finish_reason=FinishReason.ABORT))
    assert samples(metrics)["vllm:request_success_total", "stop"] == 1
    assert samples(metrics)["vllm:request_success_total", "abort"] == 0


def test_what_clients_send_never_becomes_a_label(metrics: Metrics) -> None:
    metrics.track('evil"\n{}', prompt_tokens=1, params=SamplingParams()).finish()
    metrics.http_request("/v1/models/{id}", "EVIL", 404, 0.1)
    text = metrics.render()[0].decode()
    assert "vil" not in text
    assert 'model_name="unknown"' in text
    assert 'http_requests_total{handler="/v1/models/{id}",method="unknown",status="4xx"} 1.0' in text


def test_gauges_and_counters_follow_the_engine(metrics: Metrics, client: EngineClient) -> None:
    before = client.stats
    client._advance(EngineStats(num_running=3, num_waiting=2, pages_total=10, pages_in_use=4, kv_usage=0.4, steps=2,
                                prompt_tokens=30, generation_tokens=10, prefix_queries=30, prefix_hits=16,
                                slots_total=8, slots_in_use=3))
    assert before is not client.stats
    got = samples(metrics)
    assert got["vllm:num_requests_running", ""] == 3
    assert got["vllm:num_requests_waiting", ""] == 2
    assert got["vllm:kv_cache_usage_perc", ""] == 0.4
    assert (got["atoll:state_slots_total", ""], got["atoll:state_slots_in_use", ""]) == (8, 3)
    assert got["vllm:prompt_tokens_total", ""] == 30
    assert got["vllm:prefix_cache_hits_total", ""] == 16
    assert got["vllm:iteration_tokens_total_count", ""] == 1
    assert got["vllm:iteration_tokens_total_sum", ""] == 20  # 40 tokens in 2 steps
    assert got["atoll:engine_up", ""] == 0


def test_buckets_of_token_counts() -> None:
    assert one_two_five(1000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert one_two_five(300)[-1] == 200


def test_refusals_and_what_waits_are_told_by_reason(metrics: Metrics, client: EngineClient) -> None:
    client.stats.num_waiting = 4
    metrics.refused("expected_wait", "alias")
    metrics.refused("key_rate")
    got = samples(metrics)
    assert got["vllm:admission_rejections_total", "expected_wait"] == 1
    assert got["vllm:admission_rejections_total", "key_rate"] == 1
    for reason in ("queue_full", "key_waiting", "quarantined", "engine_unavailable", "server_full", "key_concurrency"):
        assert got["vllm:admission_rejections_total", reason] == 0, "a series that exists at 0 can be rated"
    assert got["vllm:num_requests_waiting_by_reason", "capacity"] == 4
    assert got["vllm:num_requests_waiting_by_reason", "deferred"] == 0
    assert got["atoll:quarantined_requests", ""] == 0


def test_a_live_engine_is_awake_and_tells_its_cache(tiny_server: RunningServer) -> None:
    body = {"prompt": [[5] * 40, [5] * 40], "max_tokens": 3, "ignore_eos": True, "n": 2}
    before = samples(tiny_server.gateway.metrics).get(("vllm:request_max_num_generation_tokens_count", ""), 0)
    assert httpx.post(f"{tiny_server.url}/v1/completions", json=body, timeout=60).status_code == 200
    info, got = tiny_server.client.info, samples(tiny_server.gateway.metrics)
    assert info is not None
    assert got["vllm:cache_config_info", f"{info.page_size},{info.num_pages}"] == 1
    assert got["vllm:engine_sleep_state", "awake"] == 1
    assert got["vllm:engine_sleep_state", "discard_all"] == 0
    assert got["vllm:request_max_num_generation_tokens_count", ""] == before + 2, "one for each prompt"
    assert got["vllm:request_num_preemptions_count", ""] >= 4
