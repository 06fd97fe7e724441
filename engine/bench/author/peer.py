"""The peer: Hugging Face transformers' `generate`, one stream or static batches of left-padded prompts."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.bench.workloads import Workload


class Transformers:
    name = "transformers"

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        start = time.perf_counter()
        self.model: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype, local_files_only=True).eval()
        self.model.generation_config.eos_token_id = None  # exact output lengths, as ignore_eos does with us
        self.model.generation_config.pad_token_id = 0
        self.start_secs = time.perf_counter() - start

    def run(self, workload: Workload, batch_size: int = 1, tick: Callable[[int], object] = lambda _: None) -> float:
        """Seconds for all requests in static batches, in their order; `tick(requests)` after each batch.

        A batch runs until its longest request is done: that is what static batching costs.
        """
        start = time.perf_counter()
        for i in range(0, len(workload.prompts), batch_size):
            prompts = workload.prompts[i : i + batch_size]
            self._generate(prompts, max(workload.tokens_out[i : i + batch_size]))
            tick(len(prompts))
        return time.perf_counter() - start

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], tokens_out: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        got = self.model.generate(ids, attention_mask=mask, max_new_tokens=tokens_out, do_sample=False)
        if got.shape[1] != longest + tokens_out:
            raise RuntimeError("transformers ended a batch early")
