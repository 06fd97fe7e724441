"""The sampling parameters of a request, with vLLM's names and defaults.

Ranges are checked only here, for the HTTP endpoint and the offline API alike.
"""

import math
from dataclasses import dataclass, field

from engine.errors import InvalidRequestError

MAX_LOGPROBS = 20  # OpenAI's and vLLM's bound on top_logprobs
MAX_STOP_STRINGS = 64
MAX_SEED = 2**63
MIN_REPETITION_PENALTY = 1e-3  # logits divided by much less are infinite in float32


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    temperature 0 is greedy. `top_k` 0 or -1 means all tokens. `seed` None draws one at random; with a seed, the result
    depends only on (seed, position, logits) and never on what else is in the batch. `stop` strings end the text before
    the string (or after it with `include_stop_str_in_output`); `stop_token_ids` and the model's end tokens end it at
    the token. `logprobs`/`prompt_logprobs` ask for that many alternatives per position (0: only the token itself).
    `grammar` is the grammar that the answer must follow, in llguidance's form (made by engine.text.grammar.forms).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_token_ids: list[int] = field(default_factory=list)
    grammar: str | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.logit_bias = {int(k): float(v) for k, v in (self.logit_bias or {}).items()}
        if self.top_k == -1:
            self.top_k = 0
        self._verify()

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def _verify(self) -> None:
        in_range(self.n, "n", 1, 128)
        in_range(self.temperature, "temperature", 0, 100)
        in_range(self.top_p, "top_p", 0, 1, low_open=True)
        in_range(self.top_k, "top_k", 0, 2**31 - 1)
        in_range(self.min_p, "min_p", 0, 1)
        in_range(self.presence_penalty, "presence_penalty", -2, 2)
        in_range(self.frequency_penalty, "frequency_penalty", -2, 2)
        in_range(self.repetition_penalty, "repetition_penalty", MIN_REPETITION_PENALTY, 100)
        if self.seed is not None:
            in_range(self.seed, "seed", -MAX_SEED, 2**64 - 1)
        if self.max_tokens is not None:
            in_range(self.max_tokens, "max_tokens", 1, 2**31 - 1)
        in_range(self.min_tokens, "min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).", "min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                in_range(value, name, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"At most {MAX_STOP_STRINGS} stop strings are allowed.", "stop")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequestError("Stop strings must be non-empty strings.", "stop")
        for token, bias in self.logit_bias.items():
            if not (math.isfinite(bias) and -100 <= bias <= 100):
                raise InvalidRequestError(f"logit_bias of token {token} must lie in [-100, 100].", "logit_bias")


def in_range(value: float, name: str, low: float, high: float, *, low_open: bool = False) -> None:
    """Raise InvalidRequestError unless low <= value <= high (low < value when `low_open`) and value is a number."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value < low or value > high or (low_open and value == low):
        shown = repr(value)[:40]
        raise InvalidRequestError(
            f"{name} must be a number {'above' if low_open else 'of at least'} {low} and at most {high}, got {shown}.",
            name,
        )
