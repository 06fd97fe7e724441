"""What a quantisation costs, measured on a real service that quantises its model while it loads."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
for _folder in ("engine/server", "appliance/load"):
    sys.path.insert(0, str(ROOT / _folder))

from endpoints import Conversation, Endpoint, good  # noqa: E402
from gateways import RunningServer, engine_process  # noqa: E402

from appliance.load import Target  # noqa: E402
from appliance.service.findings import Finding  # noqa: E402
from appliance.service.verification import quantisation  # noqa: E402
from appliance.service.verification.api import Api  # noqa: E402
from appliance.service.verification.context import Verifying  # noqa: E402
from appliance.service.verification.plan import VerifyAnswers, with_targets  # noqa: E402
from appliance.service.verification.subject import Served, Subject  # noqa: E402
from engine.quality import REFERENCE_FILE, read_reference, write_reference  # noqa: E402
from engine.server.http.limits import Limits  # noqa: E402
from engine.server.ipc.client import EngineClient  # noqa: E402
from engine.server.openai.serving import ServedModel  # noqa: E402
from installer.base.layout import Layout  # noqa: E402

INT8 = {"device": "cpu", "quantization": "int8"}


@pytest.fixture(scope="module")
def served(smollm2_dir: Path) -> Iterator[Target]:
    """The demonstration model in int8."""
    with engine_process(smollm2_dir, "--served-model-name", "smol", "--max-model-len", "2048", "--quantization",
                        "int8") as socket:  # fmt: skip
        server = RunningServer({"smol": ServedModel.load("smol", smollm2_dir, EngineClient(socket))}, limits=Limits())
        server.wait_ready()
        yield Target(server.url)
        server.stop()


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantisation, "_TOKENS", 200)


def judged(target: Target, directory: Path | None, *, settings: dict[str, Any] = INT8, layout: Layout | None = None,
           told=None, **plan: Any) -> tuple[dict[str, Finding], Verifying]:  # fmt: skip
    model = Served("smol", "smollm2-135m-instruct", directory, settings)
    work = Verifying(Subject(target, [model], layout), VerifyAnswers.model_validate(plan), *([told] if told else []))

    async def run() -> list[Finding]:
        async with Api(target, "smol") as api:
            return await quantisation.run(work, api, model)

    return {finding.id: finding for finding in asyncio.run(run())}, work


def linked(source: Path, target: Path) -> Path:
    """A directory with the files of another, to which files can be added."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).symlink_to(path)
    return target


@pytest.fixture(scope="module")
def in_16_bits(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `atoll bench quality --save` writes of the 16-bit weights."""
    from engine.bench.quality import scores

    path = tmp_path_factory.mktemp("reference") / REFERENCE_FILE
    write_reference(path, "smol", scores(smollm2_dir, 200, device="cpu"))
    return path


@pytest.mark.timeout(300)
def test_the_installed_16_bit_weights_are_read_once_and_kept(served: Target, smollm2_dir: Path, tmp_path: Path):
    layout, steps = Layout.at(tmp_path / "prefix"), []
    layout.checklist.mkdir(parents=True)
    found, work = judged(served, smollm2_dir, layout=layout, told=lambda *step: steps.append(step))
    assert set(found) == {"perplexity-en", "perplexity-ko"}
    assert all(finding.ok for finding in found.values()), [str(finding.observed) for finding in found.values()]
    english = work.data["prediction"]["smol"]["en"]
    assert english["perplexity"] != english["reference_perplexity"]  # the service is quantised, the reference is not
    assert english["perplexity"] == pytest.approx(english["reference_perplexity"], rel=0.1)
    assert 0.85 <= english["top1_agreement"] <= 1
    labels = {label for label, _, _ in steps}
    assert {"Predicting English", "Predicting Korean", "The same in 16 bits, on the CPU"} <= labels
    [kept] = (layout.checklist / "quality").iterdir()
    assert kept.name == f"{smollm2_dir.name}.json"

    steps.clear()
    again, _ = judged(served, smollm2_dir, layout=layout, told=lambda *step: steps.append(step))
    assert "The same in 16 bits, on the CPU" not in {label for label, _, _ in steps}
    assert {id: str(finding.observed) for id, finding in again.items()} == {
        id: str(finding.observed) for id, finding in found.items()
    }


def test_scores_that_came_with_a_quantised_checkpoint_are_its_reference(
    served: Target, smollm2_dir: Path, in_16_bits: Path, tmp_path: Path
):
    bundle = linked(smollm2_dir, tmp_path / "model")
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").unlink()
    (bundle / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    found, _ = judged(served, bundle, settings={"device": "cpu"})
    assert "no scores of the 16-bit weights came" in found["quantisation"].observed
    assert "what the frequency" in found["perplexity-en"].required
    assert found["perplexity-en"].ok

    (bundle / REFERENCE_FILE).write_bytes(in_16_bits.read_bytes())
    found, _ = judged(served, bundle, settings={"device": "cpu"})
    assert set(found) == {"perplexity-en", "perplexity-ko"}
    assert "the likeliest token is the same" in found["perplexity-en"].observed


def test_a_quantisation_that_costs_too_much_blocks(served: Target, smollm2_dir: Path, in_16_bits: Path):
    targets = with_targets(VerifyAnswers().targets, ["top1_agreement=100%", "perplexity_rise=0"])
    found, _ = judged(served, smollm2_dir, quality_reference=str(in_16_bits), targets=targets.model_dump())
    assert found["perplexity-en"].blocks
    assert "milder quantisation" in found["perplexity-en"].fix


def test_a_model_that_predicts_no_better_than_frequencies_is_pointed_out(
    served: Target, smollm2_dir: Path, in_16_bits: Path
):
    score = read_reference(in_16_bits)["en"]
    assert quantisation._alone("x", "en", score).ok
    score.losses = [loss + 3 for loss in score.losses]
    damaged = quantisation._alone("x", "en", score)
    assert (damaged.ok, damaged.severity) == (False, "warn")


@pytest.mark.parametrize("content, said", [("{}", "no quality reference"), (None, "No such file")])
def test_a_reference_that_cannot_be_read_is_a_fact_of_the_report(
    served: Target, smollm2_dir: Path, tmp_path: Path, content: str | None, said: str
):
    path = tmp_path / "reference.json"
    if content is not None:
        path.write_text(content)
    found, _ = judged(served, smollm2_dir, quality_reference=str(path))
    assert said in found["quantisation"].observed


def test_a_service_in_16_bits_needs_no_reference(served: Target, smollm2_dir: Path):
    found, _ = judged(served, smollm2_dir, settings={"device": "cpu"})
    assert set(found) == {"perplexity-en", "perplexity-ko"}


def test_weights_that_do_not_fit_into_memory_are_not_read(
    served: Target, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(quantisation, "_SPARE_BYTES", psutil.virtual_memory().total)
    found, _ = judged(served, smollm2_dir)
    assert "GB are free" in found["quantisation"].observed


def test_weights_that_cannot_be_read_say_why(served: Target, smollm2_dir: Path, tmp_path: Path):
    broken = linked(smollm2_dir, tmp_path / "model")
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").write_bytes(b"\0" * 64)
    found, _ = judged(served, broken)
    assert "could not be read" in found["quantisation"].observed
    assert "safetensors" in found["quantisation"].observed


def test_a_cancelled_verification_leaves_no_process_behind(served: Target, smollm2_dir: Path):
    class CancelledError(Exception):
        pass

    def cancel(label: str, done: int, total: int) -> None:
        if label == "The same in 16 bits, on the CPU":
            assert _readers()
            raise CancelledError

    with pytest.raises(CancelledError):
        judged(served, smollm2_dir, told=cancel)
    assert not _readers()


def _readers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "engine.bench" in _command(child)]


def _command(child: psutil.Process) -> str:
    try:
        return " ".join(child.cmdline())
    except psutil.Error:  # it has ended
        return ""


def test_an_endpoint_without_log_probabilities_of_prompts_is_not_checked():
    class Without(Endpoint):
        def _respond(self, conversation: Conversation) -> None:
            conversation.json({"choices": [{"text": " a"}]})

    with Without(good()) as endpoint:
        found, _ = judged(Target(endpoint.url), None)
    assert all("no log-probabilities of prompts" in finding.observed for finding in found.values())
