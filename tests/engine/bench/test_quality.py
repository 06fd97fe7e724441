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
from engine.text.tokenizer import TextTokenizer

TOKENS = 96


def rows(model, **options):
    flags = {"quantization": None, "kv_cache_dtype": "auto", "reference": None, "device": "cpu", "tokens": TOKENS}
    return quality.run(argparse.Namespace(model=model, **flags | options))


def test_texts_come_with_the_package_in_both_languages():
    english, korean = map(quality.text, quality.LANGUAGES)
    assert min(len(english.encode()), len(korean.encode())) > 20_000
    assert sum("가" <= letter <= "힣" for letter in korean) > len(korean) / 3
    assert not any("가" <= letter <= "힣" for letter in english)


def test_perplexity_is_that_of_transformers(smollm2_dir):
    [english, _] = rows(smollm2_dir)
    ids = TextTokenizer.load(smollm2_dir).encode_text(quality.text("en"))[:TOKENS]
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    with torch.inference_mode():
        loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    assert english["tokens"] == TOKENS - 1
    assert english["perplexity"] == pytest.approx(math.exp(loss), rel=0.05)
    assert "top1_agreement" not in english


def test_a_quantised_model_is_compared_with_its_16_bit_form(smollm2_dir):
    [fine, _], [coarse, _] = rows(smollm2_dir, quantization="int8"), rows(smollm2_dir, quantization="int4")
    assert fine["reference_perplexity"] == coarse["reference_perplexity"]
    assert coarse["top1_agreement"] < fine["top1_agreement"] <= 1
    assert fine["top1_agreement"] > 0.85
    assert fine["perplexity"] == pytest.approx(fine["reference_perplexity"], rel=0.1)


def test_the_command_prints_json(smollm2_dir):
    done = subprocess.run(
        [sys.executable, "-m", "appliance.cli", "bench", "quality", str(smollm2_dir), "--tokens", "32", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["bench"] for line in done.stdout.splitlines()] == ["quality-en", "quality-ko"]
