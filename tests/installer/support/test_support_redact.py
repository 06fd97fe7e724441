"""What leaves the machine, piece by piece: lists of what is allowed, then patterns of secrets."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from installer.support import redact

SECRETS = [
    "sk-abcdefghijklmnopqrstuvwxyz012345", "hf_abcdefghijklmnopqrstu", "ghp_abcdefghijklmnopqrstuvwxyz",
    "AKIAABCDEFGHIJKLMNOP", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghij",
    "glpat-abcdefghijklmnopqrst",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("form", [
    "{}", "x={}", '"k": "{}"', "Authorization: Bearer {}", "  at {},", "https://user:{}@host/x",
    "curl -H 'api-key: {}'",
])
def test_tokens_go_wherever_they_stand(secret: str, form: str) -> None:
    text = redact.secrets_out(form.format(secret))
    assert secret not in text
    assert redact.looks_secret(text.encode()) is None


@pytest.mark.parametrize("text, gone", [
    ("password=hunter2hunter", "hunter2hunter"),
    ('"db_password": "p w d"', "p w d"),
    ("ATOLL_API_KEY='abc def'", "abc def"),
    ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    ("token: zzz", "zzz"),
    ("my.secret = 1a2b", "1a2b"),
    ("postgres://me:pw@db/x", "me:pw"),
    ("-----BEGIN EC PRIVATE KEY-----\nMHcCAQEE\n-----END EC PRIVATE KEY-----", "MHcCAQEE"),
    ("-----BEGIN PRIVATE KEY-----\nMHcCAQEE cut off", "MHcCAQEE"),
])
def test_named_secrets_go(text: str, gone: str) -> None:
    assert gone not in redact.secrets_out(text)


@pytest.mark.parametrize("text", [
    '"completion_tokens": 24', "max-num-batched-tokens = 8192", '"api-key-file": "/etc/atoll/api-keys.json"',
    "sha256 " + "ab" * 32, "token = null", "author: somebody", "disk-encryption task-scheduler",
    "40 tokens, first after 12 ms", "etc/atoll/credentials/server.key", '"eos_token_ids": [1, 2]',
])
def test_what_helps_stays(text: str) -> None:
    assert redact.secrets_out(text) == text


@given(st.text())
def test_any_line_is_taken_or_left_without_a_crash(text: str) -> None:
    redact.log_line(text)
    redact.secrets_out(text)
    redact.unit_file(text)
    redact.Addresses(["host.example"]).out(text)


VALUES = st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5)


@given(st.dictionaries(st.text(max_size=12), VALUES))
def test_a_json_line_keeps_only_known_fields(entry: dict) -> None:
    kept = redact.log_line(json.dumps({**entry, "prompt": "PROMPT-CANARY"}))
    assert kept is not None
    assert set(json.loads(kept)) <= {*redact.LOG_FIELDS, "traceback"}
    assert "PROMPT-CANARY" not in kept


@pytest.mark.parametrize("line", [
    "Started atoll-gateway.service - Atoll gateway.", "Stopping atoll-engine@chat.service - Atoll engine of chat...",
    "atoll-engine@chat.service: Main process exited, code=exited, status=11/n/a",
    "atoll-engine@chat.service: Failed with result 'exit-code'.",
    "atoll-gateway.service: Scheduled restart job, restart counter is at 3.",
    "2026-01-31T10:00:00 supervisor: exit status -9", '  File "/opt/atoll/x.py", line 3, in run',
])
def test_lines_of_systemd_and_frames_of_tracebacks_are_taken(line: str) -> None:
    assert redact.log_line(line) == line


@pytest.mark.parametrize("line", [
    "", "free text", "Started something else with a prompt", "    raise ValueError(prompt)", "{broken json",
    "Tell me a secret: ", "atoll-gateway.service: the client said hello", "[1, 2]",
])
def test_other_lines_are_not(line: str) -> None:
    assert redact.log_line(line) is None


def test_a_unit_file_keeps_its_rules_and_loses_its_values() -> None:
    text = redact.unit_file(
        "# a comment with PASSWORD\n[Service]\nEnvironment=TOKEN=abc \\\n  MORE=def\nExecStart=/x --key abc\n"
        "PrivateNetwork=yes\nSetCredential=a:abc\nMemoryMax=90%\nDescription=abc\nRestart=on-failure\n"
    )
    assert "abc" not in text
    assert "def" not in text
    assert "PASSWORD" not in text
    assert "PrivateNetwork=yes" in text
    assert "MemoryMax=90%" in text
    assert "ExecStart=<not shown>" in text


def test_settings_keep_known_values_only() -> None:
    found = redact.settings({
        "serve": {"port": 1, "model": "/m", "hf-token": "abc", "served-model-name": ["a", "b"], "host": {"x": "abc"}},
        "models": {"chat": {"gpus": [0], "note": "abc"}}, "a b": 1, "top": "abc",
        "gateway": {"limits": {"max-in-flight": 7, "isolate-prefix-cache": False, "note": "abc", "more": {"x": "abc"}}},
    })
    assert "abc" not in json.dumps(found)
    assert found["serve"]["port"] == 1
    hidden = {"note": redact.NOT_SHOWN, "more": redact.NOT_SHOWN}
    assert found["gateway"]["limits"] == {"max-in-flight": 7, "isolate-prefix-cache": False, **hidden}
    assert found["serve"]["served-model-name"] == ["a", "b"]
    assert found["models"]["chat"] == {"gpus": [0], "note": redact.NOT_SHOWN}


def test_addresses_get_stand_ins_that_stay_the_same() -> None:
    addresses = redact.Addresses(["llm.corp.local", "llm"])
    text = addresses.out("10.1.2.3 asks llm.corp.local, 10.1.2.3, fe80::1, 127.0.0.1 and ::1; 1.2.3 at 10:20:30")
    assert text == "<address-1> asks <host-3>, <address-1>, <address-2>, 127.0.0.1 and ::1; 1.2.3 at 10:20:30"
