"""A GPU's runner without one: every kernel of its steps runs in Triton's interpreter.

    python run_steps.py FAMILY        one of gpu_kit's families

Prints, as JSON, the tokens and their logprobs that requests got from the CPU's runner and from the GPU's, both in
float32: prompts in chunks, several at once, beside sequences that decode. Run by test_device_steps.py in a process of
its own.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from gpu_kit import checkpoint
from interpreter import mend
from note_steps import CPU, stand_in_for_a_gpu

from engine.config import EngineConfig
from engine.core.loop import EngineCore
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.worker.startup.build import build_engine

BUDGET, MAX_LEN = 30, 160
PROMPTS = [[(7 * i + n) % 900 + 3 for n in range(length)] for i, length in enumerate((50, 5, 1))]


def main(family):
    with tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(
            checkpoint(Path(directory) / "model", family), device="cpu", dtype="float32", max_model_len=MAX_LEN,
            max_num_batched_tokens=BUDGET, max_num_seqs=4, block_size=16, kv_cache_memory_bytes=32 << 20,
        )  # fmt: skip
        on_cpu = build_engine(config)
    said = {"cpu": tokens_of(on_cpu)}
    said["gpu"] = tokens_of(as_on_gpu(on_cpu, config))
    print(json.dumps(said))


def as_on_gpu(on_cpu, config, seqs=4, **options):
    stand_in_for_a_gpu()
    from engine.worker.cache import Cache
    from engine.worker.device_runner import DeviceRunner

    model, spec, memory = on_cpu.runner.model, on_cpu.runner.cache.spec, on_cpu.kv.memory
    runner = DeviceRunner(
        model, spec, num_rows=seqs + 1, max_model_len=MAX_LEN, max_num_tokens=BUDGET, device=CPU, **options
    )
    with torch.inference_mode():
        runner.bind_cache(Cache(spec, on_cpu.runner.cache.num_slabs, torch.float32, CPU))
    return EngineCore(
        config, runner, memory=memory, max_model_len=MAX_LEN, max_num_seqs=seqs,
        max_num_batched_tokens=BUDGET, vocab_size=model.config.vocab_size, depth=2,
    )  # fmt: skip


def tokens_of(core):
    tokens = [[] for _ in PROMPTS]
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0, max_tokens=2 + i, ignore_eos=True, logprobs=0)
        core.add_request(EngineRequest(str(i), prompt, params))
    while core.has_work():
        for output in core.step():
            tokens[int(output.request_id)] += [(entry.token_id, entry.logprob) for entry in output.logprobs or ()]
    return tokens


if __name__ == "__main__":
    mend()
    main(sys.argv[1])
