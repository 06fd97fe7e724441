"""How many prompt tokens a step may compute, so that answers in progress do not wait too long for their next token.

    seconds of a step  =  base  +  extra  +  tokens of prompts x token_seconds
                           │        │                              └ the cost of a token when many are computed at once
                           │        └ everything else: launches, reading a long context, small GEMMs
                           └ the seconds of steps without prompts

All three change (the base with the number of answers, the extra with a prompt's context), so every step updates them.
Errors of the model end up in `extra`, so the next step is nearer the target, whatever caused the error. A step is not
limited if no answer is in progress.
"""

import logging

from engine.core.batch import StepPlan

log = logging.getLogger(__name__)

_MARGIN = 2.5             # a step is planned this many recent mean errors below the target
_FIRST_TOKENS = 512       # limit until a step with prompts has been timed
_FEWEST_TOKENS = 256      # limit whatever the target, because prompts must make progress
_WORTH_TIMING = 64        # prompt tokens; with fewer, a step says little about the time of one token
_TILE = 128               # a step's total is rounded down to a multiple of this, because GEMMs compute whole tiles
# The share of an error by which a step corrects an estimate. `token_seconds` follows the cheapest steps, which show
# what additional tokens cost.
_BASE, _EXTRA, _CHEAPER, _DEARER, _ERROR = 0.2, 0.4, 0.1, 0.01, 0.1


class PromptPace:
    """Limits prompt tokens for a target of `max_itl` seconds between two tokens of an answer; 0: no limit."""

    def __init__(self, max_itl: float = 0.0) -> None:
        self.max_itl = max_itl
        self._base = 0.0
        self._extra = 0.0
        self._token_seconds = 0.0  # 0: not known yet
        self._error = 0.05 * max_itl
        self._told = False

    def tokens(self, decoding: int, budget: int) -> int:
        """How many of the remaining `budget` tokens prompts may take in a step with `decoding` answers in progress."""
        if not self.max_itl or not decoding:
            return budget
        if not self._token_seconds:
            return min(budget, _FIRST_TOKENS)
        room = self.max_itl - _MARGIN * self._error - self._base - self._extra
        tokens = int(room / self._token_seconds)
        tokens = (decoding + tokens) // _TILE * _TILE - decoding
        if tokens < _FEWEST_TOKENS:
            self._tell()
            tokens = _FEWEST_TOKENS
        return min(budget, tokens)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Update the estimates: this step took `seconds`."""
        if not self.max_itl:
            return
        decoding = sum(seq.num_tokens == 1 for seq in plan.seqs)
        prompt_tokens = plan.num_tokens - decoding
        if not prompt_tokens:
            self._base += (seconds - self._base) * (_BASE if self._base else 1.0)
        elif prompt_tokens >= _WORTH_TIMING:
            above = seconds - (min(self._base, seconds / 2) if decoding else 0.0)
            each, known = above / prompt_tokens, self._token_seconds
            self._token_seconds += (each - known) * (1.0 if not known else _CHEAPER if each < known else _DEARER)
            if decoding:
                error = above - prompt_tokens * self._token_seconds - self._extra
                self._extra += _EXTRA * error
                self._error += _ERROR * (min(abs(error), self.max_itl / 2) - self._error)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log.warning("max_itl_ms %.0f may not be met: prompts get at least %d tokens a step",
                        self.max_itl * 1e3, _FEWEST_TOKENS)
