"""Lines of braille and of ASCII: every value is where it belongs, and what lies between is a straight line."""

import pytest

from tui.parts.plot import ascii_rows, braille_rows, nice, spark

RISING = [(0.0, 0.0), (10.0, 10.0)]


def dots(rows: list[str]) -> set[tuple[int, int]]:
    """(x, y) of every dot, from the lower left."""
    bits = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
    found = set()
    for row, line in enumerate(rows):
        for column, sign in enumerate(line):
            found |= {(2 * column + x, 4 * len(rows) - 1 - 4 * row - y)
                      for bit, (x, y) in enumerate(bits) if (ord(sign) - 0x2800) >> bit & 1}  # fmt: skip
    return found


def test_between_two_points_is_a_straight_line() -> None:
    found = dots(braille_rows(RISING, 10, 5, 10.0))
    assert {x for x, _ in found} == set(range(20)), "no gap"
    assert (0, 0) in found
    assert (19, 19) in found
    assert all(abs(x - y) <= 1 for x, y in found)


def test_a_jump_is_one_line_without_gaps() -> None:
    found = dots(braille_rows([(0.0, 0.0), (5.0, 0.0), (5.1, 8.0), (10.0, 8.0)], 10, 4, 8.0))
    assert {y for _, y in found} == set(range(16))


def test_in_ascii_too() -> None:
    rows = ascii_rows(RISING, 10, 5, 10.0)
    assert [line.index("*") for line in reversed(rows)] == sorted(line.index("*") for line in reversed(rows))
    assert all(sum(line[column] == "*" for line in rows) == 1 for column in range(10))


@pytest.mark.parametrize("plain", [False, True])
def test_a_sparkline_is_one_row_from_0_to_the_highest(plain: bool) -> None:
    line = spark(RISING, 12, plain=plain)
    assert len(line) == 12
    assert line.isascii() == plain
    assert list(line) != [line[0]] * 12
    assert spark([(0.0, 5.0)], 12, plain=plain) == "", "one point is no line"
    assert len(set(spark([(0.0, 0.0), (1.0, 0.0)], 12, plain=plain))) == 1, "all are 0"


@pytest.mark.parametrize(("most", "top"), [(0, 1), (0.3, 0.5), (1, 1), (7, 10), (1843, 2000), (2100, 2500)])
def test_the_axis_ends_at_a_round_number(most: float, top: float) -> None:
    assert nice(most) == pytest.approx(top)
