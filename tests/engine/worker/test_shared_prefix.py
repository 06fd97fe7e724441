"""Which tokens the sequences of a step share, found in the host's copy of the block tables."""

import numpy as np
import pytest

pytest.importorskip("triton")

from engine.core.batch import PageUpdate, RowInit, StepPlan
from engine.core.params import SamplingParams

PAGE = 16


@pytest.fixture
def prefixes():
    """Imported when a test runs: the tests of the kernels set Triton's mode before that."""
    from engine.worker.shared_prefix import SharedPrefixes

    return SharedPrefixes(num_rows=300, width=600, page_size=PAGE, group=0)


def give(prefixes, tables, group=0):
    """New sequences with these pages, in rows 1, 2, ..."""
    inits = [RowInit(row, [], 1, SamplingParams(), 0, ()) for row in range(1, len(tables) + 1)]
    updates = [PageUpdate(row, 0, table, group) for row, table in enumerate(tables, 1)]
    prefixes.note(StepPlan(0, [], inits, updates))


def found(prefixes, rows, lengths):
    shared = prefixes.find(np.array(rows), np.array(lengths))
    return None if shared is None else shared.tolist()


def own(count, first):
    return list(range(first, first + count))


COMMON = own(128, 10_000)  # 2,048 tokens


def test_the_longest_run_of_equal_pages(prefixes):
    give(prefixes, [COMMON + own(3, 100 * row) for row in range(1, 21)])
    assert found(prefixes, range(1, 21), [2048 + 20] * 20) == [2048] * 20


def test_each_keeps_its_newest_token(prefixes):
    """Of one the newest token is the last of a common page, of another it is within: whole pages before it count."""
    give(prefixes, [COMMON + own(3, 100 * row) for row in range(1, 21)])
    assert found(prefixes, range(1, 21), [2060] * 19 + [2047]) == [2048 - PAGE] * 20


def test_some_share_nothing_and_any_order_of_rows(prefixes):
    tables = [COMMON + own(2, 100 * row) if row % 3 else own(130, 20_000 + 200 * row) for row in range(1, 31)]
    give(prefixes, tables)
    rows = list(range(30, 0, -1))
    assert found(prefixes, rows, [2060] * 30) == [2048 if row % 3 else 0 for row in rows]


def test_a_template_of_all_does_not_hide_a_document_of_many(prefixes):
    """Every prompt begins with the same 32 pages; 40 of 50 go on with the same document."""
    template = own(32, 5000)
    give(prefixes, [template + (COMMON if row <= 40 else []) + own(200, 300 * row + 20_000) for row in range(1, 51)])
    assert found(prefixes, range(1, 51), [160 * PAGE + 5] * 50) == [160 * PAGE] * 40 + [0] * 10


def test_few_sequences_and_short_prefixes_do_not_pay(prefixes):
    give(prefixes, [COMMON + own(3, 100 * row) for row in range(1, 8)])
    assert found(prefixes, range(1, 8), [2060] * 7) is None
    give(prefixes, [own(2, 50) + own(9, 100 * row) for row in range(1, 21)])
    assert found(prefixes, range(1, 21), [150] * 20) is None


def test_a_new_owner_of_a_row_is_noticed(prefixes):
    """The step has the same rows as the one before."""
    tables = [COMMON + own(3, 100 * row) for row in range(1, 21)]
    give(prefixes, tables)
    assert found(prefixes, range(1, 21), [2060] * 20) == [2048] * 20
    update = PageUpdate(5, 0, own(131, 40_000))
    prefixes.note(StepPlan(1, [], [RowInit(5, [], 1, SamplingParams(), 0, ())], [update]))
    assert found(prefixes, range(1, 21), [2060] * 20) == [2048] * 4 + [0] + [2048] * 15


def test_pages_of_another_group_say_nothing(prefixes):
    give(prefixes, [COMMON + own(3, 100 * row) for row in range(1, 21)], group=1)
    assert found(prefixes, range(1, 21), [2060] * 20) is None, "the null page is not shared"


def test_tables_that_are_shorter_than_what_pays():
    from engine.worker.shared_prefix import SharedPrefixes

    narrow = SharedPrefixes(num_rows=20, width=4, page_size=PAGE, group=0)
    give(narrow, [own(4, 100)] * 16)
    assert found(narrow, range(1, 17), [60] * 16) is None
