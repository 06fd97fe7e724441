"""Presets: no combination promises what the engine's planner refuses, and every value says why in both languages."""

import json
import re
from pathlib import Path

import preset_commands
import pytest
from typer.testing import CliRunner

from appliance.cli import app as tree
from appliance.service.presets.catalogue import GpuModel, catalogue, find_card
from appliance.service.presets.resolve import find, names, resolve
from engine.plan import full_requests, plan_engine
from engine.server.settings.commands import parse_serve
from installer.base.errors import ExitCode, InstallError

ROOT = Path(__file__).resolve().parents[3]
DATA = catalogue()
SPEEDS = {  # of each card: the page and the heading under which they stand
    "h100": ("docs/performance.md", "GPU: one H100, against vLLM"),
    "h200": ("docs/performance/h200.md", "What holds today"),
}


@pytest.fixture(autouse=True)
def _as_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.settings.commands.nvidia_driver_present", lambda: True)


def run(*arguments: str):
    return CliRunner().invoke(tree.app, list(arguments))


def answer(*asked):
    try:
        return resolve(*asked)
    except InstallError as error:
        return error


@pytest.mark.parametrize("card", DATA.cards.values(), ids=lambda card: card.name)
@pytest.mark.parametrize("model", DATA.models.values(), ids=lambda model: model.name)
def test_the_engine_accepts_the_flags_of_every_preset(model, card) -> None:
    for workload in DATA.workloads.values():
        preset = answer(model, card, workload)
        if isinstance(preset, InstallError):
            assert preset.exit_code == ExitCode.PREFLIGHT_FAIL
            assert preset.hint, "the nearest that would do"
            continue
        options = parse_serve([str(model.directory), *preset.argv])
        assert options.notes == [], "nothing is accepted and ignored"
        plan = plan_engine(options.engine, card.planned)
        assert plan.max_model_len == preset.planned.context
        assert full_requests(plan, plan.max_model_len) == preset.planned.users >= 1
        assert all(choice.reason.source for choice in preset.choices)


def test_what_fits_grows_with_the_gpu() -> None:
    """From the arithmetic: 27 billion parameters in fp8 do not fit 24 GB, and do fit 48; in bf16 they need 80."""
    chat = DATA.workloads["chat"]
    with pytest.raises(InstallError, match="does not fit on NVIDIA L4"):
        resolve(DATA.models["qwen3.6-27b"], DATA.cards["l4"], chat)
    small = resolve(DATA.models["qwen3.6-27b"], DATA.cards["l40s"], chat)
    large = resolve(DATA.models["qwen3.6-27b"], DATA.cards["h200"], chat)
    assert ("--quantization", "fp8") in [(c.flag, c.value) for c in small.choices]
    assert "--quantization" not in large.argv
    assert large.planned.users > small.planned.users


@pytest.mark.parametrize("name", ["qwen3.6-122b-a10b", "qwen3.6-397b-a17b"])
def test_models_for_several_gpus_are_listed_and_refused(name: str) -> None:
    assert f"{name}/chat" in names()
    with pytest.raises(InstallError, match="several GPUs: not served yet"):
        find(f"{name}/chat", DATA.cards["b200"])


@pytest.mark.parametrize("name", preset_commands.COMMANDS)
def test_the_white_papers_presets_are_verbatim(name: str) -> None:
    assert find(f"{name}/white-paper", None).argv == preset_commands.argv(name, "m")[1:]


def measured_rows(card: str) -> str:
    """The text below the card's heading, up to the next one: no row of another card counts."""
    page, heading = SPEEDS[card]
    _, _, below = (ROOT / page).read_text("utf-8").partition(f"# {heading}\n")
    return re.split(r"^#", below, maxsplit=1, flags=re.MULTILINE)[0]


def test_measured_speeds_stand_in_the_performance_notes() -> None:
    titles = {name: model.title for name, model in DATA.models.items()}
    for name, formats in DATA.speeds.items():
        for weights, cards in formats.items():
            for card, speed in cards.items():
                rows = measured_rows(card)
                for workload, value in (("single", speed.single), ("mixed-small", speed.many)):
                    if value is not None:
                        number = re.escape(f"{value:,.1f}".removesuffix(".0"))
                        row = rf"^\| {re.escape(titles[name])} {weights} \| {workload}\b.*\b{number}\b"
                        assert re.search(row, rows, re.MULTILINE), (name, card, workload, value)


def test_a_speed_that_nobody_measured_is_marked_as_an_estimate() -> None:
    preset = find("gemma4-31b/chat", DATA.cards["l40s"])
    assert not preset.speed.measured
    assert preset.speed.single == pytest.approx(0.864e12 / 32.5e9, rel=0.02)


def test_templates_of_e_models_and_others_differ() -> None:
    assert DATA.models["gemma4-e2b"].template != DATA.models["gemma4-31b"].template


@pytest.mark.parametrize(("asked", "found"), [
    ("h100", "h100"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L40S", "l40s"), ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"), ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ("80", "a100"), ("141 GB", "h200"),
])  # fmt: skip
def test_gpus_by_the_names_that_drivers_and_people_use(asked: str, found: str) -> None:
    assert find_card(asked).name == found


@pytest.mark.parametrize("asked", ["", "L40", "A100-SXM4-40GB", "17GB", "h1000", "٨٠", "x" * 5000])
def test_an_unknown_gpu_is_refused_with_the_known_ones(asked: str) -> None:
    with pytest.raises(InstallError, match="is known") as refusal:
        find_card(asked)
    assert refusal.value.exit_code == ExitCode.USAGE
    assert "l40s" in refusal.value.hint


def test_the_command_lists_and_explains() -> None:
    listed = json.loads(run("presets", "--gpu", "h100", "--json").stdout)
    rows = {row["name"]: row for row in listed["presets"]}
    assert rows.keys() == set(names())
    assert rows["qwen3.6-27b/chat"]["fits"]
    assert not rows["qwen3.6-397b-a17b/chat"]["fits"]
    shown = json.loads(run("presets", "show", "gemma4-31b/chat", "--gpu", "h100", "--json").stdout)
    assert all(re.search("[가-힣]", flag["reason"]["ko"]) for flag in shown["flags"])
    korean = run("presets", "show", "gemma4-31b/chat", "--gpu", "h100", "--lang", "ko")
    assert "메모리" in korean.stdout


def test_the_list_is_a_table_that_fits_a_console() -> None:
    said = run("presets", "--gpu", "l4").stdout
    lines = {words[0]: words[1:] for line in said.splitlines() if (words := line.split("  "))[0]}
    assert any("×" in cell for cell in lines["gemma4-12b"])
    assert {cell.strip() for cell in lines["gemma4-31b"]} <= {"-", ""}
    assert said.count("needs several GPUs") == 2, "once for each model, not for each use"
    assert max(map(len, said.splitlines())) <= 80
    without_gpu = run("presets")
    assert re.search(r"^gemma4-31b +chat, documents, batch, single, white-paper$", without_gpu.stdout, re.MULTILINE)


@pytest.mark.parametrize(("arguments", "code"), [
    (["gemma4-31b/chat", "--gpu", "l4"], 3),
    (["gemma4-31b/poetry", "--gpu", "l4"], 2),
    (["gemma5/chat", "--gpu", "l4"], 2),
    (["gemma4-31b/chat", "--gpu", "voodoo2"], 2),
])  # fmt: skip
def test_exit_codes(arguments: list[str], code: int) -> None:
    result = run("presets", "show", *arguments)
    assert result.exit_code == code
    assert "Next: " in result.stderr


@pytest.mark.parametrize("card", DATA.cards.values(), ids=lambda card: card.name)
def test_the_figures_of_a_card_say_where_they_come_from(card: GpuModel) -> None:
    assert card.source.startswith("https://") or {"tb_per_s", "sms"} <= set(card.unchecked)
    assert card.tb_per_s is not None
    assert card.sms is not None
    assert card.gpu_class is not None
    assert card.memory_gib < card.gpu_class  # GiB below the data sheet's GB
