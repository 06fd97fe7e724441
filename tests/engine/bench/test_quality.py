"""`atoll bench quality`: what a quantisation costs, on texts that come with Atoll."""

import argparse
import json
import math
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.bench import quality
from engine.errors import ConfigError
from engine.quality import pieces, read_reference
from engine.text.tokenizer import TextTokenizer

TOKENS = 96


def rows(model, **options):
    flags = {"quantization": None, "kv_cache_dtype": "auto", "reference": None, "device": "cpu", "tokens": TOKENS,
             "save": None, "progress": False, "json": False}  # fmt: skip
    return quality.run(argparse.Namespace(model=model, **flags | options))


@pytest.fixture(scope="module")
def in_16_bits(smollm2_dir, tmp_path_factory):
    """The rows of the 16-bit weights, and the file that a later run may compare with."""
    saved = tmp_path_factory.mktemp("quality") / "reference.json"
    return rows(smollm2_dir, save=saved), saved


def test_perplexity_is_that_of_transformers(smollm2_dir, in_16_bits):
    [english, _], _ = in_16_bits
    ids = TextTokenizer.load(smollm2_dir).encode_text(pieces("en")[0])
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    with torch.inference_mode():
        loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    assert english["tokens"] == len(ids) - 1 >= TOKENS
    assert english["perplexity"] == pytest.approx(math.exp(loss), rel=0.05)
    assert "top1_agreement" not in english


def test_a_quantised_model_is_compared_with_its_16_bit_form(smollm2_dir, in_16_bits):
    [plain, _], saved = in_16_bits
    [fine, _] = rows(smollm2_dir, quantization="int8")
    [coarse, _] = rows(smollm2_dir, quantization="int4", reference=saved)  # a file instead of the weights
    assert plain["perplexity"] == fine["reference_perplexity"] == coarse["reference_perplexity"]
    assert coarse["top1_agreement"] < fine["top1_agreement"] <= 1
    assert fine["top1_agreement"] > 0.85
    assert fine["perplexity"] == pytest.approx(fine["reference_perplexity"], rel=0.1)


def test_a_reference_of_another_tokenizer_is_refused(smollm2_dir, in_16_bits, tmp_path):
    stored = json.loads(in_16_bits[1].read_text())
    stored["texts"]["en"]["tokens"][3] += 1
    other = tmp_path / "reference.json"
    other.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="another tokenizer"):
        rows(smollm2_dir, reference=other)


def test_the_command_prints_json_and_saves_what_it_measured(smollm2_dir, tmp_path):
    saved = tmp_path / "reference.json"
    done = subprocess.run(
        [sys.executable, "-m", "appliance.cli", "bench", "quality", str(smollm2_dir), "--tokens", "32", "--save",
         str(saved), "--json"], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["bench"] for row in shown] == ["quality-en", "quality-ko"]
    assert [score.perplexity for score in read_reference(saved).values()] == pytest.approx(
        [row["perplexity"] for row in shown], rel=1e-3
    )
