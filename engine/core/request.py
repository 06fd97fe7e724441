"""Requests and outputs of the engine, and its statistics. No torch here."""

import enum
from dataclasses import dataclass, field
from typing import Literal

from engine.core.params import SamplingParams

Pooling = Literal["last", "mean"]  # which hidden states make an embedding: the last token's, or the mean of all


class FinishReason(enum.StrEnum):
    STOP = "stop"      # an end token, a stop token or a stop string; or the embedding is done
    LENGTH = "length"  # max_tokens or the context is full
    ABORT = "abort"    # the client went away
    ERROR = "error"    # a step failed; `StepOutput.error` says how


@dataclass(slots=True)
class EngineRequest:
    """What the gateway submits. One request is one sequence: the gateway splits requests with `n` > 1."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0        # lower runs first (vLLM's order)
    cache_salt: str = ""     # prefix-cache hits happen only between equal salts (tenants)
    arrival_time: float = 0  # time.monotonic() of the submitter; set by the engine when 0
    owner: str = ""          # owners take turns in the queue; a digest or an id, never a secret
    pooling: Pooling | None = None  # the answer is an embedding of the prompt, and no token is sampled


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the distribution before temperature, penalties and filters."""

    token_id: int
    logprob: float
    rank: int                       # 1 = the most likely token
    top: list[tuple[int, float]] = field(default_factory=list)  # (token id, logprob), best first


@dataclass(slots=True)
class RequestTimes:
    """Seconds on CLOCK_MONOTONIC, which all processes of a machine share; and how often the request was preempted."""

    arrival: float = 0
    scheduled: float = 0
    first_token: float = 0
    finished: float = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """An `InvalidRequestError` as data, for a request that turned out to be invalid after it had been accepted."""

    message: str
    param: str | None = None
    code: str | None = None


@dataclass(slots=True)
class StepOutput:
    """What one step produced for one request. Sent when there is a new token or the request ended; also once when its
    grammar has been compiled, then with neither."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None                 # one entry per new token, if asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None   # once, with the first token; [0] is None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None      # the stop token that ended it; None for the model's own end token
    num_cached_tokens: int = 0          # prompt tokens that came from the prefix cache
    error: str | None = None
    times: RequestTimes | None = None   # with the last output
    complete: bool = False              # STOP because the grammar ended: the last token is part of the answer
    refusal: Refusal | None = None      # with ERROR: the fault is the request's own
    embedding: bytes | None = None      # little-endian float32, as the model's last norm left it; see `pooling`


@dataclass(slots=True)
class EngineStats:
    """A snapshot after a step. Counters only grow; gauges are current values."""

    num_running: int = 0
    num_waiting: int = 0
    pages_total: int = 0
    pages_in_use: int = 0               # referenced by a request (cached but idle pages count as free)
    kv_usage: float = 0.0               # pages_in_use / pages_total
    steps: int = 0
    last_step_time: float = 0.0         # time.monotonic() when the last step completed
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0             # tokens looked up
    prefix_hits: int = 0                # tokens found
    num_preemptions: int = 0
    step_failures: int = 0
    slots_total: int = 0                # of recurrent states; 0 where no layer keeps one
    slots_in_use: int = 0
