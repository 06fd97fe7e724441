"""Tests on machines that boot. They run when they are asked for: `make test-appliance`, or `pytest -m boot tests/boot`.

Without root, systemd-nspawn or a kernel that can count connects they are skipped, and say why.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rootfs
from machine import Machine, MachineError, cgroup2
from measures import Measures
from rootfs import NoRoot, suites

HERE = Path(__file__).parent
FAILED = pytest.StashKey[dict[str, str]]()
MEASURES = pytest.StashKey[list[tuple[str, float, float | None]]]()


def missing() -> str | None:
    """Why machines cannot be booted here, or None."""
    if os.geteuid() != 0:
        return "booting a machine needs root: sudo make test-appliance"
    for program, package in (("systemd-nspawn", "systemd-container"), ("debootstrap", "debootstrap"),
                             ("nsenter", "util-linux")):  # fmt: skip
        if shutil.which(program) is None:
            return f"{program} is not here: apt-get install {package}"
    try:
        top = cgroup2()
    except MachineError as error:
        return str(error)
    if not os.access(top / "cgroup.procs", os.W_OK):
        return f"{top} cannot be written: this is a container without rights over control groups"
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "incremental: a story in chapters; it ends with the first that fails")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name.startswith("test_boot_") and "boot" not in (config.option.markexpr or ""):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    reason = missing() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.boot)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """The chapters of a story (marked `incremental`) end with the first that fails."""
    failed = call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception)
    if failed and item.get_closest_marker("incremental"):
        item.session.stash.setdefault(FAILED, {}).setdefault(_story(item), item.name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if failed := item.session.stash.get(FAILED, {}).get(_story(item)):
        pytest.skip(f"the story ended with {failed}")


def _story(item: pytest.Item) -> str:
    parameters = getattr(item, "callspec", None)
    return f"{item.parent.nodeid if item.parent else ''} {parameters.id if parameters else ''}"


@pytest.fixture(scope="session")
def work() -> Iterator[Path]:
    """Where machines live."""
    directory = rootfs.work()
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    yield directory
    with contextlib.suppress(OSError):  # another run may have machines there
        directory.rmdir()


@pytest.fixture(scope="session", params=suites())
def suite(request: pytest.FixtureRequest) -> str:
    """The distribution's release; its root is there."""
    return with_root(request.param)


def with_root(suite: str) -> str:
    """Make the root of a suite. Where no mirror has it the tests that need it are skipped."""
    try:
        rootfs.ensure_root(suite)
    except NoRoot as error:
        pytest.skip(str(error))
    return suite


@pytest.fixture
def new_machine(work: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Machine]]:
    """``new_machine(suite)`` → a fresh machine, off; gone at the end of the test, also after Ctrl-C."""
    made: list[Machine] = []

    def make(suite: str, **options: object) -> Machine:
        made.append(Machine(with_root(suite), work, **options).__enter__())  # type: ignore[arg-type]
        return made[-1]

    yield make
    for machine in reversed(made):
        machine.__exit__()


@pytest.fixture(scope="session")
def measure(request: pytest.FixtureRequest) -> Measures:
    """``measure(what, seconds, limit)``."""
    return Measures(request.config.stash.setdefault(MEASURES, []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(MEASURES, [])
    if rows:
        terminalreporter.section("measured on the booted machines")
        for what, seconds, limit in rows:
            bound = f"(at most {limit:.0f} s)" if limit is not None else ""
            terminalreporter.write_line(f"{seconds:7.1f} s  {bound:16} {what}")
