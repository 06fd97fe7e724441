"""A model's vocabulary in the form that llguidance must see: control tokens are not text.

The library tokenises text that a grammar forces with the model's own tokenizer, which turns text that spells a control
token into that token: a schema's constant "<|im_end|>" would end the answer. And added tokens that are not marked as
special (`<tool_call>`, `</think>`) would count as text inside a JSON string. So control tokens are marked as special,
and renamed to something that no text spells. Grammars refer to them by their ids.
"""

import json
import secrets
from pathlib import Path
from typing import Any

from engine.text.tokenizer import TextTokenizer


def without_control_text(directory: Path) -> str:
    """tokenizer.json with its control tokens renamed. Raises OSError, ValueError and ModelError."""
    control = set(TextTokenizer.load(directory).control.literals)
    source = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    secret = secrets.token_hex(8)
    names: dict[str, str] = {}
    for token in source.get("added_tokens") or []:
        if token["special"] or token["content"] in control:
            token["special"] = True
            names[token["content"]] = token["content"] = f"{secret}{token['content']}"
    model = source["model"]
    vocabulary: Any = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if (unknown := model.get("unk_token")) in names:
        model["unk_token"] = names[unknown]
    return json.dumps(source)
