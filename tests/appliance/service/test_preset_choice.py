"""The preset of a model on the medium: chosen by its shape, for a GPU, without touching what the operator wrote."""

import json
from typing import Any

import pytest
from checklist_kit import Desk

from appliance.service import answers as answers_of
from appliance.service.checklist import options_of
from appliance.service.facts import GpuFact, Survey
from appliance.service.presets.answers import PresetAnswers
from appliance.service.presets.catalogue import catalogue, find_card
from appliance.service.presets.choose import choose, known_model
from appliance.service.steps import install
from appliance.service.steps.base import StepJob
from installer.base.errors import InstallError
from installer.decide.frontend import Unattended
from installer.operate.install import Installer

H100 = find_card("h100")


def config_of(name: str) -> dict[str, Any]:
    return json.loads((catalogue().models[name].directory / "config.json").read_text())


@pytest.mark.parametrize("name", catalogue().models)
def test_a_model_is_known_by_its_shape(name: str) -> None:
    found = known_model(config_of(name))
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("config", [None, [], {}, {"hidden_size": "4096"}, {"text_config": 3}, {"hidden_size": 8}])
def test_what_is_no_known_shape_gets_no_preset(config: Any) -> None:
    chosen = choose("m", config, H100, PresetAnswers(), {}, {})
    assert (chosen.settings, chosen.preset) == ({}, None)
    assert chosen.finding.ok


def test_an_operators_values_stay_and_an_earlier_presets_give_way() -> None:
    config, answers = config_of("qwen3.6-27b"), PresetAnswers(workload="chat")
    first = choose("m", config, H100, answers, {}, {})
    assert first.settings["max-model-len"] == first.preset.planned.context  # type: ignore[union-attr]
    assert first.settings["dtype"] == "bfloat16"
    own = {**first.settings, "max-num-seqs": 7}
    other = choose("m", config, H100, PresetAnswers(workload="documents"), own, first.settings)
    assert other.kept == ("max-num-seqs",)
    assert "max-num-seqs" not in other.settings
    assert other.settings["max-model-len"] != first.settings["max-model-len"]
    assert "max-num-seqs" in other.finding.observed


def test_what_does_not_fit_says_what_would() -> None:
    chosen = choose("m", config_of("gemma4-31b"), find_card("24"), PresetAnswers(), {}, {})
    assert (chosen.finding.severity, chosen.finding.ok, chosen.settings) == ("warn", False, {})
    assert "or larger" in chosen.finding.fix


def test_unknown_uses_and_presets_are_errors_that_name_the_known_ones() -> None:
    with pytest.raises(InstallError, match="workload") as caught:
        choose("m", config_of("gemma4-31b"), H100, PresetAnswers(workload="chatt"), {}, {})
    assert "chat" in caught.value.hint
    with pytest.raises(InstallError, match="nonsense"):
        choose("m", config_of("gemma4-31b"), H100, PresetAnswers(names={"m": "gemma4-31b/nonsense"}), {}, {})


def test_the_installed_settings_are_the_presets(desk: Desk) -> None:
    """With a GPU that this machine need not have: what the install would write, from the real survey of a bundle."""
    said = desk.answers(preset={"names": {"tiny": "gemma4-e2b/chat"}}, device=None)
    answers = answers_of.from_json(said)
    options = options_of(answers, desk.layout)
    survey = Survey(desk.layout, options)
    gpu = GpuFact(index=0, uuid="GPU-1", name="NVIDIA H100 80GB HBM3", memory_bytes=85_017_493_504,
                  compute_capability="9.0")  # fmt: skip
    survey.facts = survey.facts.model_copy(
        update={"machine": survey.facts.machine.model_copy(update={"gpus": (gpu,)})}
    )
    job = StepJob(desk.layout, survey, answers, survey.options, {}, {}, None, lambda **_: None)  # type: ignore[arg-type]
    presets = install._presets(job)
    install._apply(job, presets)
    assert presets["tiny"].preset is not None
    [model] = Installer(job.options, Unattended(), layout=desk.layout).survey().models
    assert model.choice.settings == presets["tiny"].settings
    assert model.choice.settings["max-model-len"] == presets["tiny"].preset.planned.context


def test_without_a_gpu_the_checklist_says_so(desk: Desk) -> None:
    desk.scripted("good")
    desk.run("gpu")
    desk.run("model")
    desk.run("install")
    [step] = [step for step in desk.show().steps if step.id == "install"]
    [found] = [finding for finding in step.findings if finding.id == "preset"]
    assert "computes on the CPU" in found.observed
    assert step.summary["presets"] == {"tiny": {"name": None, "settings": {}}}
