"""A GPU's runner in Triton's interpreter: requests alone and beside others, with `--batch-invariant` and without.

    python run_invariant.py FAMILY        one of gpu_kit's families

Prints, as JSON, for both: tokens and log-probabilities of prompt and answer of each request, alone, together, and with
other chunks of prompts. Run by test_batch_invariant.py in a process of its own.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from gpu_kit import FAMILIES, SHAPE
from interpreter import exact_products, mend
from note_steps import CPU, stand_in_for_a_gpu

from engine.config import EngineConfig
from engine.core.kv.spec import CacheSpec
from engine.core.loop import EngineCore
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.models.batch_invariant import make_batch_invariant
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import fill_randomly
from engine.models.registry import model_class

MAX_LEN = 160
PROMPTS = [[(7 * i + n * n) % 290 + 3 for n in range(length)] for i, length in enumerate((24, 3, 1, 9))]
SMALL = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300, "vocab_size_per_layer_input": 300}


def a_model(family, *, invariant):
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPE | FAMILIES[family] | SMALL))
        config = ModelConfig.load(Path(directory))
    model = model_class(config)(config, 1024).eval()
    if invariant:
        make_batch_invariant(model)
    with torch.inference_mode():
        fill_randomly(model, device=CPU)
    return model


def answers(model, budget, groups):
    """(token, logprob) of every position of each request; `groups`: which requests run at once."""
    from engine.worker.cache import Cache
    from engine.worker.device_runner import DeviceRunner

    spec = CacheSpec(tuple(model.cache_layers()), 4, 16)
    slabs = spec.slabs_for(MAX_LEN, budget, 12) + 4
    runner = DeviceRunner(model, spec, num_rows=9, max_model_len=MAX_LEN, max_num_tokens=budget, device=CPU)
    with torch.inference_mode():
        runner.bind_cache(Cache(spec, slabs, torch.float32, CPU))
    core = EngineCore(
        EngineConfig("none", enable_prefix_caching=False), runner, memory=spec.memory(slabs), max_model_len=MAX_LEN,
        max_num_seqs=8, max_num_batched_tokens=budget, vocab_size=model.config.vocab_size, depth=2,
    )  # fmt: skip
    found = [[] for _ in PROMPTS]
    for group in groups:
        for i in group:
            scores = 0 if i % 2 else None
            params = SamplingParams(
                temperature=i % 2, seed=i, max_tokens=2, ignore_eos=True, logprobs=0, prompt_logprobs=scores
            )
            core.add_request(EngineRequest(str(i), PROMPTS[i], params))
        while core.has_work():
            for output in core.step():
                assert output.error is None, output.error
                entries = [*(output.prompt_logprobs or ())[1:], *(output.logprobs or ())]
                found[int(output.request_id)] += [(entry.token_id, entry.logprob) for entry in entries]
    return found


def main(family):
    stand_in_for_a_gpu()
    said = {}
    for name, invariant in (("invariant", True), ("usual", False)):
        model = a_model(family, invariant=invariant)
        alone, together = [[i] for i in range(len(PROMPTS))], [list(range(len(PROMPTS)))]
        said[name] = [answers(model, 40, alone), answers(model, 9, together)]
        if invariant:
            said[name].append(answers(model, 40, together))
    print(json.dumps(said))


if __name__ == "__main__":
    mend()
    exact_products()
    main(sys.argv[1])
