"""256 requests at once that share a long prompt: a step then admits them all, with every token of theirs to note."""

from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.alone]  # with the flags' defaults, of the memory too
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

MODEL = "engine/bench/configs/qwen3-0.6b"
REQUESTS, TOKENS = 256, 6


def engine(**flags: Any) -> LLM:
    return LLM(model=MODEL, load_format="dummy", skip_tokenizer_init=True, device="cuda", seed=0, **flags)


def answers(llm: LLM, prefix: int) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Tokens and log-probabilities of requests that differ in their last token."""
    shared = [10 + i * 7 % 1000 for i in range(prefix)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    llm.generate([{"prompt_token_ids": shared}], params, use_tqdm=False)  # from now on in the prefix cache
    asked = [{"prompt_token_ids": [*shared, 2000 + i]} for i in range(REQUESTS)]
    outputs = [output.outputs[0] for output in llm.generate(asked, params, use_tqdm=False)]
    return [(o.token_ids, [{t: e.logprob for t, e in entry.items()} for entry in o.logprobs or ()]) for o in outputs]


def test_every_request_finishes() -> None:
    llm = engine()
    for prefix in (1024, 2000, 2100, 3000):
        found = answers(llm, prefix)
        assert [len(tokens) for tokens, _ in found] == [TOKENS] * REQUESTS, f"{prefix} tokens shared"
    stats = llm.engine.stats()
    assert stats.step_failures == 0
    assert stats.prefix_hits > 3 * REQUESTS * 1024


@pytest.mark.parametrize("prefix", [1024, 2100])
def test_what_is_found_in_the_prefix_cache_changes_no_bit(prefix: int) -> None:
    """Exactly, which is promised with --batch-invariant."""
    cached = answers(engine(batch_invariant=True), prefix)
    assert cached == answers(engine(batch_invariant=True, enable_prefix_caching=False), prefix)
