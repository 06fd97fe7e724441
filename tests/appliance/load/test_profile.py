"""Traffic profiles: the built-in ones, an operator's own files, and mistakes in them."""

import json
import random

import pytest

from appliance.load.lengths import Lengths
from appliance.load.profile import BUILT_IN, TrafficProfile, built_in, find_profile, read_profile, text_of
from appliance.load.prompts import WordCost, measured_cost, requests
from appliance.service.presets.catalogue import catalogue
from installer.base.errors import ExitCode, InstallError

GOOD = """
input = [{ tokens = [100, 200], weight = 3 }, { tokens = 4000 }]
output = 50
[arrival]
rate = 2.5
burstiness = 0.5
max_concurrency = 16
[prefix]
tokens = 80
groups = 4
share = 0.5
[sampling]
temperature = 0.2
"""


def test_the_built_in_profiles_are_those_of_the_presets_workloads():
    assert set(BUILT_IN) == set(catalogue().workloads)
    for name in BUILT_IN:
        profile, workload = built_in(name), catalogue().workloads[name]
        assert profile.arrival.clients == workload.users
        assert profile.title is not None
        assert profile.title.ko == workload.title.ko
        assert profile.longest <= max(workload.contexts)


def test_a_printed_profile_reads_back_the_same(tmp_path):
    for name in BUILT_IN:
        path = tmp_path / f"{name}.toml"
        path.write_text(text_of(built_in(name)))
        assert read_profile(path) == built_in(name)


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "office hours.toml"
    path.write_text(GOOD)
    profile = find_profile(str(path))
    assert profile.name == "office-hours"
    assert profile.arrival.rate == 2.5
    drawn = [profile.input.draw(random.Random(seed)) for seed in range(2000)]
    assert 0.2 < sum(length == 4000 for length in drawn) / 2000 < 0.3
    assert all(100 <= length <= 200 or length == 4000 for length in drawn)


@pytest.mark.parametrize(
    "change, said",
    [
        (("rate = 2.5", "rate = 2.5\nclients = 3"), "clients (a closed loop) or rate"),
        (("rate = 2.5\nburstiness = 0.5\nmax_concurrency = 16", ""), "clients (a closed loop) or rate"),
        (("rate = 2.5", "rate = -1"), "arrival.rate"),
        (("output = 50", "output = 0"), "shorter to the longer"),
        (("output = 50", "output = [90, 20]"), "shorter to the longer"),
        (("output = 50", "output = true"), "written 128 or [64, 512]"),
        (("output = 50", 'output = "many"'), "written 128 or [64, 512]"),
        (("output = 50", "output = []"), "written 128 or [64, 512]"),
        (("output = 50", "output = 99999999"), "more than"),
        (("weight = 3", "weight = 0"), "above 0"),
        (("weight = 3", "wieght = 3"), "each entry of a mix"),
        (("tokens = 80", "tokens = 800"), "more than the shortest input"),
        (("temperature = 0.2", "temperature = 9"), "sampling.temperature"),
        (("[sampling]", "[samplign]"), "did you mean sampling"),
        (("share = 0.5", "share = nan"), "prefix.share"),
        (("output = 50", ""), "output is missing"),
        (("output = 50", "output = = 50"), ""),
    ],
)  # fmt: skip
def test_nonsense_is_named(tmp_path, change, said):
    path = tmp_path / "wrong.toml"
    assert change[0] in GOOD
    path.write_text(GOOD.replace(*change))
    with pytest.raises(InstallError) as failure:
        read_profile(path)
    assert failure.value.exit_code == ExitCode.USAGE
    assert said in failure.value.message, failure.value.message


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * (2 << 20), b"[" * 100000])
def test_files_that_are_no_profile(tmp_path, content):
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    with pytest.raises(InstallError, match="cannot be used"):
        read_profile(path)
    with pytest.raises(InstallError, match="no built-in profile"):
        find_profile("nothing")


def test_lengths_are_fitted_to_a_short_context_in_proportion():
    profile = built_in("documents").fitted(2048)
    assert profile.longest <= 2048 - 256
    before = built_in("documents")
    ratio = before.input.longest / before.output.longest
    assert profile.input.longest / profile.output.longest == pytest.approx(ratio, rel=0.05)
    assert built_in("chat").fitted(131072) == built_in("chat")
    assert built_in("chat").fitted(64).prefix is not None


def test_requests_repeat_their_lengths_but_not_their_words():
    profile = built_in("chat")
    cost = WordCost(base=20, per_word=1.25)

    def some(run):
        source = requests(profile, cost, run)
        return [next(source) for _ in range(20)]

    one, two = some("a"), some("b")
    texts = [[r.content["messages"][0]["content"] for r in each] for each in (one, two)]
    assert [r.tokens_out for r in one] == [r.tokens_out for r in two]
    assert [len(x.split()) for x in texts[0]] == [len(x.split()) for x in texts[1]]
    assert not set(texts[0]) & set(texts[1])       # the server's prefix cache must not know them from the first run
    prefix_words = round(256 / 1.25)
    assert len({tuple(text.split()[:prefix_words]) for text in texts[0]}) == 1
    assert len({tuple(text.split()[: prefix_words + 5]) for text in texts[0]}) > 10
    assert texts[0] == [r.content["messages"][0]["content"] for r in some("a")]


def test_what_a_word_costs_is_computed_from_two_prompts():
    cost = measured_cost((16, 52), (96, 172))
    assert cost == WordCost(base=28.0, per_word=1.5)
    assert cost.words(178) == 100
    assert measured_cost((16, 0), (96, 0)) == WordCost()  # an endpoint that counts nothing


def test_profiles_travel_as_json():
    for name in BUILT_IN:
        values = json.loads(json.dumps(built_in(name).model_dump(mode="json")))
        assert TrafficProfile.model_validate(values) == built_in(name)
    assert Lengths.of([{"tokens": 5, "weight": 2}]) == Lengths.of([{"tokens": [5, 5], "weight": 2.0}])
