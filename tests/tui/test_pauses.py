"""Full garbage collections wait until nobody types."""

import gc
from collections.abc import Iterator

import pytest

from tui import pauses


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the program sets it up, and afterwards as it was."""
    before = gc.get_threshold()
    monkeypatch.setattr(pauses, "_key_at", 0.0)
    monkeypatch.setattr(pauses, "_collected_at", 0.0)
    pauses.keep_short()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_no_full_collection_comes_by_itself(collector: None) -> None:
    full = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(400_000)]
    assert gc.get_stats()[1]["collections"] > 0
    assert gc.get_stats()[2]["collections"] == full
    assert len(kept) == 400_000


def test_it_waits_while_somebody_types_but_not_for_ever(collector: None, monkeypatch: pytest.MonkeyPatch) -> None:
    full = gc.get_stats()[2]["collections"]
    pauses.collect_when_quiet()
    assert gc.get_stats()[2]["collections"] == full + 1, "nobody types"
    pauses.key_came()
    pauses.collect_when_quiet()
    assert gc.get_stats()[2]["collections"] == full + 1
    monkeypatch.setattr(pauses, "_collected_at", pauses._collected_at - 61)
    pauses.collect_when_quiet()
    assert gc.get_stats()[2]["collections"] == full + 2
