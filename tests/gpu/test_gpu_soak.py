"""5,000 random requests with aborts leave nothing behind: no page, no row, no byte of device memory."""

import dataclasses
import random
import time

import pytest
import torch
from gpu_kit import VOCAB, assert_idle, checkpoint, on_gpu

from engine import LLM, SamplingParams
from engine.core.loop import EngineCore
from engine.core.request import EngineRequest, FinishReason

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

REQUESTS, ROUND = 5000, 1000
IN_FLIGHT = 192  # more than run at once, so that some wait


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Fewer pages than 128 requests want: some are preempted."""
    model = checkpoint(tmp_path_factory.mktemp("soak") / "qwen3", "qwen3")
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 1024, "max_model_len": 512}
    return on_gpu(model, kv_cache_memory_bytes=10 << 20, **sizes)


class Traffic:
    """Requests of every kind. One in five leaves at a random moment: waiting, in its prompt, or while it answers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.documents = [self.tokens(150) for _ in range(12)]  # beginnings that several requests share

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, VOCAB) for _ in range(count)]

    def params(self) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            max_tokens=rng.randint(1, 160), n=rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 3)), ignore_eos=rng.random() < 0.7,
            seed=rng.choice((None, rng.randrange(2**63))), temperature=rng.choice((0, 0.7, 1.0, 1.5)),
            top_k=rng.choice((0, 0, 0, 5, 50)), top_p=rng.choice((1, 1, 1, 0.8)), min_p=rng.choice((0, 0, 0, 0.05)),
            presence_penalty=rng.choice((0, 0, 0, 0.5)), frequency_penalty=rng.choice((0, 0, 0, 0.4)),
            repetition_penalty=rng.choice((1, 1, 1, 1.2)), logprobs=rng.choice((None, None, None, 0, 5)),
            prompt_logprobs=rng.choice((None,) * 9 + (2,)), logit_bias=rng.choice(({}, {}, {}, {7: 2.0})),
            stop_token_ids=rng.choice(([], [], [5, 6, 7])),
        )  # fmt: skip

    def requests(self, number: int) -> list[EngineRequest]:
        """One request of a client: as many sequences as it wants answers, as the front end fans them out."""
        rng, params = self.rng, self.params()
        prompt = self.tokens(rng.randint(1, 200))
        if rng.random() < 0.4:
            prompt = (rng.choice(self.documents) + prompt)[: rng.randint(1, 200)]
        seeds = [None if params.seed is None else params.seed + i for i in range(params.n)]
        return [
            EngineRequest(f"{number}-{i}", prompt, dataclasses.replace(params, n=1, seed=seed))
            for i, seed in enumerate(seeds)
        ]

    def moment_to_leave(self) -> int | None:
        """After how many steps the client goes away, if it does."""
        return self.rng.choice((0, 1, 2, 3, 5, 10, 20)) if self.rng.random() < 0.2 else None


def test_five_thousand_requests_leave_nothing_behind(llm: LLM) -> None:
    core, traffic = llm.engine, Traffic(1)
    started, steps, number = time.monotonic(), 0, 0
    ends: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)
    memory = []
    for _ in range(REQUESTS // ROUND):
        alive: dict[str, tuple[EngineRequest, list[int]]] = {}
        leaving: dict[str, int] = {}
        for _ in range(ROUND):
            while len(alive) >= IN_FLIGHT:
                steps += 1
                advance(core, alive, leaving, ends, steps)
            leave = traffic.moment_to_leave()
            for request in traffic.requests(number):
                core.add_request(request)
                alive[request.request_id] = request, []
                if leave is not None:
                    leaving[request.request_id] = steps + leave
            number += 1
        while core.has_work():
            steps += 1
            advance(core, alive, leaving, ends, steps)
        assert not alive, f"requests that never ended: {sorted(alive)[:10]}"
        assert_idle(core)
        torch.cuda.synchronize()
        memory.append(torch.cuda.memory_allocated())
    seconds = time.monotonic() - started
    stats = core.stats()
    print(f"{number} requests, {steps} steps, {seconds:.1f} s; ends {ends}; preempted {stats.num_preemptions}, "
          f"tokens found in the prefix cache {stats.prefix_hits}; bytes allocated after each round {memory}")
    assert number == REQUESTS
    assert ends[FinishReason.ERROR] == stats.step_failures == 0
    assert ends[FinishReason.ABORT] > REQUESTS / 10
    assert ends[FinishReason.LENGTH] > REQUESTS / 3
    assert stats.prefix_hits > 10_000
    assert stats.num_preemptions > 10
    assert abs(memory[-1] - memory[0]) < 1 << 20, memory

    core.reset_prefix_cache()
    pool = core.kv.pool
    assert (pool.num_free, len(pool._cached)) == (pool.capacity, 0), "pages are lost"


def advance(core: EngineCore, alive: dict, leaving: dict, ends: dict, now: int) -> None:
    """One step, and what clients do between two steps."""
    late = [rid for rid, when in leaving.items() if when <= now]
    core.abort(late)
    for rid in late:
        del leaving[rid]
    for output in core.step():
        assert output.error is None, output
        request, tokens = alive[output.request_id]
        tokens += output.new_token_ids
        assert len(tokens) <= (request.params.max_tokens or 0)
        if output.finish_reason is not None:
            ends[output.finish_reason] += 1
            if output.finish_reason is FinishReason.LENGTH:
                assert len(tokens) == request.params.max_tokens, output
            del alive[output.request_id]
            leaving.pop(output.request_id, None)
    if now % 16 == 0:
        core.check()
