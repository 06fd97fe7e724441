"""The cost calculator: sums that can be done by hand, and words for what cannot be used."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.cli.app import app
from appliance.load.result import LoadResult
from appliance.service.planning import cost
from installer.base.errors import ExitCode, InstallError

PLAIN = {"gpu_price": 8760, "server_price": 0, "gpus_per_server": 1, "years": 1, "power_price": 0, "hosting": 0,
         "staff_hours": 0, "requests_per_day": 86_400, "tokens_per_request": 100, "peak_factor": 3, "utilisation": 0.5,
         "reserve_gpus": 2}  # fmt: skip


def load(speed: float) -> LoadResult:
    return LoadResult(output_throughput=speed, completed=10)


def test_average_peaks_and_reserve_are_apart_and_add_up():
    """One GPU costs 1 an hour. 100 tokens a second on average, 50 a second from each GPU."""
    found = cost.cost(cost.assumed(PLAIN), load(100))
    assert found["gpus"] == {"average": 2, "peaks": 4, "reserve": 2}
    assert found["total_per_month"] == pytest.approx(8 * 730)
    assert sum(found["per_month"].values()) == pytest.approx(found["total_per_month"])
    assert found["per_request"] == pytest.approx(8 / 3600)
    assert found["per_million_tokens"] == pytest.approx(8 / 360_000 * 1e6)


def test_the_multiplier_is_the_measured_one():
    found = cost.cost(cost.assumed(PLAIN), load(100), load(10))
    assert found["multiplier"] == 10
    assert found["baseline"]["gpus"] == {"average": 20, "peaks": 40, "reserve": 2}


def test_power_counts_the_room():
    hourly = cost.per_hour(cost.assumed({"gpu_power": 1000, "server_power": 0, "pue": 1.5, "power_price": 0.2}), 2)
    assert hourly["power"] == pytest.approx(2 * 1.5 * 0.2)


@pytest.mark.parametrize("change", [{"power_prise": 1}, {"years": 0}, {"pue": float("nan")}, {"utilisation": 2},
                                    {"gpu_price": "much"}, {"gpu_price": True}])  # fmt: skip
def test_an_assumption_that_makes_no_sense_is_named(change: dict):
    with pytest.raises(InstallError) as failure:
        cost.assumed(change)
    assert failure.value.exit_code == ExitCode.USAGE
    assert next(iter(change)) in failure.value.message


def test_the_command_shows_every_assumption_and_who_set_it(tmp_path: Path):
    (tmp_path / "load.json").write_text(json.dumps(load(1000).to_json()))
    (tmp_path / "prices.toml").write_text("[cost]\npower_price = 0.3\n")
    done = CliRunner().invoke(app, ["cost", "--load", str(tmp_path / "load.json"), "--file",
                                    str(tmp_path / "prices.toml"), "--set", "gpu_price=1", "--json"])  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    listed = {each["name"]: each for each in found["assumptions"]}
    assert listed.keys() == cost.BY_NAME.keys()
    assert (listed["power_price"]["value"], listed["power_price"]["source"]) == (0.3, "set by you")
    assert all(each["source"] for each in listed.values())
    assert found["per_request"] > 0


@pytest.mark.parametrize("flags", [[], ["--set", "x"], ["--set", "nothing=1"], ["--load", "/nowhere"],
                                   ["--file", "/nowhere", "--assumptions"]])  # fmt: skip
def test_wrong_flags_leave_with_2(flags: list[str]):
    assert CliRunner().invoke(app, ["cost", *flags]).exit_code == ExitCode.USAGE
