"""A model's tokenizer: text to ids and back, with different degrees of trust.

`encode_text` is for text from outside: control tokens in it stay plain text. `encode_trusted` is for prompts of the
person who runs the process (the offline API): control tokens count, as in Hugging Face's `tokenizer(prompt)`.
`encode_rendered` is for the output of a chat template, in which only the template's own control tokens count.
"""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers

from engine.errors import InvalidRequestError, ModelError
from engine.message import msg
from engine.text.marks import MARKS, ControlTokens
from engine.text.pieces import Pieces
from engine.text.template import ChatTemplate

log = logging.getLogger("atoll.text")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTROL_SHAPE = re.compile(r"<\|.*|.*\|>")  # <|im_end|>, <turn|>: control tokens even where the file does not say so


class TextTokenizer:
    """Thread-safe after construction; encoding does not hold the interpreter lock."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        config: dict[str, Any] | None = None,
        template_source: str | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.pieces = Pieces(tokenizer)
        self.named_tokens = _named_tokens(config or {})
        class_name = (config or {}).get("tokenizer_class")  # the name in transformers, for clients that ask
        self.class_name = class_name if isinstance(class_name, str) else "PreTrainedTokenizerFast"
        self.control = ControlTokens(_control_literals(tokenizer, template_source or ""))
        self.template = ChatTemplate(template_source, self.named_tokens) if template_source else None
        self._keep_marks_out(tokenizer)

        eos = self.token_id(self.named_tokens.get("eos_token", ""))
        self.eos_token_ids: list[int] = sorted({*eos_token_ids, *([] if eos is None else [eos])})
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._unsafe = self._not_representable()

    @classmethod
    def load(cls, directory: Path | str) -> "TextTokenizer":
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json of a model
        directory.

        Raises ModelError, which names the file that is missing or broken.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                msg("{path} is missing.", path=path),
                msg(
                    "Atoll reads tokenizers in the tokenizers library's format; convert other formats before bundling."
                ),
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(msg("{path} cannot be read: {error}", path=path, error=str(error)[:200])) from None
        config = _read_json(directory / "tokenizer_config.json")
        eos: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            settings = _read_json(directory / name)
            value = settings.get("eos_token_id", (settings.get("text_config") or {}).get("eos_token_id"))
            if value is not None:
                eos |= {int(i) for i in (value if isinstance(value, list) else [value])}
                break
        return cls(tokenizer, config=config, template_source=_template_source(directory, config), eos_token_ids=eos)

    # -- text to ids

    def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of text from outside. Raises InvalidRequestError for text that is not valid Unicode."""
        self._refuse_unsafe(text)
        return self._encode(self.control.plain(text), add_special_tokens)

    def encode_trusted(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a trusted prompt, in which control tokens count."""
        return self._encode(text, add_special_tokens)

    def encode_rendered(self, rendered: str) -> list[int]:
        """Ids of `ChatTemplate.render`'s output, made from messages marked by `self.control`."""
        return self._encode(self.control.resolve(rendered), add_special_tokens=False)

    def mark_untrusted(self, value: Any) -> Any:
        """Nested strings from outside, marked for the chat template. Raises InvalidRequestError."""
        try:
            if self._unsafe:
                self._refuse_unsafe(json.dumps(value, ensure_ascii=False))
            return self.control.mark_tree(value)
        except RecursionError:
            raise InvalidRequestError("The messages or tools are nested too deeply.", "messages") from None

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # The batch call without offsets: unlike `encode` it releases the GIL (and is faster).
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError):  # what the library raises for a str that is not valid Unicode
            raise InvalidRequestError(
                "The text is not valid Unicode: it contains half of a surrogate pair.", "prompt"
            ) from None

    # -- ids to text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of a single token; parts of characters become U+FFFD."""
        return self.pieces.bytes_of(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces.bytes_of(token_id)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token) if token else None

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest vocabulary entry: a text of more than n times this length does not fit into n
        tokens."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    # -- keeping control tokens out of plain text

    def _keep_marks_out(self, tokenizer: Tokenizer) -> None:
        """Make the tokenizer match control tokens in the raw text, where marks break them, and then drop the marks
        before it does anything else."""
        drop = normalizers.Replace(Regex(f"[{MARKS}]"), "")
        own = tokenizer.normalizer
        tokenizer.normalizer = normalizers.Sequence([drop] if own is None else [drop, own])  # type: ignore[assignment]
        control = set(self.control.literals)
        for token in tokenizer.get_added_tokens_decoder().values():
            if token.content in control and token.normalized:
                tokenizer.add_tokens([
                    AddedToken(token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
                               normalized=False, special=token.special)
                ])

    def _not_representable(self) -> re.Pattern[str] | None:
        """Control literals that plain text can produce in this vocabulary (possible in unigram models): such input is
        refused."""
        leaky = [
            text for text in self.control.literals
            if self.token_id(text) in self._encode(self.control.plain(text), add_special_tokens=False)
        ]
        if leaky:
            log.warning("these control tokens cannot be written as plain text and are refused in input: %s", leaky[:8])
        return re.compile("|".join(map(re.escape, leaky)), re.IGNORECASE) if leaky else None

    def _refuse_unsafe(self, text: str) -> None:
        if self._unsafe and (match := self._unsafe.search(text)):
            raise InvalidRequestError(f"This model's tokenizer cannot represent {match[0]!r} as plain text.", "prompt")


def _control_literals(tokenizer: Tokenizer, template_source: str) -> Iterable[str]:
    """Special tokens, and added tokens that the chat template writes or that look like control tokens.

    Other added tokens (runs of newlines, HTML tags in Gemma's vocabulary) are ordinary text that has a single id.
    """
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        if token.special or _CONTROL_SHAPE.fullmatch(text) or (text.strip() and text in template_source):
            yield text


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", …} from tokenizer_config.json, where a value may be a string or an object."""
    named = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            named[name] = value
    return named


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    """The chat template: chat_template.jinja, else tokenizer_config.json's (a list names several; "default" counts)."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} if the file is absent. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(msg("{path} cannot be read: {error}", path=path, error=str(error)[:200])) from None
    if not isinstance(value, dict):
        raise ModelError(msg("{path} must hold a JSON object.", path=path))
    return value
