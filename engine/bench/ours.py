"""Our engine under a workload, through the offline API."""

import time
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams
from engine.bench.kv_meter import KVMeter
from engine.bench.workloads import Workload


class Ours:
    name = "atoll"

    def __init__(self, model: Path, **kwargs: Any) -> None:
        start = time.perf_counter()
        self.llm = LLM(model=model, **kwargs)
        self.start_secs = time.perf_counter() - start
        self.vocab_size = self.llm.engine.vocab_size
        self.formats = {"compute_dtype": self.llm.engine.info()["compute_dtype"]}
        self.meter = KVMeter(self.llm.engine)
        self._plain_step = self.llm.engine.step

    def run(
        self,
        workload: Workload,
        *,
        temperature: float = 0.0,
        bar: bool = False,
        meter: bool = False,
        keep_prefix_cache: bool = False,
    ) -> float:
        """Seconds from the first request's submission to the last token. The prefix cache starts empty, unless
        `keep_prefix_cache` is set."""
        engine = self.llm.engine
        if not keep_prefix_cache:
            engine.reset_prefix_cache()
        params = [
            SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False,
                           seed=i if temperature else None)  # greedy needs none, and some CPUs are slower with one
            for i, n in enumerate(workload.tokens_out)
        ]
        prompts = [{"prompt_token_ids": p} for p in workload.prompts]
        engine.step = self._metered_step if meter else self._plain_step
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=bar)
        seconds = time.perf_counter() - start
        got = [len(o.outputs[0].token_ids) for o in outputs]
        if got != workload.tokens_out:
            raise RuntimeError(f"{workload.name}: a request ended early; is --max-model-len large enough?")
        return seconds

    def _metered_step(self) -> list:
        outputs = self._plain_step()
        self.meter.sample()
        return outputs
