"""Starts a preset of the white paper in its real shape with random weights, serves with it, and prints what it did.

    python preset_child.py STARTED MODEL_DIR [flags of atoll serve, as the preset has them]

STARTED: time.time() when the process was asked for. Started by test_gpu_presets.py; needs no package of the server's.
"""

import dataclasses
import json
import logging
import sys
import time
from typing import Any

STARTED, ARGV = float(sys.argv[1]), sys.argv[2:]
REQUESTS, TOKENS = 10, 16  # two more than the Gemma presets run at a time
REPEATED = 8192            # tokens of a prompt that comes twice


def main() -> None:
    import torch

    from engine.llm import LLM
    from engine.server.settings.commands import parse_serve

    imported = time.time()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    config = parse_serve(ARGV).engine
    knobs = {knob.name: getattr(config, knob.name) for knob in dataclasses.fields(config)}
    llm = LLM(**knobs | {"load_format": "dummy", "skip_tokenizer_init": True})
    ready = time.time()
    core = llm.engine
    runner: Any = core.runner
    generator = torch.Generator().manual_seed(1)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, core.vocab_size, (length,), generator=generator).tolist()

    served = serve(core, [prompt(50 + 200 * i) for i in range(REQUESTS)], TOKENS)
    stem = prompt(REPEATED)
    once = serve(core, [[*stem, 5, 6, 7]], 4)
    twice = serve(core, [[*stem, 7, 6, 5]], 4)
    longest = serve(core, [prompt(core.max_model_len - 8)], 8)
    stats = core.stats()
    info = core.info()
    report = {
        "seconds to import": imported - STARTED, "seconds to be ready": ready - STARTED,
        "max_model_len": core.max_model_len, "max_num_seqs": core.max_num_seqs, "plan": info["memory_plan"],
        "device": info["device"], "served": served, "once": once, "twice": twice, "longest": longest,
        "pages in use": stats.pages_in_use, "preemptions": stats.num_preemptions, "failures": stats.step_failures,
        "windows": core.kv.memory.windows, "has states": core.kv.memory.has_state,
        "cache dtypes": sorted({str(kv[0].dtype) for kv in runner.cache.kv.values()}),
        "quantized": sum(p.dtype == torch.float8_e4m3fn for p in runner.model.parameters()),
    }  # fmt: skip
    print("REPORT " + json.dumps(report), flush=True)


def serve(core, prompts: list[list[int]], max_tokens: int) -> dict:
    """Greedy answers to all prompts, which come at once."""
    from engine.core.params import SamplingParams
    from engine.core.request import EngineRequest

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    began, running, steps, cached = time.time(), 0, 0, 0
    tokens: dict[str, int] = {}
    lowest, errors = 0.0, []
    for i, ids in enumerate(prompts):
        core.add_request(EngineRequest(f"r{i}", ids, params))
    while core.has_work():
        for out in core.step():
            tokens[out.request_id] = tokens.get(out.request_id, 0) + len(out.new_token_ids)
            cached = max(cached, out.num_cached_tokens)
            lowest = min([lowest, *(entry.logprob for entry in out.logprobs or [])])
            errors += [out.error] if out.error else []
        running, steps = max(running, len(core.scheduler.running)), steps + 1
    core.check()
    return {
        "tokens": sorted(tokens.values()), "running": running, "steps": steps, "cached": cached, "lowest": lowest,
        "errors": errors, "seconds": time.time() - began,
    }  # fmt: skip


if __name__ == "__main__":
    main()
