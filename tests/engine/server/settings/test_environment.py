"""Settings from the environment: the line wins over it, and it wins over the file."""

from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.server.settings.commands import parse_engine, parse_gateway, parse_serve


def test_the_line_wins_over_the_environment_and_that_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('[serve]\nmodel = "/file"\nport = 1\nmax-num-seqs = 1\nseed = 1\n')
    monkeypatch.setenv("ATOLL_SERVE_PORT", "2")
    monkeypatch.setenv("ATOLL_SERVE_MAX_NUM_SEQS", "2")
    options = parse_serve(["--config", str(path), "--port", "3"])
    assert (options.port, options.engine.max_num_seqs, options.engine.seed) == (3, 2, 1)
    assert options.engine.model == Path("/file")


def test_each_kind_of_value_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MODEL": "/m", "SERVED_MODEL_NAME": "a b", "MAX_MODEL_LEN": "32k", "GPU_MEMORY_UTILIZATION": "0.5",
        "ENABLE_PREFIX_CACHING": "false", "ENFORCE_EAGER": "1", "DTYPE": "half", "DISABLE_ACCESS_LOG": "yes",
        "ALLOWED_ORIGINS": '["https://a"]', "UDS": "/run/s", "ALLOW_PLAIN_HTTP": "off",
    }.items():
        monkeypatch.setenv(f"ATOLL_SERVE_{name}", value)
    options = parse_serve([])
    engine = options.engine
    assert (engine.model, engine.served_model_name, engine.max_model_len) == (Path("/m"), ["a", "b"], 32_000)
    assert (engine.gpu_memory_utilization, engine.enable_prefix_caching, engine.enforce_eager) == (0.5, False, True)
    assert (engine.dtype, options.access_log, options.allow_plain_http) == ("float16", False, False)
    assert (options.allowed_origins, options.uds) == (["https://a"], Path("/run/s"))


@pytest.mark.parametrize("name, value, words", [
    ("PORTT", "1", "ATOLL_SERVE_PORTT: there is no setting 'portt'"),
    ("CONFIG", "/x", "ATOLL_SERVE_CONFIG: there is no setting 'config'"),  # a file is named where it can be seen
    ("API_KEY", "sk-secret", "ATOLL_SERVE_API_KEY: there is no setting 'api-key'"),
    ("PORT", "http", "ATOLL_SERVE_PORT cannot be used: --port: invalid int value"),
    ("ENFORCE_EAGER", "perhaps", "ATOLL_SERVE_ENFORCE_EAGER must be true or false"),
    ("MAX_NUM_SEQS", "0", "--max-num-seqs must be at least 1"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"ATOLL_SERVE_{name}", value)
    with pytest.raises(ConfigError) as caught:
        parse_serve(["/m"])
    assert words in str(caught.value)
    assert "sk-secret" not in str(caught.value)


def test_programs_read_their_own_variables_and_an_engine_reads_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "atoll.toml"
    path.write_text('[models.chat]\nmodel = "/m"\n')
    monkeypatch.setenv("ATOLL_GATEWAY_PORT", "9")
    monkeypatch.setenv("ATOLL_GATEWAY_ALLOW_GROUP", "a b")
    monkeypatch.setenv("ATOLL_SERVE_PORT", "8")
    monkeypatch.setenv("ATOLL_ENGINE_SEED", "7")  # its gateway, another unit, would not see it
    gateway = parse_gateway(["--config", str(path)])
    assert (gateway.port, gateway.allow_group) == (9, ["a", "b"])
    assert parse_serve(["/m"]).port == 8
    assert parse_engine(["--model", "chat", "--config", str(path), "--uds", "/s"]).engine.seed is None
