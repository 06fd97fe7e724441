"""The sampling parameters of the requests in flight, one stable row each."""

from collections.abc import Sequence

import numpy as np

from engine.core.params import SamplingParams
from engine.errors import InvalidRequestError


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError if `params` names tokens outside the vocabulary."""
    for name in ("logit_bias", "bad_token_ids", "stop_token_ids"):
        for token in getattr(params, name):
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"{name} names token {token}, but the vocabulary has {vocab_size} tokens.", name
                )


class ParamTable:
    """Parameters in stable rows, as arrays that a step indexes with its rows. A free row is greedy and plain."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.zeros(num_rows, dtype=np.float32)  # 0: greedy
        self.top_k = np.zeros(num_rows, dtype=np.int64)          # 0: all tokens
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.log_min_p = np.full(num_rows, -np.inf, dtype=np.float32)
        self.repetition = np.ones(num_rows, dtype=np.float32)
        self.frequency = np.zeros(num_rows, dtype=np.float32)
        self.presence = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.int64)           # the 64 bits as they are
        self.prompt_len = np.zeros(num_rows, dtype=np.int64)
        self.min_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int64)  # -1: none asked
        self.edited = np.zeros(num_rows, dtype=bool)             # has `bias` or `banned`
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # token ids, what to add
        self.banned: dict[int, np.ndarray] = {}                  # never sampled
        self.stops: dict[int, np.ndarray] = {}                   # not sampled before min_tokens

    def set(self, row: int, params: SamplingParams, seed: int, prompt_len: int, stop_ids: Sequence[int]) -> None:
        """Write a request's parameters into `row`. Raises InvalidRequestError for tokens outside the vocabulary."""
        check_token_ids(params, self.vocab_size)
        self.clear(row)
        self.prompt_len[row] = prompt_len
        if not params.greedy:
            self.temperature[row] = params.temperature
            self.top_k[row] = params.top_k if params.top_k < self.vocab_size else 0
            self.top_p[row] = params.top_p
            self.log_min_p[row] = np.log(params.min_p) if params.min_p > 0 else -np.inf
        self.seed[row] = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF).astype(np.int64)
        self.repetition[row] = params.repetition_penalty
        self.frequency[row] = params.frequency_penalty
        self.presence[row] = params.presence_penalty
        if params.logprobs is not None:
            self.num_logprobs[row] = params.logprobs
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, dtype=np.int64)
            self.bias[row] = ids, np.fromiter(params.logit_bias.values(), dtype=np.float32)
        if params.bad_token_ids:
            self.banned[row] = np.unique(np.array(params.bad_token_ids, dtype=np.int64))
        stops = [token for token in set(stop_ids) if 0 <= token < self.vocab_size]
        if params.min_tokens and stops:
            self.min_tokens[row] = params.min_tokens
            self.stops[row] = np.array(stops, dtype=np.int64)
        self.edited[row] = row in self.bias or row in self.banned

    def clear(self, row: int) -> None:
        """Make `row` free."""
        self.temperature[row] = self.top_k[row] = self.frequency[row] = self.presence[row] = 0
        self.top_p[row] = self.repetition[row] = 1
        self.log_min_p[row] = -np.inf
        self.seed[row] = self.prompt_len[row] = self.min_tokens[row] = 0
        self.num_logprobs[row] = -1
        self.edited[row] = False
        for lists in (self.bias, self.banned, self.stops):
            lists.pop(row, None)
