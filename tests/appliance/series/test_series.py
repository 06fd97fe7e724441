"""The time series survives everything that a disk and a gateway may do to it, and its numbers match plain
arithmetic."""

import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from appliance.series import Series, SeriesError, Store
from appliance.series.names import key, parsed, split
from appliance.series.store import Tier

TOKENS = 'vllm:generation_tokens_total{engine="0",model_name="m"}'
KV = 'vllm:kv_cache_usage_perc{engine="0",model_name="m"}'
NO_FIXTURE_RESET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "series.db"


def fill(path: Path, samples: list[tuple[float, dict[str, float]]], **how) -> None:
    with Store(path, **how) as store:
        for at, values in samples:
            store.add(at, values)


def test_a_rate_and_a_gauge_are_those_of_the_window(path: Path):
    fill(path, [(1000.0 + 10 * n, {TOKENS: 50.0 * n, KV: n / 10}) for n in range(10)])
    with Series(path) as series:
        window = series.window(1020, 1080)
        assert window.seconds == 60
        assert window.increase("generation_tokens") == 300
        assert window.rate("vllm:generation_tokens_total", model_name="m") == 5
        assert window.rate("generation_tokens", model_name="other") == 0
        assert window.most("kv_cache_usage_perc") == 0.8
        assert window.mean("kv_cache_usage_perc") == pytest.approx(0.55)
        assert window.last("kv_cache_usage_perc") == 0.8
        assert [rate for _, rate in window.rates("generation_tokens")] == [5] * 6


@given(growth=st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=1, max_size=60))
@NO_FIXTURE_RESET
def test_a_total_survives_every_restart(growth: list[tuple[int, bool]], tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("s") / "series.db"
    now, samples, counted = 5.0, [(1000.0, {TOKENS: 5.0})], 0
    for number, (more, restarted) in enumerate(growth, start=1):
        now = more if restarted else now + more
        before = samples[-1][1][TOKENS]
        counted += now - before if now >= before else now  # a restart may look like growth
        samples.append((1000.0 + number, {TOKENS: float(now)}))
    fill(path, samples)
    with Series(path) as series:
        assert series.window(1000, 2000).increase("generation_tokens") == counted


def test_time_that_nobody_observed_is_in_no_rate(path: Path):
    fill(path, [(1000.0, {TOKENS: 0.0}), (1010.0, {TOKENS: 100.0}), (9000.0, {TOKENS: 90_000.0}),
                (9010.0, {TOKENS: 90_100.0})])  # fmt: skip
    with Series(path) as series:
        window = series.window(1000, 9010)
        assert window.seconds == 20
        assert window.rate("generation_tokens") == 10


def test_a_clock_that_was_set_back_loses_nothing(path: Path):
    fill(path, [(1000.0, {TOKENS: 0.0}), (1010.0, {TOKENS: 10.0}), (500.0, {TOKENS: 30.0})])
    with Series(path) as series:
        assert series.window(1000, 2000).increase("generation_tokens") == 30


@given(rows=st.integers(3, 20), samples=st.integers(2, 120))
@NO_FIXTURE_RESET
def test_the_file_is_a_ring(rows: int, samples: int, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("s") / "series.db"
    tiers = (Tier(0, rows), Tier(10, rows))
    fill(path, [(1000.0 + n, {TOKENS: float(n)}) for n in range(samples)], tiers=tiers)
    with Series(path, tiers=tiers) as series:
        kept = series.window(1000.0 + samples - min(rows, samples), 5000)
        assert kept.rows[-1].values[TOKENS] == samples - 1
        assert kept.increase("generation_tokens") == min(rows, samples) - 1
    counts = dict(sqlite3.connect(path).execute("SELECT tier, count(*) FROM sample GROUP BY tier").fetchall())
    assert all(count <= rows for count in counts.values())
    assert counts[0] == min(rows, samples)


def test_a_long_range_is_answered_from_coarser_rows(path: Path):
    tiers = (Tier(0, 10), Tier(10, 1000))
    fill(path, [(1000.0 + n, {TOKENS: 2.0 * n, KV: (n % 10) / 10}) for n in range(200)], tiers=tiers)
    with Series(path, tiers=tiers) as series:
        window = series.window(1019, 1199)  # snaps to the row that ends at 1010
        assert window.increase("generation_tokens") == 2 * 189
        assert window.seconds == 189
        assert window.rate("generation_tokens") == 2
        assert window.most("kv_cache_usage_perc") == 0.9
        assert len(window.rows) < 40


@given(samples=st.lists(st.floats(0.0005, 200), min_size=1, max_size=80), q=st.floats(0.01, 1))
@NO_FIXTURE_RESET
def test_a_quantile_lies_in_the_bucket_of_the_true_one(
    samples: list[float], q: float, tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.mktemp("s") / "series.db"
    registry = CollectorRegistry()
    bounds = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
    histogram = Histogram("vllm:time_to_first_token_seconds", "x", ["model_name"], buckets=bounds, registry=registry)
    histogram.labels("m")
    pages = [parsed(generate_latest(registry).decode())]
    for sample in samples:
        histogram.labels("m").observe(sample)
    pages.append(parsed(generate_latest(registry).decode()))
    fill(path, [(1000.0 + n, page) for n, page in enumerate(pages)])
    with Series(path) as series:
        window = series.window(1000, 1001)
        found = window.quantile("time_to_first_token_seconds", q)
        rank = q * len(samples)
        true = sorted(samples)[min(len(samples) - 1, max(0, -int(-rank // 1) - 1))]
        lower = max((bound for bound in (0.0, *bounds) if bound < true), default=0.0)
        upper = min((bound for bound in bounds if bound >= true), default=bounds[-1])
        assert found is not None
        assert lower <= found <= upper + 1e-9
        assert window.count("time_to_first_token_seconds") == len(samples)
        share = window.share_below("time_to_first_token_seconds", 1.0)
        assert share == pytest.approx(sum(sample <= 1.0 for sample in samples) / len(samples))


def test_every_truncation_leaves_a_file_that_works(path: Path, tmp_path: Path):
    """Also for the write-ahead log, as a power cut leaves it. A damaged file is set aside and never blocks."""
    store = Store(path)
    with store:
        for n in range(30):
            store.add(1000.0 + n, {TOKENS: float(n)})
        for end in ("", "-wal"):  # while it is open, as at a crash
            whole = Path(f"{path}{end}").stat().st_size
            for size in sorted({0, 1, 15, 16, 17, 31, 32, 33, 99, 100, 4095, 4096, 4097, whole - 1,
                                *range(0, whole, max(1, whole // 60))}):  # fmt: skip
                where = tmp_path / f"cut{end}-{size}"
                where.mkdir()
                shutil.copy(path, where / "series.db")
                shutil.copy(f"{path}-wal", where / "series.db-wal")
                with (where / f"series.db{end}").open("r+b") as file:
                    file.truncate(min(size, whole))
                with Store(where / "series.db") as again:
                    again.add(2000.0, {TOKENS: 100.0})
                    again.add(2010.0, {TOKENS: 150.0})
                with Series(where / "series.db") as series:
                    assert series.window(2000, 2010).rate("generation_tokens") == 5
                    values = [row.values[TOKENS] for row in series.window(999, 1999).rows]
                    assert values == [float(n) for n in range(len(values))]  # a prefix of what was written


def test_damage_within_is_set_aside(path: Path):
    fill(path, [(1000.0 + n, {f'{TOKENS[:-1]},x="{n}"}}': float(n)}) for n in range(60)])
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 3000)
    with Store(path) as store:
        assert store.opened.set_aside is not None
        assert store.opened.set_aside.is_file()
        store.add(2000.0, {TOKENS: 1.0})
    with Series(path) as series:
        assert series.last_at == 2000


def test_a_full_disk_costs_a_sample_not_the_file_nor_the_count(path: Path):
    with Store(path) as store:
        store.add(1000.0, {TOKENS: 0.0})
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        wide = {f'vllm:request_success_total{{finished_reason="{n}"}}': float(n) for n in range(900)}
        with pytest.raises(SeriesError, match="the disk is full"):
            store.add(1010.0, {TOKENS: 10.0, **wide})
        store._connection.execute("PRAGMA max_page_count = 100000")
        store.add(1020.0, {TOKENS: 20.0, **wide})
    with Series(path) as series:
        window = series.window(1000, 1020)
        assert (window.increase("generation_tokens"), window.seconds) == (20, 20)


def test_a_file_of_somebody_else_is_not_followed(path: Path, tmp_path: Path):
    (tmp_path / "target").write_text("mine")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(SeriesError), Store(path):
        pass
    assert (tmp_path / "target").read_text() == "mine"


def test_no_file_is_said_in_words(path: Path):
    with pytest.raises(SeriesError, match="no time series yet"):
        Series(path)


@given(labels=st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text(max_size=20), max_size=4))
def test_a_key_is_its_name_and_labels(labels: dict[str, str]):
    assert split(key("name", labels)) == ("name", labels)


@pytest.mark.parametrize("page", ["<html>", "a b c d", "x{", 'vllm:generation_tokens_total{model="m"} abc'])
def test_what_is_no_page_of_metrics_is_refused(page: str):
    with pytest.raises(ValueError):
        parsed(page)
