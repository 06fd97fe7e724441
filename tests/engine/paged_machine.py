"""A runner without a model: it keeps *tokens* in the pages where K and V would be, and answers with a hash of the
history it can read through the block table. If paging, prefix hits, preemption or flight order are wrong anywhere, the
history is wrong, and so is every token after it. Runs thousands of steps a second.
"""

import hashlib

from engine.core.batch import SeqResult, StepPlan, StepResult
from engine.core.params import SamplingParams

VOCAB = 97
PAGE_SIZE = 16


def next_token(history: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(history).encode(), digest_size=4).digest()) % VOCAB


def expected_tokens(prompt: list[int], params: SamplingParams, eos: frozenset[int], max_model_len: int) -> list[int]:
    """What one request alone must produce."""
    tokens = list(prompt)
    while True:
        token = next_token(tokens)
        tokens.append(token)
        count = len(tokens) - len(prompt)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
        stopped = token in stops and count >= params.min_tokens
        if stopped or count == params.max_tokens or len(tokens) == max_model_len:
            return tokens[len(prompt):]


class PagedMachine:
    """`depth` 2 delays answers by a step, as a device with overlap does; pages are written at launch, in order."""

    def __init__(self, num_pages: int, num_rows: int, max_model_len: int) -> None:
        self.slots = [[-1] * PAGE_SIZE for _ in range(num_pages)]
        self.token_ids = [[-1] * (max_model_len + 1) for _ in range(num_rows)]
        self.block_table: list[list[int]] = [[] for _ in range(num_rows)]
        self.launched = 0
        self.fail_steps: set[int] = set()

    def launch(self, plan: StepPlan) -> StepResult:
        self.launched += 1
        if plan.step_id in self.fail_steps:
            raise RuntimeError("injected fault")
        for init in plan.row_inits:
            self.token_ids[init.row][: len(init.token_ids)] = init.token_ids
            self.block_table[init.row] = []
        for update in plan.page_updates:
            table = self.block_table[update.row]
            assert len(table) == update.start, "the block table has a gap"
            table.extend(update.pages)
        for seq in plan.seqs:  # all writes before all reads, as in a layer
            for position in range(seq.start, seq.start + seq.num_tokens):
                page = self.block_table[seq.row][position // PAGE_SIZE]
                assert page != 0, "a real token was sent to the trash page"
                self.slots[page][position % PAGE_SIZE] = self.token_ids[seq.row][position]
        results = []
        for seq in plan.seqs:
            token = None
            if seq.samples:
                end = seq.start + seq.num_tokens
                history = [self.slots[self.block_table[seq.row][i // PAGE_SIZE]][i % PAGE_SIZE] for i in range(end)]
                token = next_token(history)
                self.token_ids[seq.row][end] = token
            results.append(SeqResult(token_id=token))
        return StepResult(plan.step_id, results)

    def collect(self, handle: StepResult) -> StepResult:
        return handle
