"""The outcome of one request."""

from dataclasses import dataclass, field

import numpy as np

# Kinds of errors, under which results count them.
CONNECT = "connect"         # no connection, or it broke before an answer began
TIMEOUT = "timeout"
TRUNCATED = "truncated"     # the stream ended without a finish_reason or without [DONE]
MALFORMED = "malformed"     # an answer that is not HTTP, not an event stream, or not a chunk
STREAM_ERROR = "stream_error"   # the server reported inside the stream that it failed
EMPTY = "empty"             # a complete stream without a token


@dataclass(slots=True)
class Outcome:
    """Times are in seconds; `start` is on the clock of the run. `gaps` are the waits between two arrivals of text.
    `error` is a kind ("http_429", "timeout", …), None for a good answer."""

    start: float = 0.0
    ttft: float = 0.0
    e2e: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens_in: int = 0
    tokens_out: int = 0
    has_usage: bool = False
    finish_reason: str | None = None
    status: int = 0
    text: str = ""
    error: str | None = None
    detail: str = ""
    warmup: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token, as vLLM counts it."""
        return (self.e2e - self.ttft) / (self.tokens_out - 1) if self.tokens_out > 1 else 0.0

    @property
    def itl_p95(self) -> float:
        return float(np.percentile(self.gaps, 95)) if self.gaps else 0.0

    def failed(self, kind: str, detail: str = "") -> "Outcome":
        self.error, self.detail = kind, detail[:500]
        return self
