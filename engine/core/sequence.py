"""One request in the engine: its tokens, its progress, and what it owns.

    known tokens      prompt + output                        len(token_ids)
    placeholders      sampled on the device, not yet read    num_placeholders  (0 or 1; overlap only)
    computed tokens   have (or will have, once the steps in flight are done) their K and V in pages

        |---------- num_computed_tokens ----------|-- still to compute --|
        |------------------ known ------------------------|--placeholder-|

A step computes some of the tokens between `num_computed_tokens` and known + placeholders; when it reaches the end, it
samples one more. Prefill, decode, chunking, prefix hits and resumption are all this one rule. A sequence with `pooling`
samples nothing: its placeholder stands for the embedding, which ends it.
"""

import enum
from dataclasses import dataclass, field

from engine.core.grammar import Matcher
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason, Pooling, RequestTimes, TokenLogprobs

NO_ROW = -1
NO_SLOT = -1


class Status(enum.Enum):
    WAITING = enum.auto()    # new, or preempted: owns no row and no pages
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    request_id: str
    params: SamplingParams
    token_ids: list[int]
    prompt_len: int
    max_len: int                       # known tokens at which it must stop: min(prompt + max_tokens, max_model_len)
    stop_ids: frozenset[int]           # stop_token_ids of the request
    eos_ids: frozenset[int]            # the model's end tokens; empty with ignore_eos
    seed: int
    priority: int
    cache_salt: str
    times: RequestTimes
    arrival_order: int = 0             # breaks ties in arrival time by order of submission
    owner: str = ""                    # owners take turns in the queue
    pooling: Pooling | None = None

    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_placeholders: int = 0
    num_cached_tokens: int = 0         # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    row: int = NO_ROW
    slot: int = NO_SLOT                # slot of its recurrent state, if the model has recurrent layers
    checkpoints: list[int] = field(default_factory=list)  # positions whose state is to be kept, in order
    tables: list[list[int]] = field(default_factory=lambda: [[]])  # pages, for each group of layers
    num_out_of_window: list[int] = field(default_factory=list)       # in each group: pages that its window has left
    num_out_of_window_sent: list[int] = field(default_factory=list)  # how many of those the worker knows of
    page_hashes: list[bytes] = field(default_factory=list)  # hashes of full pages of known tokens, in order
    num_registered_pages: int = 0      # how many pages are in the prefix index under `page_hashes`
    num_pages_sent: int = 0            # how many pages the worker's block tables already hold
    last_step: int = -1                # id of the newest step that touches this sequence's row and pages
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    matcher: Matcher | None = None     # knows the output so far; None without a grammar

    @classmethod
    def from_request(
        cls, request: EngineRequest, *, max_model_len: int, eos_ids: frozenset[int], seed: int, order: int
    ) -> "Sequence":
        params = request.params
        prompt_len = len(request.prompt_token_ids)
        wanted = max_model_len if params.max_tokens is None else prompt_len + params.max_tokens
        if request.pooling is not None:
            wanted = prompt_len
        return cls(
            request_id=request.request_id,
            params=params,
            token_ids=list(request.prompt_token_ids),
            prompt_len=prompt_len,
            max_len=min(wanted, max_model_len),
            stop_ids=frozenset(params.stop_token_ids),
            eos_ids=frozenset() if params.ignore_eos else eos_ids,
            seed=seed,
            priority=request.priority,
            cache_salt=request.cache_salt,
            times=RequestTimes(arrival=request.arrival_time),
            arrival_order=order,
            owner=request.owner,
            pooling=request.pooling,
        )

    @property
    def pages(self) -> list[int]:
        """The block table of the first group of layers; all have the same length."""
        return self.tables[0]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens that exist (known or on the device) and are not computed yet; 0 if the sequence is certain to end."""
        end = len(self.token_ids) + self.num_placeholders
        return 0 if end >= self.max_len and self.num_placeholders else end - self.num_computed_tokens

    def next_chunk(self, budget: int) -> int:
        """How many of those a step may compute: at most `budget`, and up to the next checkpoint of its state."""
        num_tokens = min(self.num_tokens_to_compute, budget)
        if num_tokens > 1 and self.checkpoints:
            num_tokens = min(num_tokens, self.checkpoints[0] - self.num_computed_tokens)
        return num_tokens

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key of the priority policy: the order of service, and reversed the order of preemption."""
        return (self.priority, self.times.arrival, self.arrival_order)

    def ends_at(self, token_id: int) -> bool:
        """Whether `token_id`, its newest token, is an end or stop token that counts."""
        # Under a grammar, min_tokens does not prevent the end, because no other token might be allowed.
        enough = self.matcher is not None or self.num_output_tokens >= self.params.min_tokens
        return enough and (token_id in self.eos_ids or token_id in self.stop_ids)

    def finish_reason_for(self, token_id: int) -> FinishReason | None:
        """Why the sequence ends with `token_id`, its newest token (already appended); None to go on."""
        if self.ends_at(token_id) or (self.matcher is not None and self.matcher.finished):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_len else None
