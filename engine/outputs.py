"""What the offline API returns: the same objects as vLLM's, so that scripts written for vLLM work unchanged."""

from dataclasses import dataclass, field

from engine.core.request import RequestTimes


@dataclass(slots=True)
class Logprob:
    """One alternative at one position. `rank` 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsAtPosition = dict[int, Logprob]


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the monotonic clock: only differences are meaningful."""

    arrival_time: float = 0
    first_scheduled_time: float = 0
    first_token_time: float = 0
    finished_time: float = 0

    @classmethod
    def from_times(cls, times: RequestTimes) -> "RequestMetrics":
        return cls(times.arrival, times.scheduled, times.first_token, times.finished)

    @property
    def time_to_first_token(self) -> float:
        return self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float:
        return self.finished_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAtPosition] | None = None
    finish_reason: str | None = None        # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None    # the stop token id or stop string that ended it; None for the end token


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[LogprobsAtPosition | None] | None = None
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
