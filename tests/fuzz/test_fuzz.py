"""Each fuzzer for some seconds, with a seed that stays: `make fuzz` runs them as long as one likes."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), *(str(TESTS / name) for name in ("engine/server", "engine/text/parsers"))]

from fuzzing import Defect, Target, fuzz  # noqa: E402 - behind the path
from mutations import Chance  # noqa: E402
from targets import TARGETS  # noqa: E402

SECONDS = 12


@pytest.mark.parametrize("name", TARGETS)
def test_fuzz(name: str) -> None:
    assert fuzz(TARGETS[name], seconds=SECONDS, seed=20_261_124) > 20


def test_a_defect_is_found_and_can_be_tried_again() -> None:
    from contextlib import nullcontext

    def attempt(chance: Chance) -> None:
        assert chance.randint(0, 30) != 7

    target = Target("planted", lambda: nullcontext(attempt))
    with pytest.raises(Defect, match="case") as found:
        fuzz(target, seconds=30, seed=1)
    case = int(str(found.value).partition("case ")[2].partition(":")[0])
    with pytest.raises(Defect):
        fuzz(target, seconds=30, seed=1, first=case, most=1)
    assert fuzz(target, seconds=30, seed=1, most=case) == case
