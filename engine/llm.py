"""The offline API: `LLM(model=path).generate(prompts, params)`, in vLLM's call shape."""

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason, Pooling, StepOutput, TokenLogprobs
from engine.embedding import finished
from engine.errors import AtollError, ConfigError, InvalidRequestError
from engine.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    LogprobsAtPosition,
    RequestMetrics,
    RequestOutput,
)
from engine.text.conversation import encode_chat
from engine.text.detok import Detokenizer
from engine.text.tokenizer import TextTokenizer
from engine.worker.startup.build import build_engine

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]

# str, {"prompt": str}, {"prompt_token_ids": [int]} or [int]
Prompt = str | dict[str, Any] | list[int]

_CONFIG_FIELDS = {f.name for f in dataclasses.fields(EngineConfig)}
_HARMLESS = {"disable_log_stats", "swap_space", "disable_custom_all_reduce", "tokenizer_mode", "enable_log_requests"}


class LLM:
    """A model in this process, for batches of prompts.

    >>> llm = LLM(model="/models/SmolLM2-135M-Instruct")
    >>> [output] = llm.generate("The capital of France is", SamplingParams(max_tokens=8))
    >>> output.outputs[0].text

    Keyword arguments are the fields of EngineConfig, which carry vLLM's names. Prompts given as text are trusted:
    control tokens in them count (the HTTP endpoint treats them as plain text). Raises ModelError, ConfigError or
    OutOfMemoryPlanError with the reason when the model cannot run here.
    """

    def __init__(self, model: str | Path, *, tokenizer: str | Path | None = None, **kwargs: Any) -> None:
        if kwargs.pop("trust_remote_code", False):
            raise ConfigError("trust_remote_code: Atoll never runs code from a model's repository.",
                              "--trust-remote-code")
        for name in _HARMLESS & kwargs.keys():
            del kwargs[name]
        if unknown := kwargs.keys() - _CONFIG_FIELDS:
            known = ", ".join(sorted(_CONFIG_FIELDS))
            raise TypeError(f"LLM() has no argument {sorted(unknown)[0]!r}; it takes {known}")
        kwargs.setdefault("max_itl_ms", 0)  # nobody reads the answers while they are written
        config = EngineConfig(Path(model), **kwargs)
        self._pooling: Pooling = config.pooling
        self.tokenizer = None if config.skip_tokenizer_init else TextTokenizer.load(tokenizer or config.model)
        self.engine = build_engine(config)
        self._ids = itertools.count()

    def get_tokenizer(self) -> TextTokenizer:
        if self.tokenizer is None:
            raise ConfigError("There is no tokenizer: the LLM was made with skip_tokenizer_init.")
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts; results in their order. A bad prompt raises InvalidRequestError before any work starts.

        `sampling_params`: one for all prompts, or one for each. After an exception (or Ctrl-C), nothing stays queued.
        """
        from tqdm import tqdm  # only the offline API draws a bar; the engine process runs without the package

        if isinstance(prompts, str | dict) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item]
        params = self._params_for(len(prompts), sampling_params)
        jobs = [_Job(self, str(next(self._ids)), prompt, p)  # type: ignore[arg-type]
                for prompt, p in zip(prompts, params, strict=True)]
        children: dict[str, _Child] = {}
        try:
            for i, job in enumerate(jobs):
                for child in job.children:
                    self.engine.add_request(
                        EngineRequest(child.request_id, job.output.prompt_token_ids, child.params,
                                      priority=priority[i] if priority else 0)
                    )
                    children[child.request_id] = child
            self._run(children, tqdm(total=len(jobs), unit="prompt", disable=not use_tqdm, file=sys.stderr,
                                     dynamic_ncols=True, desc="Generating"))
        except BaseException:
            self.engine.abort(children)
            while self.engine.has_work():
                self.engine.step()
            raise
        return [job.output for job in jobs]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's own chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self.get_tokenizer()
        prompts = [
            {"prompt_token_ids": encode_chat(tokenizer, list(c), kwargs=chat_template_kwargs)}  # type: ignore[arg-type]
            for c in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, in their order. `pooling` None: as the LLM was made (`pooling="last"`)."""
        if isinstance(prompts, str | dict) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item]
        found: dict[str, EmbeddingRequestOutput] = {}
        try:
            for prompt in prompts:
                _, ids = _tokens(self.tokenizer, prompt)  # type: ignore[arg-type]
                request = EngineRequest(str(next(self._ids)), ids, SamplingParams(), pooling=pooling or self._pooling)
                self.engine.add_request(request)
                found[request.request_id] = EmbeddingRequestOutput(request.request_id, EmbeddingOutput([]), ids)
            while self.engine.has_work():
                for step in self.engine.step():
                    if step.error is not None:
                        raise AtollError(f"Request {step.request_id} failed: {step.error}")
                    if step.embedding is not None:
                        vector = finished(step.embedding, dimensions, normalize=normalize)
                        output = found[step.request_id]
                        output.outputs.embedding = vector.tolist()
                        output.num_cached_tokens = step.num_cached_tokens
        except BaseException:
            self.engine.abort(found)
            while self.engine.has_work():
                self.engine.step()
            raise
        return list(found.values())

    def _params_for(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise ValueError(f"{count} prompts but {len(params)} sampling_params")
        return params

    def _run(self, children: dict[str, "_Child"], bar: "tqdm") -> None:
        done_tokens = prompt_tokens = 0
        with bar:
            while self.engine.has_work():
                for step in self.engine.step():
                    child = children.get(step.request_id)
                    if child is None:
                        continue
                    if not child.output.token_ids and step.new_token_ids:
                        prompt_tokens += len(child.job.output.prompt_token_ids)
                    done_tokens += len(step.new_token_ids)
                    child.take(step)
                    if child.finished_by_text:
                        self.engine.abort([step.request_id])
                    if child.job.finished_now():
                        bar.update()
                elapsed = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"in {prompt_tokens / elapsed:,.0f} tok/s, out {done_tokens / elapsed:,.0f} tok/s",
                                    refresh=False)


class _Job:
    """One prompt in progress: its output object and its `n` children."""

    def __init__(self, llm: LLM, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        text, ids = _tokens(llm.tokenizer, prompt)
        self.tokenizer = llm.tokenizer
        self.output = RequestOutput(request_id, text, ids, [CompletionOutput(i) for i in range(params.n)])
        self.children = [_Child(self, i, params) for i in range(params.n)]

    def finished_now(self) -> bool:
        """True exactly once, when the last child has ended."""
        if self.output.finished or any(c.output.finish_reason is None for c in self.children):
            return False
        self.output.finished = True
        return True


class _Child:
    """One of the n sequences of a prompt. With a seed, child i uses seed + i, so that n answers differ."""

    def __init__(self, job: _Job, index: int, params: SamplingParams) -> None:
        self.job = job
        self.request_id = f"{job.output.request_id}-{index}"
        self.output = job.output.outputs[index]
        seed = None if params.seed is None else params.seed + index
        self.params = dataclasses.replace(params, n=1, seed=seed) if params.n > 1 else params
        self.finished_by_text = False
        detokenize = job.tokenizer is not None and params.detokenize
        self._detok = Detokenizer(job.tokenizer, params) if detokenize and job.tokenizer else None
        if params.stop and self._detok is None:
            raise InvalidRequestError("Stop strings need detokenize=True and a tokenizer.", "stop")

    def take(self, step: StepOutput) -> None:
        out = self.output
        if out.finish_reason is not None:
            return
        if step.refusal is not None:
            raise InvalidRequestError(step.refusal.message, step.refusal.param, step.refusal.code)
        if step.error is not None:
            raise AtollError(f"Request {self.request_id} failed: {step.error}")
        count = len(step.new_token_ids)
        if self._detok is not None:
            delta = self._detok.push(
                step.new_token_ids,
                step.finish_reason is not None,
                stop_token=step.finish_reason is FinishReason.STOP and not step.complete,
            )
            out.text += delta.text
            count = delta.num_tokens
            if delta.stopped:
                self.finished_by_text = step.finish_reason is None
                out.finish_reason, out.stop_reason = FinishReason.STOP.value, delta.stop_string
        out.token_ids += step.new_token_ids[:count]
        if step.logprobs is not None:
            self._add_logprobs(step.logprobs[:count])
        self._add_prompt_facts(step)
        if step.finish_reason is not None and out.finish_reason is None:
            out.finish_reason, out.stop_reason = step.finish_reason.value, step.stop_reason
        if step.times is not None:
            self.job.output.metrics = RequestMetrics.from_times(step.times)

    def _add_logprobs(self, positions: list[TokenLogprobs]) -> None:
        out = self.output
        if out.logprobs is None:
            out.logprobs, out.cumulative_logprob = [], 0.0
        for position in positions:
            out.logprobs.append(self._alternatives(position))
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + position.logprob

    def _add_prompt_facts(self, step: StepOutput) -> None:
        output = self.job.output
        output.num_cached_tokens = max(output.num_cached_tokens, step.num_cached_tokens)
        if step.prompt_logprobs is not None and output.prompt_logprobs is None:
            output.prompt_logprobs = [None if p is None else self._alternatives(p) for p in step.prompt_logprobs]

    def _alternatives(self, position: TokenLogprobs) -> LogprobsAtPosition:
        found = {position.token_id: Logprob(position.logprob, position.rank, self._text(position.token_id))}
        for rank, (token_id, logprob) in enumerate(position.top, 1):
            found.setdefault(token_id, Logprob(logprob, rank, self._text(token_id)))
        return found

    def _text(self, token_id: int) -> str | None:
        return None if self.job.tokenizer is None else self.job.tokenizer.token_text(token_id)


def _tokens(tokenizer: TextTokenizer | None, prompt: Prompt) -> tuple[str | None, list[int]]:
    """(text, ids) of a prompt in any of its forms."""
    if isinstance(prompt, dict):
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), list(prompt["prompt_token_ids"])
        prompt = prompt.get("prompt", "")
    if isinstance(prompt, list):
        return None, list(prompt)
    if not isinstance(prompt, str):
        raise InvalidRequestError("A prompt is a string, a list of token ids, or a dict with one of them.", "prompt")
    if tokenizer is None:
        raise InvalidRequestError("Text prompts need a tokenizer; give prompt_token_ids.", "prompt")
    return prompt, tokenizer.encode_trusted(prompt)
