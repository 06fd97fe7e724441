"""Masks of grammars in the GPU's sampler against the CPU's, in Triton's interpreter."""

import random

import numpy as np
import pytest
import torch
from test_triton_sampling import CPU, LENGTH, PROMPT_LEN, STOPS, VOCAB, assert_same, known, make_logits

from engine.core.grammar import TokenMasks
from engine.core.params import SamplingParams
from engine.worker.sample import Sampler
from engine.worker.sample.device import NUM_COLUMNS, DeviceSampler


def masks(allowed: dict[int, list[int]], vocab: int = VOCAB) -> TokenMasks:
    """{place: tokens}"""
    words = np.zeros((len(allowed), -(-vocab // 32)), dtype=np.int32)
    for row, tokens in zip(words, allowed.values(), strict=True):
        for token in tokens:
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
    return TokenMasks(list(allowed), words)


def both(params: list[SamplingParams], logits: torch.Tensor, mask: TokenMasks, vocab: int = VOCAB) -> list[int]:
    """The tokens of both samplers, which must be equal; -1 for a row with none."""
    rows, tokens = list(range(1, len(params) + 1)), known(len(params) + 1, vocab=vocab)
    cpu, device = Sampler(len(rows) + 1, vocab, CPU), DeviceSampler(len(rows) + 1, vocab, LENGTH, CPU, block=256)
    for row, asked in zip(rows, params, strict=True):
        for sampler in (cpu, device):
            sampler.add(row, asked, row * 0x1234_5678_9ABC, PROMPT_LEN, STOPS)
    positions = [20] * len(rows)
    want = cpu.sample(logits.clone(), rows, positions, tokens, mask)
    columns = np.zeros((NUM_COLUMNS, len(rows) + 3), dtype=np.int32)
    device.fill(columns, rows, positions)
    out, before = torch.full((len(rows),), -7, dtype=torch.int32), logits.clone()
    logprobs = device.sample(
        logits, torch.from_numpy(columns), tokens.clone(), out, device.plan(rows, positions, mask))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the logits stay as they are"
    assert out.tolist() == [-1 if i in want.bad_rows else t for i, t in enumerate(want.token_ids.tolist())]
    if want.logprobs is not None and logprobs is not None:
        logprobs.begin_copy()
        mine = dict(zip(logprobs.rows, logprobs.unpack(), strict=True))
        for row, entry in zip(want.logprobs.rows.tolist(), want.logprobs.unpack(), strict=True):
            assert_same(mine[row], entry)
    return out.tolist()


@pytest.mark.parametrize("vocab", [1003, 1024, 33])
def test_a_masked_row_samples_what_is_allowed_and_others_what_they_would(vocab: int) -> None:
    luck, n = random.Random(vocab), 20  # more rows than one chunk of uploads holds in a line
    allowed = {i: luck.sample(range(vocab), luck.choice([1, 2, 9])) for i in range(n) if i % 3}
    params = [luck.choice([
        SamplingParams(temperature=0), SamplingParams(temperature=1.5), SamplingParams(top_k=3),
        SamplingParams(top_p=0.5, logit_bias={1: 50.0}), SamplingParams(frequency_penalty=1.0),
        SamplingParams(logprobs=2),
    ]) for _ in range(n)]
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(n, vocab, generator=g) * 3
    got = both(params, logits, masks(allowed, vocab), vocab)
    for place, tokens in allowed.items():
        assert got[place] in tokens
    free = both(params, logits, masks({1: list(range(vocab))}, vocab), vocab)
    assert [got[i] for i in range(n) if i % 3 == 0] == [free[i] for i in range(n) if i % 3 == 0]


def test_a_forced_token_is_taken_however_unlikely() -> None:
    logits = make_logits(3)
    logits[:, 700] = -1e4
    assert both([SamplingParams(temperature=t) for t in (0.0, 1.0, 3.0)], logits, masks({i: [700] for i in range(3)})) \
        == [700] * 3


def test_a_row_that_may_sample_nothing_is_bad_and_alone_in_it() -> None:
    params = [SamplingParams(temperature=0)] * 3
    logits = make_logits(3)
    assert both(params, logits, masks({1: []}))[1] == -1
    logits[0, 5] = float("nan")
    assert both(params, logits, masks({0: [7], 2: [9]}))[::2] == [-1, 9]
    banned = [SamplingParams(temperature=0, bad_token_ids=[4])] * 3
    assert both(banned, make_logits(3), masks({0: [4], 1: [4, 6]}))[:2] == [-1, 6]
