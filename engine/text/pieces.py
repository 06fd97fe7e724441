"""The bytes of each token, and how a tokenizer's decoder joins them into text.

Two kinds of decoder cover the models served here, and are reproduced exactly, one token at a time; any other kind uses
the library's own `DecodeStream`.

    byte level      every vocabulary character is one byte (GPT-2's table); text = UTF-8 of all bytes, errors replaced
    byte fallback   pieces of text with "▁" for a space, and "<0xE2>" tokens for single bytes. A run of byte tokens is
                    decoded if it is valid UTF-8 as a whole; otherwise each byte becomes U+FFFD
"""

import codecs
import json
import re
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """Token ids in, text out: the concatenation of all `push` and one `flush` is `tokenizer.decode` of all ids."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """The text that was held back: an incomplete character."""
        ...


class Pieces:
    """What is known of one tokenizer's decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        self.kind, self._replace, self._strip = _classify(steps)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        skipped = frozenset(self._special) if skip_special_tokens else frozenset()
        if self.kind == "byte level":
            return _ByteLevelStream(self, skipped)
        if self.kind == "byte fallback":
            return _ByteFallbackStream(self, skipped, self._strip)
        return _LibraryStream(self._tokenizer, skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token (perhaps not whole characters); empty for an id outside the vocabulary."""
        piece = self._bytes.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            piece = self._bytes[token_id] = b"" if token is None else self._to_bytes(token)
        return piece

    def byte_token(self, token_id: int) -> bool:
        """Whether the id is a byte-fallback token."""
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def _to_bytes(self, token: str) -> bytes:
        if self.kind == "byte level":
            try:
                return bytes(_BYTE_OF[c] for c in token)
            except KeyError:  # an added token with characters outside the table stands for itself
                return token.encode()
        if self.kind == "byte fallback" and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replace:
            token = token.replace(old, new)
        return token.encode()


class _ByteLevelStream:
    def __init__(self, pieces: Pieces, skipped: frozenset[int]) -> None:
        self._pieces, self._skipped = pieces, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decoder.decode(self._pieces.bytes_of(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallbackStream:
    def __init__(self, pieces: Pieces, skipped: frozenset[int], strip: tuple[str, int]) -> None:
        self._pieces, self._skipped = pieces, skipped
        self._run = bytearray()
        self._strip_character, self._strip_left = strip  # leading characters still to drop from the whole text

    def push(self, token_id: int) -> str:
        piece = self._pieces.bytes_of(token_id)
        if token_id in self._skipped or not piece:  # ids outside the vocabulary do not end a run of bytes
            return ""
        if self._pieces.byte_token(token_id):
            self._run += piece
            return ""
        return self._stripped(self._end_run() + piece.decode())

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._strip_character):
                self._strip_left = 0
                break
            text = text[len(self._strip_character) :]
            self._strip_left -= 1
        return text


class _LibraryStream:
    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._sent = ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._sent += text
        return text

    def flush(self) -> str:
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        held = whole[len(self._sent) :] if whole.startswith(self._sent) else ""
        self._sent += held
        return held


def _classify(steps: list[dict]) -> tuple[str, list[tuple[str, str]], tuple[str, int]]:
    """(kind, replacements of the pieces, (character, count) to strip from the start of the text)."""
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte level", [], ("", 0)
    replace: list[tuple[str, str]] = []
    while kinds[:1] == ["Replace"] and "String" in steps[0]["pattern"]:
        replace.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        kinds, steps = kinds[1:], steps[1:]
    if kinds[:2] == ["ByteFallback", "Fuse"]:
        if kinds[2:] == ["Strip"] and steps[2]["stop"] == 0:
            return "byte fallback", replace, (steps[2]["content"], steps[2]["start"])
        if not kinds[2:]:
            return "byte fallback", replace, ("", 0)
    return "other", [("▁", " ")], ("", 0)


def _byte_table() -> dict[str, int]:
    """GPT-2's map of vocabulary characters to bytes: printable Latin-1 stands for itself, the rest begins at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_table()
