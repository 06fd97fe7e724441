"""The answers file: what is accepted, what is refused, and in which words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from installer.base.errors import ExitCode, InstallError
from installer.decide.answers import TEMPLATE, Answers, read_answers, schema


def refused(tmp_path: Path, text: str) -> InstallError:
    path = tmp_path / "answers.toml"
    path.write_text(text)
    with pytest.raises(InstallError) as caught:
        read_answers(path)
    assert caught.value.exit_code == ExitCode.USAGE
    assert f"atoll answers validate {path}" in caught.value.hint
    return caught.value


def test_the_template_is_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.toml"
    path.write_text(TEMPLATE)
    answers = read_answers(path)
    assert answers.models[0].name == "chat"
    assert answers.accept_licenses == ["Apache-2.0@cfc7749b96f6"]
    uncommented = TEMPLATE.replace("# gpus", "gpus").replace("# allow", "allow").replace("# settings", "settings")
    path.write_text(uncommented)
    assert read_answers(path).models[0].gpus == [0]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("acept_licenses = []", "accept_licenses is"),
        ("trustkeys = []", "did you mean trust_keys?"),
        ("Port = 1", "did you mean port?"),
        ("[[models]]\nbundel = 'x'", "models[0].bundel is not known; did you mean bundle?"),
        ("[tls]\ncert = 'x'", "tls.cert is not known; did you mean certificate?"),
        ("zzzzqqq = 1", "known: schema_version, medium"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(tmp_path: Path, wrong: str, near: str) -> None:
    message = refused(tmp_path, f"schema_version = 1\n{wrong}\n").message
    assert near.replace("accept_licenses is", "did you mean accept_licenses?") in message


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("", "schema_version is missing"),
        ("schema_version = 2", "schema_version"),
        ("schema_version = 1\nport = 0", "port"),
        ("schema_version = 1\nport = '8443'", "port"),
        ("schema_version = 1\nhost = ''", "host"),
        ("schema_version = 1\ndevice = 'tpu'", "device"),
        ("schema_version = 1\nconfirm_plan = 'yes'", "confirm_plan"),
        ("schema_version = 1\nallow_downgrade = 'x'", "allow_downgrade"),
        ("schema_version = 1\n[waivers]\negress = ''", "waivers.egress"),
        ("schema_version = 1\n[[models]]\ngpus = ['0; rm']", "models[0].gpus[0]"),
        ("schema_version = 1\n[[models]]\nname = '../up'", "models[0].name"),
        ("schema_version = 1\nport = 1\nport = 2", "overwrite"),
        ("schema_version = 1\n[waivers\n", "line 2"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, wrong: str, named: str) -> None:
    assert named in refused(tmp_path, wrong).message


def test_several_faults_are_told_at_once(tmp_path: Path) -> None:
    message = refused(tmp_path, "schema_version = 1\nport = 0\nprot = 1\n").message
    assert "port:" in message
    assert "prot is not known; did you mean port?" in message


def test_a_missing_file_a_directory_and_a_huge_one(tmp_path: Path) -> None:
    huge = tmp_path / "huge.toml"
    huge.write_text("#" * (2 << 20))
    for path in (tmp_path / "none.toml", tmp_path, huge):
        with pytest.raises(InstallError) as caught:
            read_answers(path)
        assert caught.value.exit_code == ExitCode.USAGE


def test_the_schema_knows_every_key() -> None:
    assert schema()["properties"].keys() == Answers.model_fields.keys()
    assert schema()["additionalProperties"] is False


def atoll(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance.cli", "answers", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def test_the_commands(tmp_path: Path) -> None:
    path = tmp_path / "answers.toml"
    path.write_text(atoll("template").stdout)
    assert atoll("validate", str(path)).returncode == 0
    assert json.loads(atoll("validate", str(path), "--json").stdout)["valid"] is True
    assert json.loads(atoll("schema").stdout)["title"] == "Answers"
    path.write_text("schema_version = 1\nacept = 1\n")
    wrong = atoll("validate", str(path), "--json")
    assert wrong.returncode == 2
    assert "acept is not known" in json.loads(wrong.stdout)["error"]
