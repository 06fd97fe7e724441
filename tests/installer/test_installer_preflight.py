"""The checks against machines that are not this one."""

import time
from pathlib import Path

import pytest

from installer import preflight
from installer.config import Endpoint
from installer.errors import ExitCode, InstallError
from installer.layout import Layout
from installer.preflight import CheckRecord, PreflightContext, gpu, host, judge, run_checks, storage

TERABYTE = 1 << 40


def context(tmp_path: Path, **facts: object) -> PreflightContext:
    return PreflightContext(Layout.at(tmp_path / "prefix"), Endpoint("127.0.0.1", 8123), **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("check", "facts"),
    [
        (host.memory, {"weight_bytes": 100 * TERABYTE}),
        (host.memory, {"host_ram_bytes": 100 * TERABYTE}),
        (host.clock, {"bundle_created": time.time() + 3 * 86400}),
        (storage.disk, {"copy_bytes": 10_000 * TERABYTE}),
    ],
)
def test_what_this_machine_cannot_hold_fails_with_numbers_and_a_remedy(tmp_path, check, facts) -> None:
    record = check(context(tmp_path, **facts))
    assert record.status == "fail"
    assert record.observed
    assert record.required
    assert record.fix
    assert check(context(tmp_path)).status == "pass"


def test_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text
    flags = ""

    def read_text(self: Path, *arguments: object, **options: object) -> str:
        if str(self) == "/proc/cpuinfo":
            return f"processor : 0\nmodel name : Test CPU\nflags : {flags}\n"
        return real(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    for given, status, word in [
        (host._V3 | {"sha_ni"}, "pass", "Test CPU"),
        (host._V3, "warn", "sha_ni"),
        (host._V2, "warn", "avx2"),
        (host._V2 - {"sse4_2"}, "fail", "sse4_2"),
    ]:
        flags = " ".join(given)
        record = host.cpu(context(tmp_path))
        assert (record.status, word in record.observed) == (status, True)
    monkeypatch.setattr(host.platform, "machine", lambda: "aarch64")
    assert host.cpu(context(tmp_path)).status == "fail"


@pytest.mark.parametrize(
    ("version", "status"), [(("glibc", "2.28"), "pass"), (("glibc", "2.17"), "fail"), (("", ""), "fail")]
)
def test_c_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[str, str], status: str) -> None:
    monkeypatch.setattr(host.platform, "libc_ver", lambda: version)
    assert host.glibc(context(tmp_path)).status == status


def test_gpus_on_the_bus(tmp_path: Path) -> None:
    for name, vendor, kind in [
        ("0000:01:00.0", "0x10de", "0x030200"),
        ("0000:01:00.1", "0x10de", "0x040300"),
        ("0000:02:00.0", "0x8086", "0x030000"),
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert gpu.nvidia_pci_devices(tmp_path) == ["0000:01:00.0"]
    assert gpu.nvidia_pci_devices(tmp_path / "none") == []


def test_a_check_that_breaks_is_told_and_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: PreflightContext) -> CheckRecord:
        raise RuntimeError("no such sensor")

    monkeypatch.setattr(preflight, "CHECKS", (broken, host.python))
    records = run_checks(context(tmp_path))
    assert [(record.id, record.status) for record in records] == [("broken", "warn"), ("python", "pass")]
    assert "no such sensor" in records[0].observed


def test_judgement() -> None:
    def record(status: str, *, strict: bool = False, waived: str | None = None) -> CheckRecord:
        return CheckRecord("disk", status, "seen", "needed", "why", "fix", strict=strict, waived=waived)  # type: ignore[arg-type]

    judge([record("pass"), record("warn"), record("fail", waived="known")])
    for records, strict, code in [
        ([record("fail")], False, ExitCode.PREFLIGHT_FAIL),
        ([record("fail", strict=True)], False, ExitCode.PREFLIGHT_FAIL),
        ([record("warn")], True, ExitCode.PREFLIGHT_WARN),
    ]:
        with pytest.raises(InstallError) as caught:
            judge(records, strict=strict)
        assert caught.value.exit_code == code


def test_preflight_is_quick(tmp_path: Path) -> None:
    began = time.monotonic()
    records = run_checks(context(tmp_path))
    assert time.monotonic() - began < 10
    assert len({record.id for record in records}) == len(records) == len(preflight.CHECKS)
    assert not tmp_path.joinpath("prefix").exists()
