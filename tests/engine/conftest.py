"""What all tests of the engine share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core.kv import manager
from engine.text.tokenizer import TextTokenizer


@pytest.fixture(scope="session", autouse=True)
def states_of_short_prompts_are_kept() -> Iterator[None]:
    """Prompts here are short, so that there can be many; their states are kept where a server would not care to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "WORTH_A_STEP", 1)
        yield


@pytest.fixture(scope="session")
def smol_tokenizer(smollm2_dir: Path) -> TextTokenizer:
    """Of the demonstration model."""
    return TextTokenizer.load(smollm2_dir)
