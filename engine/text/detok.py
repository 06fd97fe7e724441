"""Decodes the token ids of one answer as they arrive: only whole characters, and no part of a stop string."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.core.params import SamplingParams
from engine.text.parsers.source import Mark, Part
from engine.text.stop import StopMatcher
from engine.text.tokenizer import TextTokenizer


@dataclass(slots=True)
class TextDelta:
    """What one `push` added. With `stopped`, a stop string ended the text: ids beyond `num_tokens` are void.

    `parts` is the text with its marks, one list for each id that counts; a further list may follow for text that had
    been held back.
    """

    text: str = ""
    stopped: bool = False
    stop_string: str | None = None
    num_tokens: int = 0                               # how many of the pushed ids count
    offsets: list[int] = field(default_factory=list)  # characters of the text before each of them
    parts: list[list[Part]] = field(default_factory=list)


class Detokenizer:
    """Incremental text of one sequence.

    The text depends only on the ids and `finished`, never on how the ids were divided among pushes. Without stop
    strings it equals `TextTokenizer.decode` of all ids. Stop strings count from the token after `min_tokens`.
    """

    def __init__(
        self, tokenizer: TextTokenizer, params: SamplingParams, marks: Mapping[int, str] | None = None
    ) -> None:
        """`marks`: tokens that `TextDelta.parts` distinguishes from text that spells them. None: no parts are
        wanted."""
        self._marks = marks
        self._hides_special = params.skip_special_tokens
        self._is_special = tokenizer.pieces.is_special
        self._waiting: deque[tuple[int, int, Mark]] = deque()  # (begin, end in the text) of marks not yet in `parts`
        self._released = 0  # characters that are in `parts`, including the text of marks
        self._stream = tokenizer.pieces.stream(params.skip_special_tokens)
        self._stop = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._enabled = params.detokenize
        self._count = 0    # tokens so far
        self._decoded = 0  # characters so far, those held back included
        self._over = False

    def push(self, token_ids: Sequence[int], finished: bool = False, *, stop_token: bool = False) -> TextDelta:
        """Add ids. `finished`: they are the last. `stop_token`: the very last id is the end or stop token that ended
        the answer; its text is not shown (unless the stop string is to be included)."""
        delta = TextDelta()
        if self._over:
            return delta
        shown: list[str] = []
        for i, token_id in enumerate(token_ids):
            delta.offsets.append(self._decoded)
            delta.num_tokens += 1
            self._count += 1
            hidden = stop_token and finished and i == len(token_ids) - 1 and not self._include_stop
            before = len(shown)
            if self._enabled and not hidden:
                if self._marks and token_id in self._marks:
                    self._show_mark(token_id, shown)
                else:
                    self._show(self._stream.push(token_id), shown)
            if self._marks is not None:
                delta.parts.append(self._parts("".join(shown[before:])))
            if self._stop.found is not None:
                break
        if finished and self._stop.found is None and self._enabled:
            before = len(shown)
            self._show(self._stream.flush(), shown)
            shown.append(self._stop.flush())
            if self._marks is not None:
                delta.parts.append(self._parts("".join(shown[before:])))
        delta.text = "".join(shown)
        delta.stop_string = self._stop.found
        delta.stopped = self._stop.found is not None
        self._over = finished or delta.stopped
        return delta

    def _show(self, text: str, shown: list[str]) -> None:
        self._decoded += len(text)
        shown.append(text if self._count <= self._min_tokens else self._stop.push(text))

    def _show_mark(self, token_id: int, shown: list[str]) -> None:
        assert self._marks is not None
        literal = self._marks[token_id]
        self._show(self._stream.flush(), shown)
        begin = self._decoded
        visible = not (self._hides_special and self._is_special(token_id))
        self._waiting.append((begin, begin + len(literal) if visible else begin, Mark(literal)))
        if visible:
            self._show(literal, shown)

    def _parts(self, text: str) -> list[Part]:
        """`text`, which is now certain not to be part of a stop string, split at its marks."""
        parts: list[Part] = []
        first, at = self._released, self._released
        self._released += len(text)
        while self._waiting:
            begin, end, mark = self._waiting[0]
            if end > self._released and begin >= self._released:
                break
            if begin > at:
                parts.append(text[at - first : begin - first])
            at = max(at, min(end, self._released))
            if end > self._released:
                break
            parts.append(mark)
            self._waiting.popleft()
        if at < self._released:
            parts.append(text[at - first :])
        return parts
