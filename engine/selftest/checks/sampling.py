"""The sampling kernels compared with the CPU's sampler: they must sample the same tokens.

    greedy      the largest logit; among equal ones the lowest id
    drawn       temperature and seeded noise: the same draws as on the CPU
    filtered    top-k, top-p, min-p and all of them
    edited      bias, bans, penalties, then greedy or drawn
    masked      some rows may sample only a few tokens, as with a grammar; together with edits
    logprobs    of a step's tokens and of a prompt
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from engine.core.grammar import TokenMasks
from engine.core.params import SamplingParams
from engine.core.request import TokenLogprobs
from engine.selftest.checks.check import Check, Side
from engine.selftest.compare import Result, exact, numbers
from engine.worker.sample import Sampler, prompt_logprobs
from engine.worker.sample.device import NUM_COLUMNS, DeviceSampler, HostLogprobs

_CPU = torch.device("cpu")
_VOCAB, _LENGTH, _PROMPT, _POSITION = 20_011, 64, 4, 33
_STOPS = (0, 5)
_LOGPROB_ROUNDINGS = 2.0  # sums of exponentials in another order


def sample(side: Side, params: list[SamplingParams], *, masked: bool = False) -> list[Result]:
    """One token for each of `params`, from rows of logits with many likely tokens; log-probabilities if asked for.
    `masked`: every second row may sample only a few tokens."""
    rows = list(range(1, len(params) + 1))
    logits = side.randn(len(rows), _VOCAB) * 2
    logits[:, :30] += 6  # known tokens are likely, so that penalties have an effect
    tokens = side.randint(30, len(rows) + 1, _LENGTH)
    draw = _on_cpu if side.is_reference else partial(_on_device, side)
    ids, logprobs = draw(params, logits, rows, tokens, _masks(len(rows)) if masked else None)
    results = [exact(ids)]
    if logprobs:
        results += _packed(logprobs)
    return results


def _masks(rows: int) -> TokenMasks:
    """Every second row may sample every seventh token."""
    places = list(range(0, rows, 2))
    allowed = np.zeros((len(places), -(-_VOCAB // 32) * 32), dtype=np.uint8)
    allowed[:, 3::7] = 1
    return TokenMasks(places, np.packbits(allowed, axis=1, bitorder="little").view(np.int32))


def _on_cpu(
    params: list[SamplingParams], logits: torch.Tensor, rows: list[int], tokens: torch.Tensor, masks: TokenMasks | None
) -> tuple[torch.Tensor, list[TokenLogprobs]]:
    sampler = Sampler(len(rows) + 1, _VOCAB, _CPU)
    for row, asked in zip(rows, params, strict=True):
        sampler.add(row, asked, _seed(row), _PROMPT, _STOPS)
    found = sampler.sample(logits.cpu().clone(), rows, [_POSITION] * len(rows), tokens.cpu(), masks)
    return found.token_ids, found.logprobs.unpack() if found.logprobs is not None else []


def _on_device(
    side: Side, params: list[SamplingParams], logits: torch.Tensor, rows: list[int], tokens: torch.Tensor,
    masks: TokenMasks | None,
) -> tuple[torch.Tensor, list[TokenLogprobs]]:
    sampler = DeviceSampler(len(rows) + 1, _VOCAB, _LENGTH, side.device)
    for row, asked in zip(rows, params, strict=True):
        sampler.add(row, asked, _seed(row), _PROMPT, _STOPS)
    columns = np.zeros((NUM_COLUMNS, -(-len(rows) // 16) * 16), dtype=np.int32)
    sampler.fill(columns, rows, [_POSITION] * len(rows))
    on_device = torch.from_numpy(columns).to(side.device)
    out = torch.full((len(rows),), -7, dtype=torch.int32, device=side.device)
    plan = sampler.plan(rows, [_POSITION] * len(rows), masks)
    with side.clock():
        logprobs = sampler.sample(logits, on_device, tokens, out, plan)
    return out.cpu().long(), _unpacked(side, logprobs) if logprobs is not None else []


def of_prompt(side: Side) -> list[Result]:
    """Log-probabilities of a prompt's tokens, five alternatives each."""
    logits = side.randn(9, _VOCAB) * 3
    targets = side.randint(_VOCAB, 9).long()
    if side.is_reference:
        return _packed(prompt_logprobs(logits.cpu(), targets.cpu(), 5).unpack())
    sampler = DeviceSampler(2, _VOCAB, _LENGTH, side.device)
    with side.clock():
        found = sampler.prompt_logprobs(logits, targets, 5)
    return _packed(_unpacked(side, found))


def _unpacked(side: Side, logprobs: HostLogprobs) -> list[TokenLogprobs]:
    logprobs.begin_copy()
    with side.clock():  # waits for the copy
        pass
    return logprobs.unpack()


def _packed(entries: list[TokenLogprobs]) -> list[Result]:
    """Ids and ranks, and the values."""
    ids = [n for e in entries for n in (e.token_id, e.rank, *(token for token, _ in e.top))]
    values = [v for e in entries for v in (e.logprob, *(value for _, value in e.top))]
    return [exact(torch.tensor(ids)), numbers(torch.tensor(values), _LOGPROB_ROUNDINGS)]


def _seed(row: int) -> int:
    return row * 0x1234_5678_9ABC


def _drawn(**options) -> list[SamplingParams]:
    return [SamplingParams(temperature=t, max_tokens=100, **options) for t in (0.4, 0.8, 1.0, 1.6)]


def _check(name: str, params: list[SamplingParams], **options: bool) -> Check:
    compute: Callable[[Side], list[Result]] = partial(sample, params=params, **options)
    return Check(name, compute)


CHECKS: list[Check] = [
    _check("sampling greedy", [SamplingParams(temperature=0, max_tokens=100)] * 6),
    _check("sampling drawn", _drawn() * 2),
    _check("sampling filtered", [
        *_drawn(top_k=40), *_drawn(top_p=0.9), *_drawn(min_p=0.05), *_drawn(top_k=30, top_p=0.7, min_p=0.01),
    ]),
    _check("sampling edited", [
        *_drawn(repetition_penalty=1.4), *_drawn(frequency_penalty=0.9, presence_penalty=-0.5),
        *_drawn(logit_bias={40: 9.5, 7: -100.0, _VOCAB - 1: 8.0}, bad_token_ids=[1, 2, 3], min_tokens=60, top_p=0.8),
        SamplingParams(temperature=0, max_tokens=100, presence_penalty=1.5, logit_bias={3: 20.0}),
    ]),
    _check("sampling masked", [
        *_drawn(logprobs=3), *_drawn(top_k=30), *_drawn(frequency_penalty=0.9, logit_bias={3: 5.0, 4: 50.0}),
        SamplingParams(temperature=0, max_tokens=100),
    ], masked=True),
    _check("sampling log-probabilities", _drawn(logprobs=5)),
    Check("prompt log-probabilities", of_prompt),
]  # fmt: skip
