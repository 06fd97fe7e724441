"""How the wheels of a runtime are chosen and downloaded: a real HTTP server disconnects, ignores ranges, or lies."""

import errno
import hashlib
import http.server
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundle_kit import refused

from offline_bundle.errors import BundleError
from offline_bundle.progress import silent
from offline_bundle.runtime import download, resolve
from offline_bundle.runtime.download import Downloader
from offline_bundle.runtime.resolve import Pick, Pip, Source

DATA = os.urandom(3 << 20)
PIP = Pip(Path(sys.executable))
NAME = "thing-1.0-py3-none-any.whl"


class Index(http.server.ThreadingHTTPServer):
    """Serves DATA; `breaks` connections end in the middle; `asked` notes the first byte of each request."""

    daemon_threads = True

    def __init__(self) -> None:
        self.breaks, self.ranges, self.closed, self.data = 0, True, False, DATA
        self.asked: list[int] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{NAME}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_HEAD(self) -> None:
        self.send_response(401 if self.server.closed else 200)
        self.send_header("Content-Length", str(len(self.server.data)))
        self.end_headers()

    def do_GET(self) -> None:
        asked = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        start = asked if self.server.ranges else 0
        self.server.asked.append(asked)
        body = self.server.data[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.breaks:
            self.server.breaks -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index() -> Iterator[Index]:
    with Index() as server:
        yield server
        server.shutdown()


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Downloader:
    monkeypatch.setattr(download.time, "sleep", lambda _: None)
    return Downloader(tmp_path / "downloads", PIP)


def pick(index: Index, digest: str | None = None) -> Pick:
    return Pick("thing", "1.0", index.url, digest or hashlib.sha256(DATA).hexdigest(), ())


def fetch(downloads: Downloader, one: Pick) -> list[tuple[str, int, int]]:
    told: list[tuple[str, int, int]] = []
    downloads.fetch(downloads.plan([one]), Source(), lambda *progress: told.append(progress))
    assert downloads.path(one).read_bytes() == DATA
    assert [path.name for path in downloads.directory.iterdir()] == [NAME]  # nothing half-done is left
    assert told[-1] == ("download", len(DATA), len(DATA))
    return told


def test_sizes_are_known_before_anything_is_fetched(index: Index, downloads: Downloader) -> None:
    plan = downloads.plan([pick(index)])
    assert (plan.total, plan.to_fetch, plan.already_here, plan.unknown) == (len(DATA), len(DATA), 0, 0)
    assert index.asked == []
    assert not downloads.directory.exists()


def test_a_broken_connection_goes_on_where_it_broke(index: Index, downloads: Downloader) -> None:
    index.breaks = 3
    fetch(downloads, pick(index))
    assert index.asked[0] == 0
    assert len(index.asked) == 4
    assert index.asked == sorted(set(index.asked))


def test_a_later_run_goes_on_where_an_earlier_one_was_stopped(index: Index, downloads: Downloader) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if done >= 1 << 20:
            raise KeyboardInterrupt

    index.breaks = 1  # so that there is a pause in the middle
    with pytest.raises(KeyboardInterrupt):
        downloads.fetch(downloads.plan([pick(index)]), Source(), stop)
    plan = downloads.plan([pick(index)])
    assert plan.already_here >= 1 << 20
    assert plan.to_fetch == len(DATA) - plan.already_here
    index.asked.clear()
    fetch(downloads, pick(index))
    assert index.asked == ([plan.already_here] if plan.to_fetch else [])
    fetch(downloads, pick(index))  # all of it is there
    assert len(index.asked) <= 1


def test_a_spoilt_left_over_is_fetched_anew(index: Index, downloads: Downloader) -> None:
    one = pick(index)
    downloads.directory.mkdir()
    downloads._partial_path(one).write_bytes(bytes(1 << 20))
    fetch(downloads, one)
    assert index.asked == [1 << 20, 0]


def test_a_server_without_ranges_sends_all_again(index: Index, downloads: Downloader) -> None:
    index.ranges = False
    index.breaks = 1
    fetch(downloads, pick(index))
    assert len(index.asked) == 2


def test_another_file_than_the_index_names_is_refused(index: Index, downloads: Downloader) -> None:
    index.data = bytes(len(DATA))
    refused(11, "hash differs", lambda: fetch(downloads, pick(index)))
    assert list(downloads.directory.iterdir()) == []


def test_a_server_that_is_gone_is_named(index: Index, downloads: Downloader) -> None:
    plan = downloads.plan([pick(index)])
    index.shutdown()
    index.server_close()
    error = refused(13, NAME, lambda: downloads.fetch(plan, Source(), silent))
    assert "resumes where it stopped" in error.hint


def test_a_full_disk_is_told_before_and_not_tried_again(
    index: Index, downloads: Downloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = downloads.plan([pick(index)])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download._PartialFile, "add", full)
    with pytest.raises(OSError) as caught:
        downloads.fetch(plan, Source(), silent)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    refused(30, "MiB free", lambda: downloads.fetch(plan, Source(), silent))


def test_what_only_pip_may_have_is_left_to_pip(
    index: Index, downloads: Downloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that wants a password: pip knows it, from its settings or a keyring."""
    index.closed = True
    plan = downloads.plan([pick(index)])
    assert (plan.total, plan.unknown) == (0, 1)
    asked: list[tuple[str, ...]] = []

    def run(self: Pip, *arguments: str, deed: str) -> str:
        asked.append(arguments)
        (downloads.directory / NAME).write_bytes(DATA)
        return ""

    monkeypatch.setattr(Pip, "run", run)
    downloads.fetch(plan, Source(), silent)
    assert asked[0][0] == "download"
    assert asked[0][-1] == "thing==1.0"
    assert "--no-deps" in asked[0]


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_settings_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own may constrain torch."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)


def empty_wheel(house: Path, version: str, *requires: str) -> None:
    import zipfile

    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = house / f"torch-{version}-{python}-{python}-manylinux_2_17_{os.uname().machine}.whl"
    lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    with zipfile.ZipFile(name, "w") as wheel:
        wheel.writestr(f"torch-{version}.dist-info/METADATA", "\n".join([*lines, "", ""]))
        wheel.writestr(f"torch-{version}.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {python}-{python}-any\n")


@pytest.mark.usefixtures("no_settings_of_pip")
@pytest.mark.parametrize(
    "version,requires,torch,code,words",
    [
        ("9.9.0+cpu", [], "cuda", 13, "they have: 9.9.0+cpu"),  # an index with the CPU build alone, under its name
        ("9.9.0", [], "cuda", 11, "as a CPU build only"),  # and under the plain one
        ("9.9.0+cu130", [], "cpu", 13, "they have: 9.9.0+cu130"),
        ("9.8.0", [], "cuda", 13, "that version that they have: -"),
    ],
)
def test_the_other_build_of_torch_is_refused_before_anything_is_fetched(
    version: str, requires: list[str], torch: resolve.Torch, code: int, words: str, tmp_path: Path
) -> None:
    empty_wheel(tmp_path, version, *requires)
    error = refused(
        code, words, lambda: resolve.resolve(PIP, ["torch==9.9.0"], torch, Source(wheels=tmp_path))
    )
    assert "--torch" in error.hint or "PyPI" in error.hint


@pytest.mark.usefixtures("no_settings_of_pip")
def test_each_build_is_found_by_its_name(tmp_path: Path) -> None:
    empty_wheel(tmp_path, "9.9.0+cpu")
    (found,), _ = resolve.resolve(PIP, ["torch==9.9.0"], "cpu", Source(wheels=tmp_path))
    assert (found.version, found.sha256 is not None) == ("9.9.0+cpu", True)


def test_an_index_that_does_not_answer_is_not_blamed_on_torch(tmp_path: Path) -> None:
    with pytest.raises(BundleError) as caught:
        resolve.resolve(PIP, ["nothing-of-the-kind==1"], "cuda", Source(wheels=tmp_path))
    assert "torch" not in caught.value.message


def test_progress_never_runs_backwards_past_its_total(index: Index, downloads: Downloader) -> None:
    index.ranges, index.breaks = False, 2
    told = fetch(downloads, pick(index))
    assert all(0 <= done <= total for _, done, total in told)
