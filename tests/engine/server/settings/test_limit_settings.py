"""The bounds of the edge as settings: from a file or the environment, checked at the start, then in force."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from gateways import RunningServer

from engine.errors import ConfigError
from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel
from engine.server.settings.commands import parse_gateway, parse_serve
from engine.server.settings.limit_settings import FIELDS, PREFIX, described, load_limits
from engine.server.settings.values import within
from engine.setting import setting, settings_of

REPOSITORY = Path(__file__).resolve().parents[4]
Write = Callable[[str], Path]
MODEL = '[models.chat]\nmodel = "/m"\n'


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "atoll.toml"
        path.write_text(text)
        return path

    return write


def gateway(path: Path) -> Limits:
    return parse_gateway(["--config", str(path)]).limits


def other_value(name: str) -> object:
    """A value in range that is not the default."""
    field, declared = FIELDS[name]
    if isinstance(field.default, bool):
        return not field.default
    return type(field.default)(declared.at_most if field.default != declared.at_most else declared.at_least)


@pytest.mark.parametrize("name", FIELDS)
def test_every_limit_is_a_setting(name: str, file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    value = other_value(name)
    beside = "max-discarded-bytes = 2147483648\n" if name == "max_body_bytes" else ""
    for key in {name, name.replace("_", "-")}:
        path = file(f"[gateway.limits]\n{beside}{key} = {str(value).lower()}\n[serve.limits]\n{key} = 1\n{MODEL}")
        assert getattr(gateway(path), name) == value
    monkeypatch.setenv(f"{PREFIX}{name.upper()}", str(value))
    if beside:
        monkeypatch.setenv(f"{PREFIX}MAX_DISCARDED_BYTES", "2147483648")
    assert getattr(load_limits(None, "serve"), name) == value
    path = file(f"[gateway.limits]\n{name} = {str(FIELDS[name][0].default).lower()}\n{MODEL}")
    assert getattr(gateway(path), name) == value, "the environment wins"


def test_a_field_that_is_added_is_a_setting_at_once(monkeypatch: pytest.MonkeyPatch, file: Write) -> None:
    """Other bounds may come: nothing but the dataclass must know them."""
    from engine.server.settings import limit_settings as limits

    more = dataclasses.make_dataclass(
        "More", [("new_seconds", float, setting(3.0, "of something new", at_least=0.1, at_most=86_400)),
                 ("max_new_per_address", int, setting(0, "of one address", at_least=0, at_most=9))],
        bases=(Limits,), frozen=True)
    monkeypatch.setattr(limits, "Limits", more)
    monkeypatch.setattr(limits, "FIELDS", settings_of(more))
    found = load_limits(file("[gateway.limits]\nnew-seconds = 4\nmax-new-per-address = 5\n"), "gateway")
    assert (found.new_seconds, found.max_new_per_address) == (4.0, 5)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"new-seconds must be a number from 0\.1 to 86400"):
        load_limits(file("[gateway.limits]\nnew-seconds = 0\n"), "gateway")


def test_both_programs_read_their_own_table(file: Write) -> None:
    path = file('[serve]\nmodel = "/m"\nport = 1\nlimits.max-in-flight = 7\n'
                f"[gateway.limits]\nmax-in-flight = 9\n{MODEL}")
    serve = parse_serve(["--config", str(path)])
    assert (serve.limits.max_in_flight, serve.port) == (7, 1)
    assert gateway(path).max_in_flight == 9
    assert parse_serve(["/m"]).limits == Limits()


def test_the_environment_wins_and_sizes_have_units(file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(f'[gateway.limits]\nmax-in-flight = 9\nmax-body-bytes = "8M"\n{MODEL}')
    monkeypatch.setenv(f"{PREFIX}MAX_IN_FLIGHT", "5")
    monkeypatch.setenv(f"{PREFIX}ISOLATE_PREFIX_CACHE", "false")
    limits = gateway(path)
    assert (limits.max_in_flight, limits.max_body_bytes, limits.isolate_prefix_cache) == (5, 8 << 20, False)


@pytest.mark.parametrize("line, words", [
    ("max-in-flight = 0", "max-in-flight must be a whole number from 1 to"),
    ("max-in-flight = -1", "must be a whole number"),
    ("max-in-flight = true", "must be a whole number"),
    ("max-in-flight = 1.5", "must be a whole number"),
    ("max-in-flight = '5 apples'", "must be a whole number"),
    ("max-in-flight = []", "must be a whole number"),
    ("max-in-flight = {}", "must be a whole number"),
    ("body-seconds = 0", "body-seconds must be a number from 0.1 to"),
    ("body-seconds = nan", "must be a number"),
    ("body-seconds = inf", "must be a number"),
    ("body-seconds = false", "must be a number"),
    ("isolate-prefix-cache = 2", "isolate-prefix-cache must be true or false"),
    ("isolate-prefix-cache = 'perhaps'", "must be true or false"),
    ("max-inflight = 3", "there is no limit 'max_inflight'. Did you mean max-in-flight?"),
    ("anything = 3", "there is no limit 'anything'"),
    ("max-body-bytes = '128M'", "max-discarded-bytes must be at least max-body-bytes"),
    ("max-in-flight = 2\nmax_in_flight = 2", "is given twice"),
])  # fmt: skip
@pytest.mark.parametrize("program", ["gateway", "serve"])
def test_a_bad_value_is_refused_with_file_line_and_key(
    file: Write, program: str, line: str, words: str
) -> None:
    path = file(f'# first\n[serve]\nmodel = "/m"\n\n[{program}.limits]\nmax-tools = 3\n{line}\n{MODEL}')
    with pytest.raises(ConfigError) as caught:
        gateway(path) if program == "gateway" else parse_serve(["--config", str(path)])
    where = f"{path}:{8 if 'twice' in words else 7}, [{program}.limits]: "
    assert str(caught.value).startswith(where), str(caught.value)
    assert words in str(caught.value)


def test_a_bad_environment_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}MAX_TOOLS", "many")
    with pytest.raises(ConfigError, match="ATOLL_LIMITS_MAX_TOOLS: max-tools must be a whole number"):
        load_limits(None, "serve")
    monkeypatch.delenv(f"{PREFIX}MAX_TOOLS")
    monkeypatch.setenv(f"{PREFIX}MAX_TOLS", "3")
    with pytest.raises(ConfigError, match="ATOLL_LIMITS_MAX_TOLS: there is no limit 'max_tols'"):
        load_limits(None, "serve")


@pytest.mark.parametrize("text", ["[gateway]\nlimits = 3\n", "[gateway]\nlimits = [1]\n"])
def test_limits_are_a_table(file: Write, text: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.limits must be a table"):
        gateway(file(text + MODEL))


def test_every_limit_has_bounds_and_its_default_is_within() -> None:
    assert list(FIELDS) == [field.name for field in dataclasses.fields(Limits)]
    for name, (field, declared) in FIELDS.items():
        assert declared.help
        if not isinstance(field.default, bool):
            assert declared.at_least is not None
            assert declared.at_most is not None
            assert within(getattr(Limits(), name), declared), name


@pytest.mark.parametrize("command", ["gateway", "serve"])
def test_help_shows_every_limit(command: str) -> None:
    result = subprocess.run([sys.executable, "-m", "appliance.cli", command, "--help"], capture_output=True, text=True,
                            cwd=REPOSITORY, check=True)
    for name in FIELDS:
        key, default, bounds = described(name)
        assert f"  {key} = {default} # {bounds}\n" in result.stdout


@pytest.mark.parametrize("language", ["en", "ko"])
def test_the_documents_list_every_limit_with_its_default(language: str) -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| `([^`]+)` \|", (REPOSITORY / f"docs/{language}/serve.md").read_text("utf-8"),
                      re.MULTILINE)
    assert rows == [described(name)[:2] for name in FIELDS]


def test_a_start_does_not_wait_for_pydantic(file: Write) -> None:
    path = file("[serve]\nport = 0\n[serve.limits]\nmax-tools = 3\n")
    program = ("import sys; from engine.server.settings.commands import parse_serve;"
               "parse_serve(['/m', '--device', 'cpu', '--config', sys.argv[1]]);"
               "sys.exit('pydantic' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", program, str(path)], cwd=REPOSITORY, check=False).returncode == 0


def test_the_limits_of_the_file_are_in_force(tiny_engine: tuple[Path, Path], file: Write) -> None:
    socket, directory = tiny_engine
    limits = gateway(file(f"[gateway.limits]\nmax-messages = 1\nmax-body-bytes = 2000\n{MODEL}"))
    server = RunningServer({"tiny": ServedModel.load("tiny", directory, EngineClient(socket))}, limits=limits)
    try:
        server.wait_ready()
        ask = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=ask).status_code == 200
        reply = httpx.post(f"{server.url}/v1/chat/completions", json={**ask, "messages": ask["messages"] * 2})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a" * 3000}).status_code == 413
    finally:
        server.stop()
