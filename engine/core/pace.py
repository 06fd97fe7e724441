"""How many prompt tokens a step may compute, so that answers in progress do not wait too long for their next token.

    seconds of a step  =  base + extra + tokens of prompts x token_seconds + their context x context_seconds
                           │      │                            │                               │
                           │      │                            │    of steps with as many tiles of tokens
                           │      │                            └ of a token when many are computed at once
                           │      └ everything else: launches, small GEMMs
                           └ the seconds of steps without prompts

The context is what the average prompt token attends to. A tile of tokens reads it in one program of the attention
kernel, and a GPU runs as many programs at a time as it has room for: reading a context of 30,000 tokens takes 8B on an
H100 twice as long for 608 tokens as for 480. So each number of tiles has its own `context_seconds`.

All of these change (the base with the number of answers), so every step updates them. Errors of the model end up in
`extra` or, where the context is long, in `context_seconds`; so the next step is nearer the target, whatever caused the
error. A step is not limited if no answer is in progress.
"""

import logging

from engine.core.batch import StepPlan

log = logging.getLogger(__name__)

_AIM = 0.97               # of the target: what a step is planned to take at most
_MARGIN = 2.5             # and a step is planned this many recent mean errors below that
_FIRST_TOKENS = 512       # limit until a step with prompts has been timed
_FEWEST_TOKENS = 256      # limit whatever the target, because prompts must make progress
_WORTH_TIMING = 64        # prompt tokens; with fewer, a step says little about the time of one token
_LONG_CONTEXT = 2048      # tokens; from here on, reading them is what a step's error is about
_TILE = 128               # a step's total is rounded down to a multiple of this, because GEMMs compute whole tiles
# The share of an error by which a step corrects an estimate. `token_seconds` follows the cheapest steps, which show
# what additional tokens cost.
_BASE, _EXTRA, _CHEAPER, _DEARER, _ERROR = 0.2, 0.4, 0.1, 0.01, 0.1
_LONGER, _SHORTER = 0.8, 0.3  # of `context_seconds`
_OUTLIER = 2.0            # a step counts as at most twice what was expected: the host may have paused


class PromptPace:
    """Limits prompt tokens for a target of `max_itl` seconds between two tokens of an answer; 0: no limit."""

    def __init__(self, max_itl: float = 0.0) -> None:
        self.max_itl = max_itl
        self._base = 0.0
        self._extra = 0.0
        self._token_seconds = 0.0  # 0: not known yet
        self._context_seconds: dict[int, float] = {}  # by tiles in the step
        self._error = 0.05 * max_itl
        self._told = False

    def tokens(self, decoding: int, budget: int, context: int = 0) -> int:
        """How many of the remaining `budget` tokens prompts may take in a step with `decoding` answers in progress.
        `context`: the tokens before those of the first prompt."""
        if not self.max_itl or not decoding:
            return budget
        if not self._token_seconds:
            return min(budget, _FIRST_TOKENS)
        room = _AIM * self.max_itl - _MARGIN * self._error - self._base - self._extra
        most = min(budget, max(0, int(room / self._token_seconds)))
        for tiles in range((decoding + most) // _TILE, 0, -1):
            tokens = tiles * _TILE - decoding
            if tokens < _FEWEST_TOKENS:
                break
            if tokens * self._token_seconds + (context + tokens / 2) * self._seconds_of_context(tiles) <= room:
                return tokens
        if budget >= _FEWEST_TOKENS:
            self._tell()
        return min(budget, _FEWEST_TOKENS)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Update the estimates: this step took `seconds`."""
        if not self.max_itl:
            return
        prompts = [seq for seq in plan.seqs if seq.num_tokens > 1]
        decoding = len(plan.seqs) - len(prompts)
        tokens = plan.num_tokens - decoding
        if not tokens:
            usual = min(seconds, _OUTLIER * self._base) if self._base else seconds
            self._base += (usual - self._base) * (_BASE if self._base else 1.0)
        elif tokens >= _WORTH_TIMING:
            above = seconds - (min(self._base, seconds / 2) if decoding else 0.0)
            context = sum(seq.num_tokens * (seq.start + seq.num_tokens / 2) for seq in prompts) / tokens
            tiles = -(-plan.num_tokens // _TILE)
            reading = context * self._seconds_of_context(tiles)
            long = context >= _LONG_CONTEXT
            if decoding and self._token_seconds and not long:
                above = min(above, _OUTLIER * (tokens * self._token_seconds + reading + max(0.0, self._extra)))
            if not (long and self._token_seconds):
                each, known = max(0.0, above - reading) / tokens, self._token_seconds
                self._token_seconds += (each - known) * (1.0 if not known else _CHEAPER if each < known else _DEARER)
            if decoding:
                error = above - tokens * self._token_seconds - reading - self._extra
                if long:
                    share = _LONGER if error > 0 else _SHORTER
                    self._context_seconds[tiles] = max(0.0, reading + share * error) / context
                else:
                    self._extra += _EXTRA * error
                self._error += _ERROR * (min(abs(error), self.max_itl / 2) - self._error)

    def _seconds_of_context(self, tiles: int) -> float:
        """Of one token of context in a step of so many tiles: as measured, else as with the next larger number that was
        measured, else in proportion to the next smaller one. As tiles are read together, it is at least that of fewer
        tiles; and one more group of them than the proportion is the most."""
        known = self._context_seconds
        smaller = max((n for n in known if n < tiles), default=0)
        larger = min((n for n in known if n > tiles), default=0)
        measured = known.get(tiles, known[larger] if larger else None)
        if not smaller:
            return measured or 0.0
        least, share = known[smaller], tiles / smaller
        return share * least if measured is None else min(max(measured, least), (share + 1) * least)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log.warning("max_itl_ms %.0f may not be met: prompts get at least %d tokens a step",
                        self.max_itl * 1e3, _FEWEST_TOKENS)
