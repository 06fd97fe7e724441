"""Log-probabilities and ranks against log_softmax."""

import pytest
import torch

from engine.worker.sample import prompt_logprobs
from engine.worker.sample.logprobs import gather_logprobs


@pytest.mark.parametrize("vocab", [1, 5, 100, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_log_softmax(vocab: int, dtype: torch.dtype):
    g = torch.Generator().manual_seed(vocab)
    z = (torch.randn(40, vocab, generator=g) * 5).to(dtype)
    z[:, ::7] = z[:, :1].clone()  # ties
    targets = torch.randint(0, vocab, (40,), generator=g)
    got = prompt_logprobs(z, targets.int(), 20)
    want = torch.log_softmax(z.double(), -1)
    k = min(20, vocab)
    assert torch.allclose(got.logprobs.double(), want[torch.arange(40), targets], atol=2e-5, rtol=0)
    assert got.top_ids.shape == (40, k)
    for i, row in enumerate(z.float().tolist()):
        order = sorted(range(vocab), key=lambda t, row=row: (-row[t], t))[:k]
        assert got.top_ids[i].tolist() == order
        assert int(got.ranks[i]) == 1 + sum(x > row[targets[i]] for x in row)
    assert torch.allclose(got.top_logprobs.double(), want.gather(1, got.top_ids), atol=2e-5, rtol=0)


def test_unpack_gives_each_row_what_it_asked_for():
    z = torch.tensor([[0.0, 1.0, 2.0, -torch.inf], [5.0, 5.0, 1.0, 0.0]])
    got = gather_logprobs(z, torch.tensor([1, 1]), torch.tensor([0, 3])).unpack()
    want = torch.log_softmax(z, -1)
    assert [e.token_id for e in got] == [1, 1]
    assert [e.rank for e in got] == [2, 1], "the rank counts strictly better tokens"
    assert got[0].top == []
    assert [t for t, _ in got[1].top] == [0, 1, 2]
    assert [v for _, v in got[1].top] == pytest.approx(want[1, :3].tolist(), abs=1e-6)


def test_long_prompt_in_chunks_equals_one_row_at_a_time():
    z = torch.randn(90, 50_000, generator=torch.Generator().manual_seed(0)) * 4
    targets = torch.arange(90) * 500
    whole = prompt_logprobs(z, targets, 5)
    for i in (0, 1, 41, 89):
        one = prompt_logprobs(z[i : i + 1], targets[i : i + 1], 5)
        assert one.unpack()[0] == whole.unpack()[i]


def test_bad_rows_do_not_disturb_others():
    z = torch.randn(4, 300, generator=torch.Generator().manual_seed(5))
    clean = prompt_logprobs(z[3:], torch.tensor([7]), 4).unpack()[0]
    z[0, 5], z[1, 5], z[2] = torch.nan, torch.inf, -torch.inf
    got = prompt_logprobs(z, torch.tensor([7, 7, 7, 7]), 4)
    assert got.logprobs[:3].isnan().all()
    assert got.unpack()[3] == clean


def test_no_rows():
    assert prompt_logprobs(torch.empty(0, 10), torch.empty(0, dtype=torch.int32), 3).unpack() == []
