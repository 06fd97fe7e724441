"""The commands as a person or a script uses them."""

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bundle_kit import Made, make_model
from typer.testing import CliRunner

from appliance.cli.app import app

ATOLL = Path(sys.executable).with_name("atoll")


def atoll(*arguments: object, code: int = 0) -> Any:
    """Run a command in this process; returns (stdout, stderr) after checking the exit code."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def build_arguments(model: Path, out: Path, key: Path, *more: str) -> list[object]:
    return [
        "bundle", "build", model, "--key", key, "--version", "2.0.0", "--sequence", "7", "--license", "MIT",
        "--license-file", model / "README.md", "--source-repo", "example/tiny", "--source-revision", "abc",
        "--name", "tiny", "--out", out, *more,
    ]  # fmt: skip


def test_from_key_to_verified_bundle(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", kib=1)
    pair = json.loads(atoll("keys", "new", "--name", "v", "--dir", tmp_path / "k", "--json").stdout)
    assert set(pair) == {"ok", "private_path", "public_path", "fingerprint", "words"}
    shown = atoll("keys", "fingerprint", pair["public_path"]).stdout
    assert shown.splitlines()[0].replace(" ", "") == pair["fingerprint"]
    assert " ".join(shown.split("\n", 1)[1].split()) == pair["words"]
    built = atoll(*build_arguments(model, tmp_path / "o", pair["private_path"]))
    assert f"Next: atoll bundle verify {tmp_path}/o/tiny-2.0.0 --key {pair['public_path']}" in built.stdout
    assert "Copying and hashing" in built.stderr
    bundle = tmp_path / "o/tiny-2.0.0"
    seen = atoll("bundle", "inspect", bundle)
    assert seen.stdout.startswith("NOT VERIFIED")
    assert "tiny 2.0.0 (sequence 7" in seen.stdout
    found = json.loads(atoll("bundle", "verify", bundle, "--key", pair["public_path"], "--full", "--json").stdout)
    assert found["verified"] is True
    assert found["key_fingerprint"] == pair["fingerprint"]
    assert json.loads(atoll("bundle", "inspect", bundle, "--json").stdout)["verified"] is False
    assert atoll("bundle", "verify", bundle, "--key", pair["public_path"]).stdout.startswith("VERIFIED")


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["bundle", "verify", "B", "--key", "PUB", "--min-sequence", "6"], 12, "replayed"),
        (["bundle", "verify", "B", "--key", "OTHER"], 10, "not trusted"),
        (["bundle", "verify", "B", "--key", "/nonexistent"], 13, "cannot be opened"),
        (["bundle", "verify", "/nonexistent", "--key", "PUB"], 13, "no bundle"),
        (["bundle", "inspect", "/nonexistent"], 13, "no bundle"),
        (["keys", "fingerprint", "PRIVATE"], 10, "private key"),
    ],
)
def test_refusals_in_text_and_json(arguments: list[str], code: int, words: str, pristine: Made, stranger: Any) -> None:
    names = {
        "B": pristine.path,
        "PUB": pristine.keys.public_path,
        "OTHER": stranger.public_path,
        "PRIVATE": pristine.keys.private_path,
    }
    real = [names.get(a, a) for a in arguments]
    text = atoll(*real, code=code)
    assert text.stdout == ""
    assert text.stderr.splitlines()[-2].startswith("error: ")
    assert words in text.stderr
    found = json.loads(atoll(*real, "--json", code=code).stdout)
    assert found["ok"] is False
    assert found["error"]["code"] == code
    assert words in found["error"]["message"]
    assert found["error"]["hint"]


def test_damage_has_an_exit_code_of_its_own(made: Made) -> None:
    (made.path / "model/config.json").write_text("{}")
    atoll("bundle", "verify", made.path, "--key", made.keys.public_path, code=11)


def test_trust_is_never_taken_for_granted(pristine: Made) -> None:
    atoll("bundle", "verify", pristine.path, code=2)


def test_every_command_explains_itself_with_an_example() -> None:
    for command in (
        ["bundle", "build"],
        ["bundle", "inspect"],
        ["bundle", "verify"],
        ["keys", "new"],
        ["keys", "fingerprint"],
    ):
        shown = atoll(*command, "--help").stdout
        assert f"atoll {' '.join(command)}" in shown.split("Example", 1)[1]
        assert "Exit codes" in shown


def test_inspect_of_junk_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_bytes(b"\x1b[31m{")
    result = atoll("bundle", "inspect", tmp_path, code=11)
    assert "\x1b" not in result.output


def test_passphrase_is_asked_on_a_terminal_and_bars_are_drawn(tmp_path: Path) -> None:
    """On a real terminal: the passphrase is typed, not echoed, and progress is a bar."""
    model = make_model(tmp_path / "m", kib=1)
    made = on_terminal(["keys", "new", "--dir", tmp_path / "k", "--encrypt"], "sesame\nsesame\n")
    assert "sesame" not in made
    key = tmp_path / "k/vendor.key"
    assert b"ENCRYPTED" in key.read_bytes()
    shown = on_terminal(build_arguments(model, tmp_path / "o", key), "sesame\n")
    assert "sesame" not in shown
    assert "━" in shown
    atoll("bundle", "verify", tmp_path / "o/tiny-2.0.0", "--key", tmp_path / "k/vendor.pub")


def on_terminal(arguments: list[object], typed: str) -> str:
    """Run `atoll` on a pseudo-terminal of its own, type, and return all that the terminal showed."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(ATOLL, [str(ATOLL), *map(str, arguments)])
    shown = b""
    lines = typed.splitlines(keepends=True)
    try:
        while select.select([fd], [], [], 30)[0] and (part := os.read(fd, 4096)):
            shown += part
            if lines and shown.endswith(b": "):  # the blank comes once the terminal no longer echoes
                os.write(fd, lines.pop(0).encode())
    except OSError:  # the terminal closes with its last process
        pass
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode()
    return shown.decode()


def test_interrupting_a_command_exits_130_and_leaves_nothing(pristine: Made, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", kib=60_000, shards=2)
    process = subprocess.Popen(
        [ATOLL, *map(str, build_arguments(model, tmp_path / "o", pristine.keys.private_path))],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(2)
    assert process.wait(20) == 130
    process.stderr.close()
    assert list((tmp_path / "o").iterdir()) == []
