"""Prompts from a file instead of generated ones: one JSON object per line (`custom`), or conversations (`sharegpt`)."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from appliance.load.prompts import Request, content_of
from installer.base.errors import usage_error
from installer.base.i18n import plain, reason, t

Kind = Literal["custom", "sharegpt"]
_MOST_BYTES = 1 << 30
_MOST_ENTRIES = 1_000_000


class Dataset:
    """Prompts as texts or as messages, each with the answer's length, or None if the file gives none."""

    def __init__(self, entries: list[tuple[str | list[dict[str, Any]], int | None]]) -> None:
        self.entries = entries

    def requests(self, endpoint: str, tokens_out: int, seed: int, *, shuffled: bool = True) -> Iterator[Request]:
        """Without end: starts again after the last."""
        entries = list(self.entries)
        if shuffled:
            random.Random(seed).shuffle(entries)  # noqa: S311 - an order, no secret
        while True:
            for prompt, length in entries:
                content = content_of(prompt, endpoint) if isinstance(prompt, str) else {"messages": prompt}
                yield Request(content, length or tokens_out)


def read_dataset(kind: Kind, path: Path, endpoint: str) -> Dataset:
    """Raises InstallError (usage) that says where the file is wrong."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(t("it is larger than 1 GiB"))
        text = path.read_text("utf-8")
        entries = _custom(text, endpoint) if kind == "custom" else _sharegpt(text)
        if not entries:
            raise ValueError(t("it holds no prompt"))
    except (OSError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError) else plain(error)
        raise usage_error(t("The prompts in {path} cannot be used: {why}.", path=path, why=why),
                          t('custom: a line each, {{"prompt": "…", "output_tokens": 100}}; sharegpt: a JSON list of '
                            'conversations.')) from None
    return Dataset(entries[:_MOST_ENTRIES])


def _custom(text: str, endpoint: str) -> list[tuple[str | list[dict[str, Any]], int | None]]:
    found: list[tuple[str | list[dict[str, Any]], int | None]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        entry = json.loads(line)
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        messages = entry.get("messages") if isinstance(entry, dict) else None
        length = entry.get("output_tokens") if isinstance(entry, dict) else None
        good = length is None or (isinstance(length, int) and not isinstance(length, bool) and length > 0)
        if good and isinstance(prompt, str) and prompt:
            found.append((prompt, length))
        elif good and isinstance(messages, list) and messages and endpoint == "chat":
            found.append((messages, length))
        else:
            raise ValueError(t("line {number} has no prompt", number=number))
    return found


def _sharegpt(text: str) -> list[tuple[str | list[dict[str, Any]], int | None]]:
    data = json.loads(text)
    if not isinstance(data, list):
        raise ValueError(t("it is not a list of conversations"))
    found: list[tuple[str | list[dict[str, Any]], int | None]] = []
    for entry in data:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if isinstance(turns, list) and len(turns) >= 2:
            first, second = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
            if isinstance(first, str) and first and isinstance(second, str):
                # Without its tokenizer, an answer's length is estimated from its number of letters.
                found.append((first, max(1, len(second) // 4)))
    return found
