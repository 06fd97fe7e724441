"""The GPU's sampler against the CPU's, in Triton's interpreter."""

import math
import os
import random

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from engine.core.params import SamplingParams
from engine.core.request import TokenLogprobs
from engine.worker.sample import Sampler, prompt_logprobs
from engine.worker.sample.device import NUM_COLUMNS, DeviceSampler, HostLogprobs

CPU = torch.device("cpu")
VOCAB, LENGTH, PROMPT_LEN = 1003, 64, 4
STOPS = (0, 5)


def known(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (rows, LENGTH), dtype=torch.int32, generator=g)


class Both:
    """The two samplers with `params[i]` in row i + 1, seed i."""

    def __init__(self, params: list[SamplingParams], *, block: int = 256, vocab: int = VOCAB) -> None:
        rows = len(params) + 1
        self.cpu = Sampler(rows, vocab, CPU)
        self.device = DeviceSampler(rows, vocab, LENGTH, CPU, block=block)
        for i, p in enumerate(params):
            self.cpu.add(i + 1, p, i * 0x1234_5678_9ABC, PROMPT_LEN, STOPS)
            self.device.add(i + 1, p, i * 0x1234_5678_9ABC, PROMPT_LEN, STOPS)

    def run_device(
        self, logits: torch.Tensor, rows: list[int], positions: list[int], tokens: torch.Tensor
    ) -> tuple[list[int], HostLogprobs | None]:
        columns = np.zeros((NUM_COLUMNS, len(rows) + 3), dtype=np.int32)
        self.device.fill(columns, rows, positions)
        out = torch.full((len(rows),), -7, dtype=torch.int32)
        plan = self.device.plan(rows, positions)
        before = logits.clone()
        logprobs = self.device.sample(logits, torch.from_numpy(columns), tokens, out, plan)
        assert torch.equal(logits.isnan(), before.isnan())
        assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the logits stay as they are"
        if logprobs is not None:
            logprobs.begin_copy()
        return out.tolist(), logprobs

    def check(self, logits: torch.Tensor, positions: list[int], tokens: torch.Tensor) -> list[int]:
        """Sample row i + 1 from logits[i] with both; the tokens must be equal."""
        rows = list(range(1, len(logits) + 1))
        want = self.cpu.sample(logits.clone(), rows, positions, tokens)
        expected = [-1 if i in want.bad_rows else t for i, t in enumerate(want.token_ids.tolist())]
        table = tokens.clone()
        got, logprobs = self.run_device(logits, rows, positions, table)
        assert got == expected
        for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if got[i] >= 0:
                if position < LENGTH:
                    assert table[row, position] == got[i]
                    table[row, position] = tokens[row, position]
            elif position < LENGTH:
                table[row, position] = tokens[row, position]
        assert torch.equal(table, tokens), "nothing else is written"
        assert (logprobs is None) == (want.logprobs is None)
        if logprobs is not None and want.logprobs is not None:
            mine = dict(zip(logprobs.rows, logprobs.unpack(), strict=True))
            theirs = dict(zip(want.logprobs.rows.tolist(), want.logprobs.unpack(), strict=True))
            for i, entry in theirs.items():
                assert_same(mine[i], entry)
            assert all(mine[i].token_id == -1 and mine[i].rank == 0 for i in mine.keys() - theirs.keys())
        return got


def assert_same(a: TokenLogprobs, b: TokenLogprobs) -> None:
    assert (a.token_id, a.rank) == (b.token_id, b.rank)
    assert a.logprob == pytest.approx(b.logprob, abs=2e-5)
    assert [t for t, _ in a.top] == [t for t, _ in b.top]
    assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=2e-5)


def make_logits(n: int, dtype: torch.dtype = torch.float32, *, spread: float = 3.0, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, VOCAB, generator=g) * spread).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block", [128, 2048])
@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 2.5])
def test_plain_rows(temperature: float, block: int, dtype: torch.dtype):
    n = 6
    both = Both([SamplingParams(temperature=temperature)] * n, block=block)
    logits = make_logits(n, dtype)
    assert both.device.plan(list(range(1, n + 1)), [9] * n).plain
    got = [both.check(logits, [p] * n, known(n + 1)) for p in (4, 40)]
    assert (got[0] == got[1]) == (temperature == 0)


def test_greedy_takes_the_lowest_of_equal_logits():
    logits = torch.zeros(3, VOCAB)
    logits[0, [500, 600]] = 1
    logits[1, [1002, 64]] = 2
    both = Both([SamplingParams(temperature=0)] * 3)
    assert both.check(logits, [4] * 3, known(4)) == [500, 64, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1}, {"top_k": 2}, {"top_k": 40}, {"top_k": VOCAB - 1}, {"top_p": 0.9}, {"top_p": 0.3},
        {"top_p": 1e-6}, {"top_p": 0.9999}, {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 20, "top_p": 0.8},
        {"top_p": 0.7, "min_p": 0.02}, {"top_k": 5, "min_p": 0.2}, {"top_k": 30, "top_p": 0.5, "min_p": 0.01},
    ],
)  # fmt: skip
def test_filters(filters: dict, dtype: torch.dtype):
    params = [SamplingParams(temperature=t, **filters) for t in (0.5, 1.0, 1.9, 1.0, 0.8, 1.3)]
    logits = make_logits(6, dtype)
    logits[3] = (logits[3] * 2).round() / 2        # many ties, both signs, zeros of both signs
    logits[4] = 0                                  # flat
    logits[5, torch.arange(VOCAB) % 3 > 0] = -torch.inf
    both = Both(params)
    for position in (4, 63):
        both.check(logits, [position] * 6, known(7))


@pytest.mark.parametrize(
    "params, kept",
    [
        (SamplingParams(top_k=2), {0, 2, 3, 4}),   # all that equal the second
        (SamplingParams(top_p=0.59), {0, 2}),      # of equal tokens the lower ids first
        (SamplingParams(top_p=0.7), {0, 2, 3}),
        (SamplingParams(top_p=0.1), {0}),
        (SamplingParams(min_p=0.3), {0, 2, 3, 4}),
    ],
)
def test_ties_at_the_border(params: SamplingParams, kept: set[int]):
    row = torch.full((VOCAB,), -30.0)
    row[:6] = torch.tensor([1.0, -1.0, 0.0, -0.0, 0.0, -2.0])  # weights 2.7, .4, 1, 1, 1, .1: sum 6.2
    n = 40
    device = DeviceSampler(n + 1, VOCAB, LENGTH, CPU, block=512)
    for i in range(n):
        device.add(i + 1, params, i, PROMPT_LEN, ())
    columns, rows = np.zeros((NUM_COLUMNS, n), dtype=np.int32), list(range(1, n + 1))
    device.fill(columns, rows, [9] * n)
    out = torch.zeros(n, dtype=torch.int32)
    device.sample(
        row.expand(n, VOCAB).contiguous(), torch.from_numpy(columns), known(n + 1), out, device.plan(rows, [9] * n))
    assert set(out.tolist()) == kept


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "edits",
    [
        {"repetition_penalty": 1.7}, {"repetition_penalty": 0.5}, {"frequency_penalty": 0.9},
        {"presence_penalty": 1.5}, {"presence_penalty": -2.0, "frequency_penalty": -0.3, "repetition_penalty": 1.2},
        {"logit_bias": {3: 9.5, 7: -100.0, 1002: 8.0}}, {"bad_token_ids": [1, 2, 3]}, {"min_tokens": 30},
        {"logit_bias": {3: 20.0, 5: 10.0}, "bad_token_ids": [3], "min_tokens": 30, "top_p": 0.8, "presence_penalty": 1},
    ],
)  # fmt: skip
def test_edits(edits: dict, temperature: float):
    params = SamplingParams(temperature=temperature, max_tokens=100, logprobs=2, **edits)
    both = Both([params] * 4)
    logits = make_logits(4)
    logits[:, :30] += 6          # the tokens that are known are likely
    logits[:, list(STOPS)] += 3
    tokens = known(5, vocab=30)
    for positions in ([4, 5, 20, 63], [64, 33, 34, 35]):
        both.check(logits, positions, tokens)


def test_rows_of_edits_come_in_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.worker.sample.device._CHUNK_BYTES", 1)  # 16 rows at a time
    params = [
        SamplingParams(temperature=i % 2, logit_bias={i: 8.0}, presence_penalty=1.5 if i % 3 else 0, max_tokens=100)
        for i in range(37)
    ]
    logits = make_logits(37)
    logits[:, :50] += 6
    Both(params).check(logits, [20 + i % 40 for i in range(37)], known(38, vocab=50))


def test_rows_with_many_entries_come_in_smaller_chunks(monkeypatch: pytest.MonkeyPatch):
    """Requests that name nearly every token, between others that name none: no upload is larger than allowed."""
    monkeypatch.setattr("engine.worker.sample.device._ENTRY_BYTES", 12 * 20_000)
    uploads: list[int] = []
    upload = DeviceSampler._upload
    monkeypatch.setattr(
        DeviceSampler, "_upload", lambda self, a: uploads.append(sum(x.nbytes for x in a)) or upload(self, a)
    )
    params = [
        SamplingParams(temperature=i % 2, logit_bias=dict.fromkeys(range(i, VOCAB), 0.5) if i % 4 < 3 else {},
                       bad_token_ids=list(range(VOCAB // 2)) if i % 5 == 0 else [], max_tokens=100,
                       presence_penalty=0.5)
        for i in range(53)
    ]  # fmt: skip
    Both(params).check(make_logits(53), [20 + i % 40 for i in range(53)], known(54))
    assert max(uploads) <= 12 * 20_000
    assert len(uploads) > 3


def mixed(n: int) -> tuple[list[SamplingParams], torch.Tensor, list[int]]:
    r = random.Random(n)
    params = [
        SamplingParams(
            temperature=r.choice([0, 0.5, 1.0, 1.7]), top_p=r.choice([1, 1, 0.9, 0.3]),
            top_k=r.choice([0, 0, 1, 40, VOCAB // 2, VOCAB + 5]), min_p=r.choice([0, 0, 0.05]),
            presence_penalty=r.choice([0, 0, 1.5]), frequency_penalty=r.choice([0, 0, 0.3]),
            repetition_penalty=r.choice([1, 1, 1.2]), logprobs=r.choice([None, None, 0, 3, 20]),
            logit_bias=r.choice([{}, {}, {3: 5.0, 7: -100.0}]), bad_token_ids=r.choice([[], [], [1, 2, 3]]),
            min_tokens=r.choice([0, 0, 40]), max_tokens=100,
        )
        for _ in range(n)
    ]  # fmt: skip
    logits = make_logits(n) * torch.tensor([r.choice([0.0, 0.2, 1.0, 3.0]) for _ in range(n)])[:, None]
    return params, logits, [r.randint(4, 63) for _ in range(n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mixed_batch_equals_the_cpu_and_rows_are_independent(dtype: torch.dtype):
    n = 16
    params, logits, positions = mixed(n)
    logits, tokens = logits.to(dtype), known(n + 1)
    both = Both(params)
    whole = both.check(logits, positions, tokens)
    _, listed = both.run_device(logits, list(range(1, n + 1)), positions, tokens.clone())
    assert listed is not None
    entries = dict(zip(listed.rows, listed.unpack(), strict=True))
    r = random.Random(2)
    for which in ([3], [7], [15], r.sample(range(n), 6)):
        got, logprobs = both.run_device(
            logits[which].contiguous(), [i + 1 for i in which], [positions[i] for i in which], tokens.clone()
        )
        assert got == [whole[i] for i in which]
        if logprobs is not None:
            found = dict(zip(logprobs.rows, logprobs.unpack(), strict=True))
            assert found == {at: entries[i] for at, i in enumerate(which) if i in entries}


@pytest.mark.parametrize("poison", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9, logprobs=5),
    SamplingParams(bad_token_ids=[77], repetition_penalty=2, logprobs=0),
])  # fmt: skip
def test_a_bad_row_is_reported_and_harms_no_other(poison: float | str, params: SamplingParams):
    n = 5
    both, logits, tokens = Both([params] * n), make_logits(n), known(n + 1)
    clean = both.check(logits, [8] * n, tokens)
    if poison == "all -inf":
        logits[2] = -torch.inf
    else:
        logits[2, 77] = poison
    got = both.check(logits, [8] * n, tokens)
    assert got == [*clean[:2], -1, *clean[3:]]


def test_a_bad_row_writes_no_token():
    both, logits, tokens = Both([SamplingParams()] * 2), make_logits(2), known(3)
    logits[1, 5] = torch.nan
    table = tokens.clone()
    got, _ = both.run_device(logits, [1, 2], [8, 8], table)
    assert got[1] == -1
    assert table[1, 8] == got[0]
    assert torch.equal(table[2], tokens[2])


def test_a_row_whose_every_token_is_banned_is_bad():
    both = Both([SamplingParams(bad_token_ids=list(range(VOCAB))), SamplingParams()])
    assert both.check(make_logits(2), [4, 4], known(3))[0] == -1


def test_padding_and_full_rows_write_nothing_but_row_0():
    both = Both([SamplingParams()])
    tokens = known(2)
    table = tokens.clone()
    got, _ = both.run_device(make_logits(3), [1, 0, 0], [LENGTH, 0, 0], table)
    assert got[0] >= 0
    assert torch.equal(table[1], tokens[1])
    assert table[0, 0] in got[1:]


def test_remove_forgets_everything():
    params = SamplingParams(logit_bias={3: 100}, min_tokens=9, logprobs=3, repetition_penalty=2, top_k=3)
    both = Both([params])
    assert not both.device.plan([1], [4]).plain
    both.device.remove(1)
    assert both.device.plan([1], [4]).plain
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1
    assert both.run_device(logits, [1], [4], known(2))[0] == [5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("k", [0, 20])
def test_prompt_logprobs(k: int, dtype: torch.dtype):
    n = 9
    logits = make_logits(n, dtype)
    logits[:, ::7] = logits[:, :1].clone()   # ties
    logits[1, 40:] = -torch.inf
    logits[2] = 0
    logits[2, ::2] = -0.0
    logits[3, 5], logits[4, 5], logits[5] = torch.nan, torch.inf, -torch.inf
    targets = torch.arange(n) * 4 + 1
    found = DeviceSampler(2, VOCAB, LENGTH, CPU).prompt_logprobs(logits, targets, k)
    found.begin_copy()
    want = prompt_logprobs(logits, targets, k).unpack()
    for i, (a, b) in enumerate(zip(found.unpack(), want, strict=True)):
        if i in (3, 4, 5):
            assert math.isnan(a.logprob)
            assert a.rank == 0
        else:
            assert_same(a, b)


def test_warm_up_runs_every_kernel_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch):
    from engine.kernels.runtime.launcher import Kernel
    from engine.kernels.sampling import edits, logprobs, sampler

    device, tokens = DeviceSampler(2, VOCAB, LENGTH, CPU), known(2)
    before, ran = tokens.clone(), set()
    call = Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda self, *a, **k: (ran.add(self.name), call(self, *a, **k)))
    device.warm_up(torch.float16, torch.zeros(NUM_COLUMNS, 16, dtype=torch.int32), tokens)
    modules = sampler, edits, logprobs
    assert ran == {k.name for module in modules for k in vars(module).values() if isinstance(k, Kernel)}
    assert torch.equal(tokens, before)
    assert device.plan([0], [0]).plain


def test_fill_is_the_parameters_bit_for_bit():
    device = DeviceSampler(4, VOCAB, LENGTH, CPU)
    device.add(2, SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.1), -2, PROMPT_LEN, ())
    columns = np.full((NUM_COLUMNS, 3), 77, dtype=np.int32)
    device.fill(columns, [2, 0], [50, 0])
    floats = columns.view(np.float32)
    assert columns[:2, 0].tolist() == [2, 50]
    assert columns[3:6, 0].tolist() == [-2, -1, 9]
    assert floats[[2, 6, 7], 0].tolist() == np.float32([0.7, 0.8, math.log(0.1)]).tolist()
    assert columns[[0, 1, 2, 3, 4, 5], 1].tolist() == [0] * 6
    assert floats[[6, 7], 1].tolist() == [1.0, -math.inf]
    assert (columns[:, 2] == 77).all()
