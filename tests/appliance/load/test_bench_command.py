"""`atoll bench`: vLLM's flags and JSON, comparisons, refusals, a full disk, TLS."""

import json
import re
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from endpoints import Endpoint, good
from forked_commands import forked

from installer.base.errors import ExitCode
from installer.tls.certificates import issue, make_ca, to_pem

# The keys that `vllm bench serve --save-result` writes (vllm/benchmarks/serve.py), for generation.
VLLM_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl")),
}  # fmt: skip
DETAILED = {"input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"}


ENVIRONMENT = {"ATOLL_LANG": "en", "COLUMNS": "200", "LC_ALL": "C.UTF-8"}


def atoll(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance", "bench", *words]
    environment = {"PATH": "/usr/bin:/bin", **ENVIRONMENT, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_a_script_for_vllm_runs_and_gets_vllms_keys(tmp_path: Path):
    with Endpoint(good(first=0.01, gap=0.002)) as endpoint:
        done = atoll(
            "serve", "--backend", "vllm", "--base_url", endpoint.url, "--model", "fake", "--dataset-name", "random",
            "--random-input-len", "50", "--random_output_len=5", "--num-prompts", "12", "--request-rate", "inf",
            "--max-concurrency", "3", "--goodput", "ttft:500", "tpot:100", "--metadata", "gpu=none", "run=1",
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--ignore-eos",
            "--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "out.json",
            "--disable-tqdm",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert {each.path for each in endpoint.requests if each.method == "POST"} == {"/v1/completions"}
    saved = json.loads((tmp_path / "out.json").read_text())
    assert not VLLM_KEYS - saved.keys()
    assert not DETAILED - saved.keys()
    assert (saved["completed"], saved["max_concurrency"], saved["gpu"]) == (12, 3, "none")
    assert saved["request_goodput"] == pytest.approx(saved["request_throughput"])
    assert [len(itls) for itls in saved["itls"]] == [4] * 12
    assert re.search(r"TTFT\)\s+[\d.]+", done.stdout)


def test_results_are_compared_also_with_vllms_own(tmp_path: Path):
    theirs = {"backend": "vllm", "model_id": "fake", "completed": 10, "failed": 0, "duration": 5.0,
              "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 4, "total_input_tokens": 1000,
              "total_output_tokens": 500,
              "request_throughput": 2.0, "request_goodput": None, "output_throughput": 100.0, "num_prompts": 10,
              "total_token_throughput": 300.0, "mean_ttft_ms": 50.0, "median_ttft_ms": 45.0, "std_ttft_ms": 3.0,
              "p99_ttft_ms": 70.0, "label": None, "date": "20260101-000000"}  # fmt: skip
    ours = theirs | {"output_throughput": 150.0, "median_ttft_ms": 60.0, "failed": 3, "max_concurrency": 8}
    for name, values in (("a", theirs), ("b", ours)):
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    done = atoll("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"tokens out/s\s+100\.00\s+150\.00\s+\+50\.0%\s+better", done.stdout)
    assert re.search(r"first token, median\s+45\.00 ms\s+60\.00 ms\s+\+33\.3%\s+worse", done.stdout)
    assert "clients: 4 and 8" in done.stdout
    assert "3 failed requests of 13" in done.stdout
    facts = json.loads(atoll("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json").stdout)
    (row,) = (row for row in facts["rows"] if row["name"] == "output_throughput")
    assert row == {"name": "output_throughput", "before": 100.0, "after": 150.0, "change": 0.5, "better": True}
    (tmp_path / "c.json").write_text("{}")
    assert atoll("compare", str(tmp_path / "a.json"), str(tmp_path / "c.json")).returncode == ExitCode.USAGE


REFUSED = [
    (["--tokenizer", "x"], "--tokenizer is refused"),
    (["--trust_remote_code"], "--trust-remote-code is refused"),
    (["--insecure"], "--ca FILE"),
    (["--api-key", "sk-secret"], "--api-key-file FILE"),
    (["--header", "Authorization=Bearer sk-secret"], "not set by hand"),
    (["--no-such-flag"], "No such option"),
    (["--backend", "tgi"], "no backend 'tgi'"),
    (["--dataset-name", "sonnet"], "no dataset 'sonnet'"),
    (["--dataset-name", "custom"], "needs a file"),
    (["--request-rate", "fast"], "not a rate"),
    (["--burstiness", "2"], "needs a --request-rate"),
    (["--goodput", "ttft"], "not a target"),
    (["--find-users"], "needs targets"),
    (["--metric-percentiles", "150"], "not a list of percentiles"),
    (["--extra-body", "[1]"], "not a JSON object"),
    (["--metadata", "x"], "cannot be saved as a note"),
    (["--profile", "/nowhere.toml"], "No such file"),
    (["--temperature", "7"], "temperature"),
    (["--api-key-file", "/nowhere"], "No such file"),
    (["--baseline", "/nowhere"], "No such file"),
    (["--profile", "chat", "--random-prefix-len", "5000"], "shared prefix"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[subprocess.CompletedProcess[str]]:
    calls = [("bench", "serve", "--base-url", "http://127.0.0.1:9", *words) for words, _ in REFUSED]
    return forked(calls, tmp_path_factory.mktemp("refusals"), "appliance.cli.bench.app", **ENVIRONMENT)


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[" ".join(words) for words, _ in REFUSED])
def test_wrong_flags_are_refused_by_name(refusals: list[subprocess.CompletedProcess[str]], number: int):
    done, (_, said) = refusals[number], REFUSED[number]
    assert done.returncode == ExitCode.USAGE, (done.stdout, done.stderr)
    assert said in done.stderr, done.stderr
    assert "sk-secret" not in done.stdout + done.stderr


def test_exit_codes_and_one_json_object(free_port):
    done = atoll("serve", "--base-url", f"http://127.0.0.1:{free_port()}", "--json")
    assert done.returncode == ExitCode.UNHEALTHY
    assert "does not answer" in json.loads(done.stdout)["error"]

    def broken(conversation):
        conversation.json({"error": {"message": "no"}}, "503 Service Unavailable")

    with Endpoint(broken) as endpoint:
        done = atoll("serve", "--base-url", endpoint.url, "--num-prompts", "3", "--json")
    assert done.returncode == ExitCode.UNHEALTHY
    assert json.loads(done.stdout)["error_kinds"] == {"http_503": 3}


def test_a_full_disk_loses_the_file_and_not_the_result():
    with Endpoint(good()) as endpoint:
        done = atoll("serve", "--base-url", endpoint.url, "--num-prompts", "3", "--result-filename", "/dev/full/x.json")
    assert done.returncode == ExitCode.IO
    assert "3 answered" in done.stdout
    assert "save the result" in done.stderr


def test_tls_with_our_authority_and_the_key_from_file_or_environment(tmp_path: Path):
    authority = make_ca(["127.0.0.1"])
    (tmp_path / "ca.crt").write_bytes(to_pem(authority.leaf))
    issued = issue(authority, ["127.0.0.1"])
    (tmp_path / "server.pem").write_bytes(issued.key_pem() + issued.chain_pem())
    (tmp_path / "key").write_text("sk-right\n")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    some = ("--num-prompts", "3", "--backend", "openai-chat")
    with Endpoint(good(), tls=context, key="sk-right") as endpoint:
        trusted = ("--base-url", endpoint.url, "--ca", str(tmp_path / "ca.crt"))
        assert atoll("serve", *trusted, *some, "--api-key-file", str(tmp_path / "key")).returncode == 0
        assert atoll("serve", *trusted, *some, OPENAI_API_KEY="sk-right").returncode == 0
        assert "refuses the API key" in atoll("serve", *trusted, *some).stderr
        untrusted = atoll("serve", "--base-url", endpoint.url, *some, OPENAI_API_KEY="sk-right")
        assert untrusted.returncode == ExitCode.UNHEALTHY
        assert "certificate" in untrusted.stderr.lower()


def test_prompts_from_files(tmp_path: Path):
    (tmp_path / "custom.jsonl").write_text('{"prompt": "one two three", "output_tokens": 7}\n\n{"prompt": "four"}\n')
    turns = [{"from": "human", "value": "how are you"}, {"from": "gpt", "value": "x" * 40}]
    (tmp_path / "share.json").write_text(json.dumps([{"conversations": turns}, {"conversations": []}]))
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "fine"}\n{"promt": 5}\n')
    with Endpoint(good()) as endpoint:
        to = ("--base-url", endpoint.url, "--num-prompts", "4")
        done = atoll("serve", *to, "--dataset-name", "custom", "--dataset-path", str(tmp_path / "custom.jsonl"),
                     "--output-len", "3")  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert sorted(each.tokens_wanted for each in endpoint.requests if each.method == "POST") == [3, 3, 7, 7]
        endpoint.requests.clear()
        assert atoll("serve", *to, "--dataset-name", "sharegpt", "--dataset-path", str(tmp_path / "share.json")
                     ).returncode == 0  # fmt: skip
        assert {each.body["prompt"] for each in endpoint.requests if each.method == "POST"} == {"how are you"}
        wrong = atoll("serve", *to, "--dataset-name", "custom", "--dataset-path", str(tmp_path / "wrong.jsonl"))
    assert wrong.returncode == ExitCode.USAGE
    assert "line 2 has no prompt" in wrong.stderr


def test_profiles_are_listed_and_printed(tmp_path: Path):
    assert "Long documents" in atoll("profiles").stdout
    assert "긴 문서" in atoll("profiles", ATOLL_LANG="ko").stdout
    (tmp_path / "mine.toml").write_text(atoll("profiles", "chat").stdout)
    assert atoll("profiles", str(tmp_path / "mine.toml")).returncode == 0
