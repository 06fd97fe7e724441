"""The GPU's sampler: filters against float64, edits and log-probabilities against the CPU's sampler on equal logits,
and independence of the batch, bit for bit.

What holds, exactly: a token is a function of its row of logits, the request's parameters, seed, position and known
tokens. Logits themselves may differ in their last bits between steps of different sizes (products of few rows and of
many are different kernels); `test_gpu_steps.py` says what follows for whole requests.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from gpu_kit import DEVICE

from engine.core.params import SamplingParams
from engine.core.request import TokenLogprobs
from engine.worker.sample import Sampler, prompt_logprobs
from engine.worker.sample.device import NUM_COLUMNS, DeviceSampler

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

VOCAB, LENGTH, PROMPT_LEN = 1008, 64, 4  # rows of logits at aligned addresses, as every real vocabulary gives
STOPS = (0, 5)
DRAWS = 4096


def seed_of(row: int) -> int:
    return row * 0x1234_5678_9ABC + 7


def known_tokens(rows: int, vocab: int = VOCAB) -> torch.Tensor:
    """int32 [rows, LENGTH] of random tokens, on the CPU."""
    return torch.randint(0, vocab, (rows, LENGTH), dtype=torch.int32, generator=torch.Generator().manual_seed(5))


def make_logits(count: int, dtype: torch.dtype, *, spread: float = 3.0, seed: int = 1) -> torch.Tensor:
    return (torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


class OnDevice:
    """A device sampler with `params[i]` in row i + 1."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self.sampler = DeviceSampler(len(params) + 1, VOCAB, LENGTH, DEVICE)
        for row, p in enumerate(params, 1):
            self.sampler.add(row, p, seed_of(row), PROMPT_LEN, STOPS)

    def sample(
        self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int], tokens: torch.Tensor
    ) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """The tokens of `rows` at `positions`, and log-probabilities by index into `rows`. CPU tensors in."""
        width = -(-len(rows) // 16) * 16
        columns = np.zeros((NUM_COLUMNS, width), dtype=np.int32)
        self.sampler.fill(columns, rows, positions)
        out = torch.full((len(rows),), -7, dtype=torch.int32, device=DEVICE)
        asked = self.sampler.plan(rows, positions)
        found = self.sampler.sample(
            logits.to(DEVICE), torch.from_numpy(columns).to(DEVICE), tokens.to(DEVICE), out, asked
        )
        listed = {}
        if found is not None:
            found.begin_copy()
            torch.cuda.synchronize()
            listed = dict(zip(found.rows, found.unpack(), strict=True))
        return out.tolist(), listed


def on_cpu(
    params: Sequence[SamplingParams], logits: torch.Tensor, positions: Sequence[int], tokens: torch.Tensor
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """The same from the CPU's sampler, which tests of its own hold against float64."""
    sampler = Sampler(len(params) + 1, VOCAB, torch.device("cpu"))
    rows = list(range(1, len(params) + 1))
    for row, p in zip(rows, params, strict=True):
        sampler.add(row, p, seed_of(row), PROMPT_LEN, STOPS)
    result = sampler.sample(logits.clone(), rows, positions, tokens)
    chosen = [-1 if i in result.bad_rows else token for i, token in enumerate(result.token_ids.tolist())]
    found = result.logprobs
    listed = {} if found is None else dict(zip(found.rows.tolist(), found.unpack(), strict=True))
    return chosen, listed


# -- distributions


def allowed(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, float]:
    """float64 [V] probabilities after the filters, 0 for what they take away, and how far (relative) the closest
    decision was from going the other way."""
    z = logits.double() / params.temperature
    p = (z - z.max()).exp()
    keep = torch.ones_like(p, dtype=torch.bool)
    closest = math.inf
    if params.min_p:
        keep = p >= params.min_p
        closest = float((p / params.min_p - 1).abs().min())
    if params.top_k:
        left = torch.where(keep, z, -torch.inf)
        keep &= z >= left.topk(params.top_k).values[-1]
    if params.top_p < 1:
        left = torch.where(keep, p, 0)
        share, order = (left / left.sum()).sort(descending=True, stable=True)
        mass = share.cumsum(0)
        keep &= torch.zeros_like(keep).index_fill(0, order[: int((mass < params.top_p).sum()) + 1], True)
        closest = min(closest, float((mass - params.top_p).abs().min()))
    p = torch.where(keep, p, 0)
    return p / p.sum(), closest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("params", [
    SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(temperature=1.8, top_k=7),
    SamplingParams(top_k=40), SamplingParams(top_p=0.8), SamplingParams(top_p=0.45), SamplingParams(min_p=0.04),
    SamplingParams(temperature=1.3, top_k=60, top_p=0.7), SamplingParams(top_k=50, top_p=0.9, min_p=0.02),
], ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")  # fmt: skip
def test_draws_stay_among_the_allowed_tokens_and_follow_their_probabilities(
    params: SamplingParams, dtype: torch.dtype
) -> None:
    row = make_logits(1, dtype)[0]
    want, closest = allowed(row, params)
    assert closest > 1e-6, f"the test's own numbers stand on a border ({closest:.1e}): choose others"
    device = OnDevice([params] * DRAWS)
    drawn, _ = device.sample(
        row.expand(DRAWS, VOCAB).contiguous(), range(1, DRAWS + 1), [9] * DRAWS, known_tokens(DRAWS + 1)
    )
    count = torch.bincount(torch.tensor(drawn), minlength=VOCAB).double()
    outside = {t: int(count[t]) for t in torch.nonzero((want == 0) & (count > 0)).flatten().tolist()}
    assert not outside, f"tokens the filters forbid, with their counts: {outside}"

    expected = want * DRAWS
    rare = expected < 5
    observed = torch.cat((count[~rare], count[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    limit = freedom + 5 * math.sqrt(2 * freedom) + 5  # five standard deviations, and room for few degrees
    print(f"{int((want > 0).sum())} tokens allowed, chi-square {chi2:.1f}, {freedom} degrees, limit {limit:.1f}")
    assert chi2 <= limit, f"chi-square {chi2:.1f} of {freedom} degrees of freedom, at most {limit:.1f}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_is_the_argmax_and_of_equal_logits_the_lowest(dtype: torch.dtype) -> None:
    logits = make_logits(64, dtype)
    logits[3] = 0
    logits[4, [700, 20, 900]] = 50
    device = OnDevice([SamplingParams(temperature=0)] * 64)
    got, _ = device.sample(logits, range(1, 65), [9] * 64, known_tokens(65))
    want = [int(torch.nonzero(row == row.max())[0]) for row in logits.float()]
    wrong = {i: (g, w) for i, (g, w) in enumerate(zip(got, want, strict=True)) if g != w}
    assert not wrong, f"row: (sampled, argmax) {wrong}"
    assert got[3:5] == [0, 20]


# -- edits and log-probabilities


EDITS: dict[str, dict] = {
    "repetition": {"repetition_penalty": 1.7}, "encourage": {"repetition_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.9}, "presence": {"presence_penalty": 1.5},
    "penalties": {"presence_penalty": -2.0, "frequency_penalty": -0.3, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {3: 9.5, 7: -100.0, 1002: 8.0}}, "banned": {"bad_token_ids": list(range(1, 16))},
    "min_tokens": {"min_tokens": 30},
    "all": {"logit_bias": {3: 20.0, 5: 10.0}, "bad_token_ids": [3], "min_tokens": 30, "presence_penalty": 1},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("edit", list(EDITS))
def test_edits_and_logprobs_are_those_of_the_cpu(edit: str, dtype: torch.dtype) -> None:
    """Greedy and drawn rows: on equal logits both samplers choose the same tokens."""
    n = 12
    params = [
        SamplingParams(temperature=i % 2, max_tokens=100, logprobs=i % 6, **EDITS[edit], top_p=1 if i % 3 else 0.8)
        for i in range(n)
    ]
    logits = make_logits(n, torch.float32)
    logits[:, :30] += 6  # the tokens that are known are likely
    logits[:, list(STOPS)] += 3
    logits = logits.to(dtype)
    tokens = known_tokens(n + 1, vocab=30)
    device = OnDevice(params)
    plain = [SamplingParams(temperature=p.temperature, top_p=p.top_p) for p in params]
    changed = 0
    for positions in ([4 + i for i in range(n)], [63 - i for i in range(n)]):
        want, want_listed = on_cpu(params, logits, positions, tokens)
        got, listed = device.sample(logits, range(1, n + 1), positions, tokens)
        assert got == want, f"positions {positions}: GPU {got}, CPU {want}"
        assert listed.keys() == want_listed.keys()
        for i, entry in want_listed.items():
            assert_same_logprobs(listed[i], entry, f"row {i}")
        changed += got != on_cpu(plain, logits, positions, tokens)[0]
    assert changed, "the edits changed nothing"


def assert_same_logprobs(a: TokenLogprobs, b: TokenLogprobs, where: str) -> None:
    assert (a.token_id, a.rank) == (b.token_id, b.rank), f"{where}: {a} against {b}"
    assert [t for t, _ in a.top] == [t for t, _ in b.top], f"{where}: {a} against {b}"
    worst = max([abs(a.logprob - b.logprob), *(abs(x - y) for (_, x), (_, y) in zip(a.top, b.top, strict=True))])
    assert worst < 5e-5, f"{where}: log-probabilities differ by {worst:.1e}: {a} against {b}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [0, 5, 20])
def test_prompt_logprobs_are_those_of_the_cpu(k: int, dtype: torch.dtype) -> None:
    logits = make_logits(33, dtype)
    logits[:, ::7] = logits[:, :1].clone()  # equal ones: the lower id comes first
    logits[1, 40:] = -torch.inf
    targets = torch.arange(33) * 4 + 1
    found = DeviceSampler(2, VOCAB, LENGTH, DEVICE).prompt_logprobs(logits.to(DEVICE), targets.to(DEVICE), k)
    found.begin_copy()
    torch.cuda.synchronize()
    for i, (a, b) in enumerate(zip(found.unpack(), prompt_logprobs(logits, targets, k).unpack(), strict=True)):
        if i != 1 or targets[i] < 40:
            assert_same_logprobs(a, b, f"position {i}")


# -- independence of the batch


def varied(n: int) -> list[SamplingParams]:
    """Parameters of every kind, plain ones among them."""
    kinds: list[dict] = [
        {}, {"temperature": 0}, {"temperature": 0.6}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05, "top_p": 0.9},
        {"repetition_penalty": 1.3}, {"presence_penalty": 1.0, "frequency_penalty": 0.4}, {"logit_bias": {9: 4.0}},
        {"bad_token_ids": [1, 2, 3], "top_k": 50}, {"logprobs": 3}, {"min_tokens": 40, "temperature": 0.9},
    ]  # fmt: skip
    return [SamplingParams(max_tokens=100, **kinds[i % len(kinds)]) for i in range(n)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_gives_the_same_alone_and_anywhere_in_any_batch(dtype: torch.dtype) -> None:
    n = 200
    params = varied(n)
    logits, tokens = make_logits(n, dtype), known_tokens(n + 1)
    positions = [4 + i % 60 for i in range(n)]
    device = OnDevice(params)

    def run(which: Sequence[int]) -> tuple[list[int], list[TokenLogprobs | None]]:
        got, listed = device.sample(
            logits[list(which)].contiguous(), [i + 1 for i in which], [positions[i] for i in which], tokens
        )
        return got, [listed.get(at) for at in range(len(which))]

    whole, whole_listed = run(range(n))
    assert min(whole) >= 0, f"rows without a token: {[i for i, t in enumerate(whole) if t < 0]}"
    assert len(set(whole)) > 50
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(3)).tolist()
    batches = [[i] for i in range(24)] + [list(range(24, 31)), list(range(40, 81)), shuffled, shuffled[:41]]
    for which in batches:
        got, listed = run(which)
        wrong = {i: (a, whole[i]) for i, a in zip(which, got, strict=True) if a != whole[i]}
        assert not wrong, f"batch of {len(which)}; row: (here, in the batch of {n}) {wrong}"
        assert listed == [whole_listed[i] for i in which], f"batch of {len(which)}: log-probabilities"


def test_neighbours_without_a_distribution_change_nothing() -> None:
    n = 41
    params = varied(n)
    logits, tokens = make_logits(n, torch.bfloat16), known_tokens(n + 1)
    clean, _ = OnDevice(params).sample(logits, range(1, n + 1), [20] * n, tokens)
    for at, poison in ((7, math.nan), (20, math.inf), (40, -math.inf)):
        spoiled = logits.clone()
        spoiled[at, 500 if poison > 0 or poison != poison else slice(None)] = poison
        got, _ = OnDevice(params).sample(spoiled, range(1, n + 1), [20] * n, tokens)
        assert got == [*clean[:at], -1, *clean[at + 1 :]], f"{poison} in row {at}: {got} against {clean}"
