"""A pilot's plan: the example is good, and what is wrong is named."""

import tomllib
from pathlib import Path

import pytest

from appliance.service.pilot import records
from appliance.service.pilot.plan import EXAMPLE, PilotPlan, read_plan
from installer.access import api_keys
from installer.base.errors import ExitCode, InstallError
from installer.base.layout import Layout

STAGE = 'name = "a"\nusers = ["*"]\nduration = "1h"\n'


def test_the_example_is_a_plan(tmp_path: Path):
    (tmp_path / "plan.toml").write_text(EXAMPLE)
    found = read_plan(tmp_path / "plan.toml")
    assert [stage.duration for stage in found.stages] == [86_400, 5 * 86_400, 14 * 86_400]
    assert PilotPlan.model_validate(tomllib.loads(EXAMPLE)) == found
    (tmp_path / "answers.toml").write_text(f"[pilot]\n[[pilot.stages]]\n{STAGE}")
    assert read_plan(tmp_path / "answers.toml").stages[0].duration == 3600


@pytest.mark.parametrize(("text", "said"), [
    ("", "no stage"),
    (f"[[stages]]\n{STAGE}colour = 1\n", "stages[0].colour"),
    (f"[[stages]]\n{STAGE}[[stages]]\n{STAGE}", "same name"),
    (f"[[stages]]\n{STAGE}".replace("1h", "soon"), "duration"),
    (f"[[stages]]\n{STAGE}".replace('"1h"', "-5"), "duration"),
    (f"[[stages]]\n{STAGE}".replace('"1h"', "nan"), "duration"),
    (f"[[stages]]\n{STAGE}".replace('"*"', '"everybody"'), "users"),
    (f"[[stages]]\n{STAGE}".replace('"*"', ""), "users"),
    (f"[[stages]]\n{STAGE}stop = {{ error_rate = 0.001 }}\n", "0.001"),
    (f"[[stages]]\n{STAGE}stop = {{ window = 5 }}\n", "fewer than two samples"),
    (f"[[stages]]\n{STAGE}goal = {{ share = 2.0 }}\n", "share"),
    ("stages = 1", "stages"),
    ("[[stages", "array declaration"),
])  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(InstallError) as failure:
        read_plan(tmp_path / "plan.toml")
    assert said in failure.value.message
    assert failure.value.exit_code == ExitCode.USAGE


def test_a_damaged_record_names_its_own_file_and_not_the_installer_s_repair(tmp_path: Path):
    layout = Layout.at(tmp_path)
    path = records.path_of(layout)
    path.parent.mkdir(parents=True)
    path.write_text('{"n": 1, "event": "planned", "sum": "0"}\n' * 2)
    with pytest.raises(InstallError, match="damaged at line 1, 2") as caught:
        records.read(layout)
    assert str(path) in caught.value.hint
    assert "journal repair" not in caught.value.hint


def test_keys_outside_are_held_back_and_come_back_as_they_were(tmp_path: Path):
    path = tmp_path / "keys.json"
    inside = api_keys.add(path, "inside").id
    group = api_keys.add(path, "group", group="team").id
    outside = api_keys.add(path, "outside", scopes=("serve", "priority")).id
    admin = api_keys.add(path, "operator", scopes=("admin",)).id
    before = api_keys.read(path)
    assert api_keys.admit(path, [inside, "group:team"]) == 1
    scopes = {entry["id"]: entry["scopes"] for entry in api_keys.read(path)}
    assert scopes == {inside: ["serve", "metrics"], group: ["serve", "metrics"], outside: ["priority"],
                      admin: ["admin"]}  # fmt: skip
    assert api_keys.admit(path, [inside, "group:team"]) == 0
    assert api_keys.admit(path, []) == 2
    assert api_keys.admit(path, None) == 3
    assert api_keys.read(path) == before
