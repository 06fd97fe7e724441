"""The sampler as a whole: distribution, batch independence, penalties, masks, bad rows."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from engine.core.params import SamplingParams
from engine.errors import InvalidRequestError
from engine.worker.sample import Sampler, check_token_ids

CPU = torch.device("cpu")


def make(vocab: int, params: list[SamplingParams], *, seeds: list[int] | None = None, prompt_len: int = 4,
         stop_ids: tuple[int, ...] = ()) -> Sampler:  # fmt: skip
    """A sampler with `params[i]` in row i + 1."""
    sampler = Sampler(len(params) + 1, vocab, CPU)
    for i, p in enumerate(params):
        sampler.add(i + 1, p, seeds[i] if seeds else i, prompt_len, stop_ids)
    return sampler


def known(rows: int, vocab: int, length: int = 64, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (rows, length), dtype=torch.int32, generator=g)


def sample_many(logits: torch.Tensor, params: SamplingParams, draws: int, *, along: str = "position") -> np.ndarray:
    """Token counts of `draws` samples from one row of logits, with one seed or one position throughout."""
    vocab = len(logits)
    if along == "position":
        sampler, rows, positions = make(vocab, [params], seeds=[11]), [1] * draws, list(range(4, 4 + draws))
    else:
        sampler = make(vocab, [params] * draws)
        rows, positions = list(range(1, draws + 1)), [9] * draws
    got = sampler.sample(logits.expand(draws, vocab).clone(), rows, positions, known(draws + 1, vocab)).token_ids
    return np.bincount(got.numpy(), minlength=vocab)


def chi_square_ok(counts: np.ndarray, p: np.ndarray) -> bool:
    """True unless the counts differ from `p` by about 5 sigma; rare outcomes are pooled."""
    expected = p * counts.sum()
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = max(len(observed) - 1, 1)
    return ((observed - expected) ** 2 / expected).sum() < degrees + 5 * math.sqrt(2 * degrees) + 10


@pytest.mark.parametrize("along", ["position", "seed"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_frequencies_follow_softmax(along: str, temperature: float, spread: float):
    logits = torch.randn(150, generator=torch.Generator().manual_seed(2)) * spread
    counts = sample_many(logits, SamplingParams(temperature=temperature), 20_000, along=along)
    p = torch.softmax(logits.double() / temperature, -1).numpy()
    assert chi_square_ok(counts, p)
    assert not chi_square_ok(counts, np.roll(p, 1) if spread else np.arange(1, 151) / 11325), "the test has no power"


@pytest.mark.parametrize(
    "params, kept",
    [
        (SamplingParams(top_k=3), 3),
        (SamplingParams(top_p=0.6), None),
        (SamplingParams(min_p=0.3), None),
        (SamplingParams(top_k=20, top_p=0.8, min_p=0.01, temperature=0.7), None),
    ],
)
def test_frequencies_with_filters(params: SamplingParams, kept: int | None):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(4)) * 2
    counts = sample_many(logits, params, 20_000)
    p = torch.softmax(logits.double() / params.temperature, -1).numpy()
    order = np.argsort(-p)
    keep = p >= params.min_p * p.max()
    if params.top_k:
        keep &= p >= p[order[params.top_k - 1]]
    q = np.where(keep, p, 0) / p[keep].sum()
    if params.top_p < 1:
        before = np.cumsum(q[order]) - q[order]
        keep[order[before >= params.top_p]] = False
        q = np.where(keep, p, 0) / p[keep].sum()
    assert kept is None or keep.sum() == kept
    assert counts[~keep].sum() == 0
    assert (counts[keep] > 0).sum() > 1
    assert chi_square_ok(counts, q)


def mixed_batch(n: int, vocab: int) -> tuple[list[SamplingParams], torch.Tensor, torch.Tensor, list[int]]:
    """Requests of every kind, logits from flat to sharp, with ties, known tokens and positions."""
    r = random.Random(n)
    params = [
        SamplingParams(
            temperature=r.choice([0, 0, 0.5, 1.0, 1.7]), top_p=r.choice([1, 1, 0.9, 0.3]),
            top_k=r.choice([0, 0, 1, 40, vocab // 2, vocab + 5]), min_p=r.choice([0, 0, 0.05]),
            presence_penalty=r.choice([0, 0, 1.5]), frequency_penalty=r.choice([0, 0, 0.3]),
            repetition_penalty=r.choice([1, 1, 1.2]), logprobs=r.choice([None, None, 0, 3, 20]),
            logit_bias=r.choice([{}, {}, {3: 5.0, 7: -100.0}]), bad_token_ids=r.choice([[], [1, 2, 3]]),
            min_tokens=r.choice([0, 0, 40]), max_tokens=100,
        )
        for _ in range(n)
    ]  # fmt: skip
    g = torch.Generator().manual_seed(n)
    spread = torch.tensor([r.choice([0.0, 0.5, 2.0, 8.0]) for _ in range(n)])
    logits = torch.randn(n, vocab, generator=g) * spread[:, None]
    return params, logits, known(n + 1, vocab, seed=n), [r.randint(4, 63) for _ in range(n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [70, 4096, 49152])
def test_batch_row_and_order_do_not_matter(vocab: int, dtype: torch.dtype):
    n = 48
    params, logits, tokens, positions = mixed_batch(n, vocab)
    logits = logits.to(dtype)
    sampler = make(vocab, params, stop_ids=(0, 5))

    def run(which: list[int]) -> dict[int, tuple]:
        result = sampler.sample(
            logits[which].clone(), [i + 1 for i in which], [positions[i] for i in which], tokens
        )
        assert result.bad_rows == []
        found = {i: (int(t), None) for i, t in zip(which, result.token_ids, strict=True)}
        if result.logprobs:
            for row, entry in zip(result.logprobs.rows.tolist(), result.logprobs.unpack(), strict=True):
                found[which[row]] = (found[which[row]][0], entry)
        return found

    whole = run(list(range(n)))
    for i, p in enumerate(params):
        assert (whole[i][1] is not None) == (p.logprobs is not None)
    r = random.Random(1)
    for size in (1, 1, 1, 2, 3, 7, 8, 9, 16, 31, n):
        which = r.sample(range(n), size)
        assert run(which) == {i: whole[i] for i in which}
    alone = {}
    for i in range(n):
        alone |= run([i])
    assert alone == whole
    # other state rows, same parameters
    moved = Sampler(200, vocab, CPU)
    wide = torch.zeros(200, tokens.shape[1], dtype=torch.int32)
    for i, p in enumerate(params):
        moved.add(150 - i, p, i, 4, (0, 5))
        wide[150 - i] = tokens[i + 1]
    again = moved.sample(logits.clone(), [150 - i for i in range(n)], positions, wide)
    assert again.token_ids.tolist() == [whole[i][0] for i in range(n)]


def test_seed_and_position_decide():
    vocab = 1000
    logits = torch.zeros(1, vocab)
    sampler = Sampler(4, vocab, CPU)
    tokens = known(4, vocab, 300)

    def text(seed: int, start: int = 4) -> list[int]:
        sampler.add(2, SamplingParams(), seed, 4, ())
        return [int(sampler.sample(logits.clone(), [2], [p], tokens).token_ids) for p in range(start, start + 50)]

    assert text(5) == text(5)
    assert text(5)[10:] == text(5, 14)[:40]
    assert text(-1) == text(2**64 - 1), "a negative seed is its 64 bits"
    different = [text(s) for s in (0, 1, 2**32, 2**63, 12345)]
    for i, a in enumerate(different):
        for b in different[:i]:
            assert sum(x == y for x, y in zip(a, b, strict=True)) < 5
        assert max(Counter(a).values()) < 5


def test_greedy_takes_the_lowest_of_equal_logits():
    logits = torch.zeros(3, 200)
    logits[0, [50, 60]] = 1
    logits[1, [199, 64]] = 2
    sampler = make(200, [SamplingParams(temperature=0)] * 3)
    assert sampler.sample(logits, [1, 2, 3], [4, 4, 4], known(4, 200)).token_ids.tolist() == [50, 64, 0]


def test_repetition_penalty_equals_transformers():
    vocab, position = 500, 40
    params = [SamplingParams(temperature=0, repetition_penalty=p, logprobs=0) for p in (0.5, 1.3, 2.0, 1.0)]
    sampler = make(vocab, params)
    tokens = known(5, 30, 64)  # few different ones: many repeats
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))
    logits[:, :30] += 2
    got = logits.clone()
    row = np.arange(1, 5)
    assert sampler._edit(got, row, np.full(4, position), tokens)
    for i, p in enumerate(params):
        theirs = logits[i : i + 1].clone()
        if p.repetition_penalty != 1:
            ids = tokens[i + 1 : i + 2, :position].long()
            theirs = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, theirs)
        assert torch.equal(got[i], theirs[0])


def test_frequency_and_presence_count_the_output_only():
    vocab, prompt_len, position = 300, 10, 50
    params = [
        SamplingParams(frequency_penalty=0.4, presence_penalty=-1.1),
        SamplingParams(frequency_penalty=-2.0),
        SamplingParams(presence_penalty=2.0, repetition_penalty=1.5),
        SamplingParams(),
    ]
    sampler = make(vocab, params, prompt_len=prompt_len)
    tokens = known(5, 40, 64)
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))
    got = logits.clone()
    sampler._edit(got, np.arange(1, 5), np.full(4, position), tokens)
    for i, p in enumerate(params):
        every = tokens[i + 1, :position].tolist()
        counts = Counter(every[prompt_len:])
        for t in range(vocab):
            x = logits[i, t].item()
            if t in every:
                x = x * p.repetition_penalty if x < 0 else x / p.repetition_penalty
            x -= p.frequency_penalty * counts[t] + p.presence_penalty * (counts[t] > 0)
            assert got[i, t].item() == pytest.approx(x, abs=1e-5)
    # nothing generated yet: nothing to penalise
    first = logits.clone()
    sampler._edit(first, np.arange(1, 3), np.full(2, prompt_len), tokens)
    assert torch.equal(first, logits)


def test_min_tokens_holds_back_the_stop_tokens():
    vocab, stops = 100, (7, 9, 100_000)
    params = SamplingParams(temperature=0, min_tokens=5)
    sampler = make(vocab, [params], prompt_len=10, stop_ids=stops)
    logits = torch.zeros(1, vocab)
    logits[0, 7], logits[0, 9], logits[0, 3] = 30, 20, 10
    got = [int(sampler.sample(logits.clone(), [1], [p], known(2, vocab)).token_ids) for p in range(10, 18)]
    assert got == [3] * 5 + [7] * 3


def test_bias_and_banned_tokens():
    vocab = 2000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)).expand(400, vocab)
    for params, want in [
        (SamplingParams(logit_bias={1234: 100}), {1234}),
        (SamplingParams(bad_token_ids=[t for t in range(vocab) if t not in (5, 6)]), {5, 6}),
        (SamplingParams(logit_bias=dict.fromkeys(range(1000), -100)), set(range(1000, 2000))),
    ]:
        sampler = make(vocab, [params])
        got = sampler.sample(logits.clone(), [1] * 400, list(range(4, 404)), known(2, vocab)).token_ids.tolist()
        assert set(got) <= want
        assert len(want) > 2 or set(got) == want


def test_logprobs_are_of_the_raw_distribution():
    vocab = 3000
    params = SamplingParams(temperature=0.3, top_k=5, logit_bias={17: 100}, repetition_penalty=1.5, logprobs=2)
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(1)) * 3
    sampler = make(vocab, [SamplingParams(temperature=0), params, SamplingParams(logprobs=0)])
    result = sampler.sample(logits.clone(), [1, 2, 3], [9, 9, 9], known(4, vocab))
    want = torch.log_softmax(logits.double(), -1)
    assert result.logprobs is not None
    assert result.logprobs.rows.tolist() == [1, 2]
    biased, plain = result.logprobs.unpack()
    assert biased.token_id == int(result.token_ids[1]) == 17
    assert biased.logprob == pytest.approx(float(want[1, 17]), abs=1e-5)
    assert biased.rank == 1 + int((want[1] > want[1, 17]).sum())
    assert [t for t, _ in biased.top] == want[1].topk(2).indices.tolist()
    assert plain.token_id == int(result.token_ids[2])
    assert plain.top == []


@pytest.mark.parametrize("poison", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9, logprobs=5),
])  # fmt: skip
def test_a_bad_row_is_reported_and_harms_no_other(poison: float | str, params: SamplingParams):
    vocab, n = 300, 6
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(0))
    sampler, tokens = make(vocab, [params] * n), known(n + 1, vocab)
    rows, positions = list(range(1, n + 1)), [8] * n
    clean = sampler.sample(logits.clone(), rows, positions, tokens)
    broken = logits.clone()
    if poison == "all -inf":
        broken[2] = -torch.inf
    else:
        broken[2, 77] = poison
    result = sampler.sample(broken, rows, positions, tokens)
    assert result.bad_rows == [2]
    good = [0, 1, 3, 4, 5]
    assert result.token_ids[good].tolist() == clean.token_ids[good].tolist()
    if params.logprobs:
        assert result.logprobs is not None
        assert clean.logprobs is not None
        assert result.logprobs.rows.tolist() == good
        assert result.logprobs.unpack() == [clean.logprobs.unpack()[i] for i in good]


def test_a_row_whose_every_token_is_banned_is_bad():
    params = [SamplingParams(bad_token_ids=list(range(50))), SamplingParams()]
    sampler = make(50, params)
    assert sampler.sample(torch.zeros(2, 50), [1, 2], [4, 4], known(3, 50)).bad_rows == [0]


def test_padding_rows_are_never_reported():
    sampler = make(50, [SamplingParams()])
    logits = torch.full((3, 50), torch.nan)
    logits[0] = 0
    result = sampler.sample(logits, [1, 0, 0], [4, 0, 0], known(2, 50))
    assert result.bad_rows == []
    assert result.token_ids.shape == (3,)


def test_remove_forgets_everything():
    params = SamplingParams(logit_bias={3: 100}, min_tokens=9, logprobs=3, repetition_penalty=2)
    sampler = make(100, [params], stop_ids=(1,))
    sampler.remove(1)
    logits = torch.zeros(1, 100)
    logits[0, 1] = 1
    result = sampler.sample(logits, [1], [4], known(2, 100))
    assert result.token_ids.tolist() == [1]
    assert result.logprobs is None


@pytest.mark.parametrize("params", [
    SamplingParams(logit_bias={100: 1}), SamplingParams(bad_token_ids=[-1]), SamplingParams(stop_token_ids=[100]),
])  # fmt: skip
def test_tokens_outside_the_vocabulary_are_refused(params: SamplingParams):
    with pytest.raises(InvalidRequestError, match="vocabulary has 100 tokens"):
        check_token_ids(params, 100)
    with pytest.raises(InvalidRequestError):
        make(100, [params])
