"""What all tests of the engine share."""

from collections.abc import Iterator

import pytest

from engine.core.kv import manager


@pytest.fixture(scope="session", autouse=True)
def states_of_short_prompts_are_kept() -> Iterator[None]:
    """Prompts here are short, so that there can be many; their states are kept where a server would not care to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "WORTH_A_STEP", 1)
        yield
