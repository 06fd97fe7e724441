"""The supervised process: it survives its starter, restarts after a crash, and is never mistaken for another."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from installer_kit import Site, Witness

from installer.base.errors import ExitCode, InstallError
from installer.base.proc import ProcessId, boot_id, start_time
from installer.operate.lifecycle import start, stop
from installer.operate.status import status
from installer.service import log_file
from installer.service.log_file import follow, rotate, tail
from installer.service.prefix import SUPERVISOR, PrefixService, service_environment

Bundles = Callable[..., Path]


def until(true: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def pid_of(site: Site) -> int:
    pid = site.service.state().pid
    assert pid is not None
    return pid


def test_the_service_has_a_session_of_its_own_and_a_clean_environment(
    site: Site, bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://192.0.2.1:3128")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    site.install(bundle())
    pid = pid_of(site)
    assert os.getsid(pid) != os.getsid(0)
    assert os.getsid(pid) == json.loads(site.layout.pidfile.read_text())["pid"]
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
    assert "HF_HUB_OFFLINE=1" in environment
    assert f"XDG_CACHE_HOME={site.layout.cache}" in environment
    for unwanted in ("PROXY", "HF_TOKEN", "/nowhere", "sk-"):
        assert unwanted not in environment
    assert "sk-" not in Path(f"/proc/{pid}/cmdline").read_text()


def test_a_crash_is_restarted_and_counted(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    first = pid_of(site)
    os.kill(first, signal.SIGKILL)
    until(lambda: site.service.state().pid not in (first, None) and site.service.state().phase == "running")
    until(lambda: status(site.layout)["state"] == "serving")
    facts = status(site.layout)["service"]
    assert (facts["restarts"], facts["last_exit"]) == (1, -9)


def test_a_supervisor_that_is_killed_takes_the_service_with_it(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    child = pid_of(site)
    os.kill(json.loads(site.layout.pidfile.read_text())["pid"], signal.SIGKILL)
    until(lambda: start_time(child) is None)
    facts = status(site.layout)
    assert (facts["state"], facts["service"]["phase"]) == ("failed", "dead")
    assert start(site.layout, Witness(), service=site.service, timeout=20).changed  # type: ignore[arg-type]
    assert site.serving()["mode"] == "good"


def test_start_and_stop(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    pid = pid_of(site)
    assert not start(site.layout, Witness(), service=site.service).changed  # type: ignore[arg-type]
    assert stop(site.layout, service=site.service).changed
    assert start_time(pid) is None
    assert not site.layout.pidfile.exists()
    assert status(site.layout)["state"] == "stopped"
    assert not stop(site.layout, service=site.service).changed
    assert start(site.layout, Witness(), service=site.service, timeout=20).changed  # type: ignore[arg-type]
    assert site.serving()["mode"] == "good"


def test_a_process_that_ignores_the_request_is_killed(site: Site, bundle: Bundles) -> None:
    site.install(bundle(), "stubborn")
    pid = pid_of(site)
    quick = PrefixService(site.layout, stop_timeout=0.5)
    assert quick.stop()
    assert start_time(pid) is None


def test_a_child_in_another_session_is_stopped_too(site: Site, bundle: Bundles) -> None:
    site.install(bundle(), "family")
    child = int((site.layout.lib / "child.pid").read_text())
    assert os.getsid(child) == child
    assert child in site.service.pids()
    assert site.service.stop()
    assert start_time(child) is None


def test_a_reused_pid_is_left_alone(site: Site, bundle: Bundles) -> None:
    """The pidfile of another boot or of a process long gone must not get a stranger killed."""
    site.install(bundle())
    site.service.stop()
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        began = start_time(stranger.pid)
        assert began is not None
        for recorded in (
            {"pid": stranger.pid, "start_time": began + 1, "boot_id": boot_id()},
            {"pid": stranger.pid, "start_time": began, "boot_id": "another boot"},
        ):
            site.layout.pidfile.write_text(json.dumps(recorded))
            assert not site.service.state().up
            site.service.stop()
            assert stranger.poll() is None
        site.layout.pidfile.write_text("half a pidf")
        assert not site.service.stop()
    finally:
        stranger.kill()
        stranger.wait()


def test_only_one_supervisor_a_prefix(site: Site, bundle: Bundles) -> None:
    site.install(bundle())
    before = site.layout.pidfile.read_bytes()
    other = subprocess.run(
        [sys.executable, "-m", SUPERVISOR, "--prefix", str(site.prefix)],
        capture_output=True, timeout=30, cwd=Path(log_file.__file__).parents[2],
    )
    assert other.returncode == ExitCode.BUSY
    assert site.layout.pidfile.read_bytes() == before


def test_start_tells_who_holds_the_port(site: Site, bundle: Bundles) -> None:
    import socket

    site.install(bundle())
    site.service.stop()
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", site.port))
        held.listen()
        with pytest.raises(InstallError, match=f"process {os.getpid()}") as caught:
            start(site.layout, Witness(), service=site.service, timeout=20)  # type: ignore[arg-type]
    assert caught.value.exit_code == ExitCode.PREFLIGHT_FAIL


def test_commands_where_nothing_is_installed(site: Site) -> None:
    for command in (lambda: stop(site.layout), lambda: status(site.layout)):
        with pytest.raises(InstallError, match="no Atoll installation") as caught:
            command()
        assert caught.value.exit_code == ExitCode.USAGE
    assert not site.prefix.exists()


def test_the_log_is_rotated_and_followed_across_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "serve.log"
    log.write_text("old\n")
    monkeypatch.setattr(log_file, "LOG_CAP", 100)
    for generation in range(5):
        log.write_text(f"generation {generation}\n" * 20)
        rotate(log)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["serve.log.1", "serve.log.2", "serve.log.3"]
    assert (tmp_path / "serve.log.1").read_text().startswith("generation 4")
    with log.open("a") as writer:
        writer.write("x" * 200 + "\n")
        writer.flush()
        rotate(log, running=True)
        assert log.stat().st_size == 0
        writer.write("after\n")
        writer.flush()
    assert log.read_text() == "after\n"
    assert tail(log, 5) == ["after"]
    assert tail(tmp_path / "none", 5) == []


def test_a_log_is_followed_across_rotation(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("before\n")
    lines = follow(log)
    writes = iter([
        lambda: log.open("a").write("one\ntwo\n"),
        lambda: (log.replace(tmp_path / "serve.log.1"), log.write_text("three\n")),
        lambda: os.truncate(log, 0),
        lambda: log.write_text("4\n"),
    ])
    timer = threading.Thread(target=lambda: [(time.sleep(0.6), write()) for write in writes], daemon=True)
    timer.start()
    assert [next(lines) for _ in range(4)] == ["one", "two", "three", "4"]
    timer.join()
    lines.close()  # type: ignore[attr-defined]


def test_identity_of_a_process() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    assert me.alive()
    assert not ProcessId(me.pid, me.start_time + 1, me.boot_id).alive()
    assert ProcessId.of(2**22 + 1) is None


def test_caches_stay_inside_the_prefix(site: Site) -> None:
    environment = service_environment(site.layout)
    for name in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert Path(environment[name]).is_relative_to(site.prefix)


def test_limits_of_the_environment_reach_the_service(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_LIMITS_MAX_IN_FLIGHT", "7")
    monkeypatch.setenv("ATOLL_SECRET", "x")
    environment = service_environment(site.layout)
    assert environment["ATOLL_LIMITS_MAX_IN_FLIGHT"] == "7"
    assert "ATOLL_SECRET" not in environment
