"""A GPU's runner without one, whose sequences share prefixes: every kernel runs in Triton's interpreter.

    python run_shared_prefix.py

Prints, as JSON, the tokens and their logprobs that requests got from the CPU's runner, from the GPU's, and from the
GPU's without sharing, all in float32; and for each step of the GPU's, how many tokens each decoding sequence shared.
Run by test_device_steps.py in a process of its own.
"""

import json
import tempfile
from pathlib import Path

import run_steps  # sets Triton's mode  # isort: skip
import note_steps
from gpu_kit import checkpoint
from interpreter import mend
from run_steps import as_on_gpu

from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.kernels.attention import shared_prefix
from engine.worker.shared_prefix import SharedPrefixes
from engine.worker.startup.build import build_engine

SEQS = 12
COMMON = [(5 * i) % 900 + 3 for i in range(50)]  # three pages of 16, and two tokens more
# Nine begin alike, two of them more so; two share nothing; one is its own prefix.
PROMPTS = [COMMON + [n + 3, 2 * n + 3][: 1 + n % 2] for n in range(7)]
PROMPTS += [COMMON + list(range(100, 120)) + [n] for n in (7, 8)] + [[9, 10, 11], list(range(20, 75)), COMMON]
LATE = 4  # requests that come when the others decode


def main():
    shared_prefix._LEAST_READ = 1  # else so few tokens would not pay
    note_steps.MULTIPROCESSORS = 16  # with more, nine of ten programs would be slices in which nothing is
    with tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(
            checkpoint(Path(directory) / "model", "qwen3"), device="cpu", dtype="float32",
            max_model_len=run_steps.MAX_LEN, max_num_batched_tokens=run_steps.BUDGET, max_num_seqs=SEQS, block_size=16,
            kv_cache_memory_bytes=32 << 20,
        )  # fmt: skip
        on_cpu = build_engine(config)
    said = {"cpu": tokens_of(on_cpu), "shared": []}
    find = SharedPrefixes.find

    def note(self, rows, positions):
        found = find(self, rows, positions)
        said["shared"].append(found if found is None else found.tolist())
        return found

    SharedPrefixes.find = note
    said["gpu"] = tokens_of(as_on_gpu(on_cpu, config, SEQS))
    said["alone"] = tokens_of(as_on_gpu(on_cpu, config, SEQS, share_prefixes=False))
    print(json.dumps(said))


def tokens_of(core):
    tokens = [[] for _ in PROMPTS]
    requests = [
        EngineRequest(str(i), prompt, SamplingParams(temperature=0, max_tokens=14 - i, ignore_eos=True, logprobs=0))
        for i, prompt in enumerate(PROMPTS)
    ]
    for request in requests[:-LATE]:
        core.add_request(request)
    late = requests[-LATE:]
    while core.has_work():
        for output in core.step():
            tokens[int(output.request_id)] += [(entry.token_id, entry.logprob) for entry in output.logprobs or ()]
        core.check()
        if late and all(tokens[:-LATE]):
            for request in late:
                core.add_request(request)
            late = []
    return tokens


if __name__ == "__main__":
    mend()
    main()
