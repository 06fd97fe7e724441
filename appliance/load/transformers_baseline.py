"""The baseline without any serving engine: Hugging Face transformers' `generate` on this machine.

Waiting requests are answered in static batches of `batch_size`, as a first server around `generate` would do: a batch
runs until its longest answer is done, and requests that arrive meanwhile wait. Needs transformers, which an installed
Atoll lacks: use it on a machine that has both, or for a comparison on the publishing side.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.load import outcome as kinds
from appliance.load.outcome import Outcome
from appliance.load.prompts import Request, WordCost, content_of, measured_cost, words
from installer.base.errors import usage_error
from installer.base.i18n import t


@dataclass(slots=True)
class _Job:
    request: Request
    outcome: Outcome
    begun: float
    done: "asyncio.Future[None]"
    loop: asyncio.AbstractEventLoop
    last: float = 0.0
    tokens: int = 0

    def finish(self) -> None:
        def mark() -> None:
            if not self.done.done():
                self.done.set_result(None)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(mark)

    def token(self, token: int, now: float, ends: set[int]) -> None:
        """One more token at `now`. The answer ends at its length, or at an end token if these count."""
        if self.done.done() or self.tokens >= self.request.tokens_out or self.outcome.finish_reason:
            return
        outcome = self.outcome
        if self.tokens == 0:
            outcome.ttft = now - self.begun
        else:
            outcome.gaps.append(now - self.last)
        self.tokens, self.last = self.tokens + 1, now
        outcome.e2e, outcome.tokens_out = now - self.begun, self.tokens
        if token in ends or self.tokens >= self.request.tokens_out:
            outcome.finish_reason = "stop" if token in ends else "length"
            self.finish()


class TransformersSender:
    """A `Sender` (senders.py) that runs the model in this process."""

    backend = "transformers"

    def __init__(self, model_dir: Path, *, batch_size: int = 1, sampling: Mapping[str, Any], ignore_eos: bool) -> None:
        self._dir, self._batch_size, self._ignore_eos = model_dir, batch_size, ignore_eos
        self._sampling = sampling
        self.model = model_dir.name
        self.context: int | None = None
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    async def open(self) -> None:
        """Load the model. Raises InstallError if transformers is missing or cannot read it."""
        try:
            await asyncio.to_thread(self._load)
        except ImportError:
            raise usage_error(
                t("transformers is not installed here."),
                t("Measure the baseline on a machine that has it, save it, and compare: atoll bench compare A B"),
            ) from None
        except (OSError, ValueError, KeyError) as error:
            raise usage_error(
                t("transformers cannot load {path}: {why}", path=self._dir, why=str(error)[:300]),
                t("Name a directory with config.json, tokenizer.json and safetensors: --model DIR"),
            ) from None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        where = str(self._dir)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(where, local_files_only=True, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype="auto", local_files_only=True, use_safetensors=True
        )
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.to(self._device).eval()
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        ends = self._model.generation_config.eos_token_id
        self._ends: set[int] = {ends} if isinstance(ends, int) else set(ends or ())
        if self._ignore_eos:
            self._model.generation_config.eos_token_id, self._ends = None, set()
        self._model.generation_config.pad_token_id = self._tokenizer.pad_token_id or 0
        length = getattr(self._model.config, "max_position_embeddings", None)
        self.context = length if isinstance(length, int) else None

    async def cost(self, endpoint: str) -> WordCost:
        import random

        rng = random.Random(7)  # noqa: S311 - words, no secret
        short, long = ((n, len(self._ids(content_of(words(rng, n), endpoint)))) for n in (16, 96))
        return measured_cost(short, long)

    async def ask(self, request: Request, timeout: float, zero: float) -> Outcome:
        begun = time.perf_counter()
        loop = asyncio.get_running_loop()
        job = _Job(request, Outcome(start=begun - zero, has_usage=True), begun, loop.create_future(), loop)
        self._waiting.put(job)
        try:
            await asyncio.wait_for(job.done, timeout)
        except TimeoutError:
            job.outcome.e2e = time.perf_counter() - begun
            return job.outcome.failed(kinds.TIMEOUT, t("no complete answer within {seconds} s",
                                                       seconds=f"{timeout:g}"))  # fmt: skip
        return job.outcome

    async def close(self) -> None:
        self._stop.set()
        self._waiting.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 30)

    def _ids(self, content: dict[str, Any]) -> list[int]:
        if "messages" in content:
            found = self._tokenizer.apply_chat_template(content["messages"], add_generation_prompt=True)
            return list(found["input_ids"] if isinstance(found, Mapping) else found)
        return self._tokenizer(content["prompt"])["input_ids"]

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch = [first]
            while len(batch) < self._batch_size and not self._waiting.empty():
                job = self._waiting.get()
                if job is None:
                    return
                batch.append(job)
            try:
                self._generate([job for job in batch if not job.done.done()])
            except Exception as error:  # a request that fails must not end the run
                for job in batch:
                    job.outcome.failed("transformers", str(error))
            for job in batch:
                job.finish()

    def _generate(self, batch: list[_Job]) -> None:
        if not batch:
            return
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        prompts = [self._ids(job.request.content) for job in batch]
        for job, prompt in zip(batch, prompts, strict=True):
            job.outcome.tokens_in = len(prompt)
        longest = max(map(len, prompts))
        pad = self._model.generation_config.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        stopped = self._stop

        class Stop(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
                over = stopped.is_set() or all(job.done.done() for job in batch)
                return torch.full((input_ids.shape[0],), over, dtype=torch.bool, device=input_ids.device)

        temperature = self._sampling.get("temperature") or 0
        chosen = {"do_sample": False}
        if temperature:
            chosen = {"do_sample": True, "temperature": temperature, "top_p": self._sampling.get("top_p") or 1.0}
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=mask, max_new_tokens=max(job.request.tokens_out for job in batch),
                streamer=_Tokens(batch, self._ends), stopping_criteria=StoppingCriteriaList([Stop()]), **chosen,
            )  # fmt: skip


class _Tokens:
    """A streamer for `generate`: it gets the prompts first, then the new tokens of each step."""

    def __init__(self, batch: list[_Job], ends: set[int]) -> None:
        self._batch, self._ends, self._begun = batch, ends, False

    def put(self, value: Any) -> None:
        if not self._begun:
            self._begun = True
            return
        now = time.perf_counter()
        for job, token in zip(self._batch, value.reshape(-1).tolist(), strict=True):
            job.token(token, now, self._ends)

    def end(self) -> None:
        pass
