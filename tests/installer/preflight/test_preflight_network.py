"""Ports, addresses, names and ways out: real sockets, and routing tables as the kernel writes them."""

import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from preflight_kit import FakeMachine, context, on_path

from installer.preflight import network, surroundings
from installer.preflight.owners import Owner

ROUTES = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
LAN = "eth0\t000A0A0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"           # 10.10.10.0/24, direct
DEFAULT = "eth0\t00000000\t010A0A0A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"       # 0.0.0.0/0 via 10.10.10.1
PRIVATE = "eth0\t0000000A\t010A0A0A\t0003\t0\t0\t0\t000000FF\t0\t0\t0\n"       # 10.0.0.0/8 via 10.10.10.1
HALF = "tun0\t00000000\t010A0A0A\t0003\t0\t0\t0\t00000080\t0\t0\t0\n"          # 0.0.0.0/1, as VPNs set it
REJECT = "*\t00000000\t00000000\t0200\t0\t0\t0\t00000000\t0\t0\t0\n"
V6_DEFAULT = f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 27}1 00000400 00000001 00000000 00000003     eth0\n"
V6_LOCAL = f"fe80{'0' * 28} 40 {'0' * 32} 00 {'0' * 32} 00000100 00000001 00000000 00000001     eth0\n"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    made = FakeMachine(tmp_path / "root")
    made.put("/etc/hosts", "127.0.0.1 localhost\n# 10.0.0.1 commented\n127.0.1.1 Server.bank server\n")
    return made


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


# -- 18


def test_a_free_port(tmp_path: Path, free_port: Callable[[], int]) -> None:
    number = free_port()
    assert network.port(context(tmp_path, port=number)).status == "pass"
    assert network.is_free("127.0.0.1", number)


def test_a_port_in_use_names_its_holder(tmp_path: Path, listener: socket.socket) -> None:
    number = listener.getsockname()[1]
    assert not network.is_free("127.0.0.1", number)
    record = network.port(context(tmp_path, port=number))
    assert (record.status, record.strict) == ("fail", False)
    assert f"process {os.getpid()}" in record.observed
    assert record.command
    assert network.port(context(tmp_path, port=number, own_pids=frozenset({os.getpid()}))).status == "pass"


def test_another_process_holds_it(tmp_path: Path) -> None:
    script = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        record = network.port(context(tmp_path, port=int(child.stdout.readline())))
        assert f"process {child.pid} (python" in record.observed
    finally:
        child.kill()
        child.wait()


def test_a_port_that_a_socket_unit_holds(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = listener.getsockname()[1]
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", on_path(directory))
    monkeypatch.setattr(network, "_listeners", lambda number: [1])
    monkeypatch.setattr(Owner, "of", classmethod(lambda cls, machine, pid, name="": cls(pid, "systemd", "init.scope")))
    for unit, status in (("nginx.socket", "fail"), ("atoll-gateway.socket", "pass")):
        (directory / "systemctl").write_text(f"#!/bin/sh\necho '127.0.0.1:{number} {unit} x.service'\n")
        (directory / "systemctl").chmod(0o755)
        record = network.port(context(tmp_path, port=number))
        assert record.status == status
    assert "nginx.socket" not in record.command


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use every port")
def test_a_port_without_the_privilege(tmp_path: Path) -> None:
    assert network.port(context(tmp_path, port=80)).status == "fail"


# -- 19


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1", "pass"), ("localhost", "pass"), ("SERVER", "pass"), ("192.0.2.77", "fail"),
     ("nowhere.example", "fail")],
)  # fmt: skip
def test_addresses(tmp_path: Path, machine: FakeMachine, host: str, status: str) -> None:
    assert network.address(context(tmp_path, machine=machine, host=host)).status == status


def test_no_name_server_is_ever_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a look-up")

    for name in ("getaddrinfo", "gethostbyname", "getfqdn", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for check in (network.address, network.port, network.hostname, network.egress, network.exposure):
        check(context(tmp_path, host="nowhere.example", system=True))


def _addresses(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    from psutil._ntuples import snicaddr

    entries = [snicaddr(socket.AF_INET, address, None, None, None) for address in ("127.0.0.1", *found)]
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: {"eth0": entries})


@pytest.mark.parametrize(
    ("found", "routes", "status"),
    [
        (["10.10.10.5"], ROUTES + LAN + PRIVATE, "pass"),
        (["10.10.10.5"], ROUTES + LAN, "warn"),          # only its own network is answered
        ([], ROUTES, "warn"),                            # only loopback
    ],
)
def test_all_addresses(
    tmp_path: Path, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, found: list[str], routes: str, status: str
) -> None:
    _addresses(monkeypatch, *found)
    machine.put("/proc/net/route", routes)
    record = network.address(context(tmp_path, system=True, machine=machine, host="0.0.0.0"))
    assert record.status == status


# -- 24


@pytest.mark.parametrize(
    ("v4", "v6", "leads_out"),
    [
        (ROUTES + LAN, "", False),
        (ROUTES + LAN + PRIVATE, V6_LOCAL, False),
        (ROUTES + LAN + REJECT, "", False),
        (ROUTES + LAN + DEFAULT, "", True),
        (ROUTES + LAN + HALF, "", True),
        (ROUTES + LAN, V6_LOCAL + V6_DEFAULT, True),
        ("", "", False),
    ],
)
def test_ways_out(tmp_path: Path, machine: FakeMachine, v4: str, v6: str, leads_out: bool) -> None:
    machine.put("/proc/net/route", v4)
    machine.put("/proc/net/ipv6_route", v6)
    record = network.egress(context(tmp_path, system=True, machine=machine))
    assert record.status == ("warn" if leads_out else "pass")
    assert network.egress(context(tmp_path, machine=machine)).status == "pass"


def test_the_real_routing_table(tmp_path: Path) -> None:
    assert network.egress(context(tmp_path, system=True)).status in ("pass", "warn")


# -- 21


@pytest.mark.parametrize(
    ("name", "nsswitch", "names", "status"),
    [
        ("server", "hosts: files dns\n", None, "pass"),
        ("other", "hosts: files dns\n", None, "warn"),
        ("other", "hosts: files myhostname dns\n", None, "pass"),
        ("x" * 64, "hosts: files myhostname\n", None, "warn"),
        ("under_score", "hosts: files myhostname\n", None, "warn"),
        ("server", "", ("server.bank", "10.0.0.1"), "pass"),
        ("server", "", ("*.bank",), "warn"),
        ("server.bank", "", ("*.bank",), "pass"),
        ("server", "", ("llm.bank",), "warn"),
    ],
)
def test_host_names(
    tmp_path: Path, machine: FakeMachine, name: str, nsswitch: str, names: tuple[str, ...] | None, status: str
) -> None:
    machine.put("/proc/sys/kernel/hostname", name + "\n")
    machine.put("/etc/nsswitch.conf", nsswitch)
    assert network.hostname(context(tmp_path, machine=machine, certificate_names=names)).status == status


def test_the_certificate_that_is_in_use(tmp_path: Path, machine: FakeMachine) -> None:
    """The names come from the file, if nobody gives them."""
    import datetime
    from dataclasses import replace

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    other = [x509.DNSName("llm.bank"), x509.IPAddress(ipaddress.ip_address("10.0.0.1"))]
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    made = builder.add_extension(x509.SubjectAlternativeName(other), critical=False).sign(key, hashes.SHA256())
    file = tmp_path / "server.crt"
    file.write_bytes(made.public_bytes(Encoding.PEM))
    machine.put("/proc/sys/kernel/hostname", "server\n")
    plans = context(tmp_path, machine=machine)
    assert network.hostname(plans).status == "pass"
    record = network.hostname(replace(plans, endpoint=replace(plans.endpoint, certificate=file)))
    assert record.status == "warn"
    assert "llm.bank, 10.0.0.1" in record.observed
    file.write_bytes(b"garbage")
    assert network.hostname(replace(plans, endpoint=replace(plans.endpoint, certificate=file))).status == "pass"


# -- 27


@pytest.mark.parametrize(
    ("host", "tls", "status"),
    [("127.0.0.1", False, "pass"), ("::1", False, "pass"), ("0.0.0.0", False, "fail"), ("10.0.0.1", False, "fail"),
     ("0.0.0.0", True, "pass")],
)  # fmt: skip
def test_exposure(tmp_path: Path, host: str, tls: bool, status: str) -> None:
    assert network.exposure(context(tmp_path, host=host, tls=tls)).status == status


# -- 22


@pytest.mark.parametrize(("enforce", "status"), [("1", "warn"), ("0", "pass"), (None, "pass")])
def test_selinux(tmp_path: Path, machine: FakeMachine, enforce: str | None, status: str) -> None:
    if enforce is not None:
        machine.put("/sys/fs/selinux/enforce", enforce)
    machine.put("/sys/module/apparmor/parameters/enabled", "Y\n")
    record = surroundings.security_policy(context(tmp_path, machine=machine))
    assert record.status == status
    assert enforce == "1" or "AppArmor" in record.observed


@pytest.fixture
def fapolicyd(tmp_path: Path) -> Iterator[None]:
    """A real process of that name."""
    program = tmp_path / "fapolicyd"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def test_fapolicyd(tmp_path: Path, machine: FakeMachine, fapolicyd: None) -> None:
    plans = context(tmp_path, machine=machine)
    record = surroundings.security_policy(plans)
    assert record.status == "fail"
    assert "fapolicyd-cli" in record.command
    machine.put("/etc/fapolicyd/trust.d/atoll", f"{plans.layout.opt}/current/bin/atoll 1 abc\n")
    assert surroundings.security_policy(plans).status == "pass"
    machine.at("/etc/fapolicyd/trust.d/atoll").unlink()
    machine.put("/etc/fapolicyd/fapolicyd.conf", "permissive = 1\n")
    assert surroundings.security_policy(plans).status == "pass"


# -- 25


def test_an_unknown_installation(tmp_path: Path) -> None:
    plans = context(tmp_path)
    assert surroundings.conflicts(plans).status == "pass"
    (plans.layout.opt / "code/abc").mkdir(parents=True)
    (plans.layout.opt / "code/abc/file").touch()        # what install.sh unpacks before the journal begins
    (plans.layout.lib / "models").mkdir(parents=True)   # what an uninstall may leave
    plans.layout.state.mkdir(parents=True)
    plans.layout.lock.touch()                           # an install was cut off before it began its journal
    assert surroundings.conflicts(plans).status == "pass"
    (plans.layout.etc).mkdir(parents=True)
    (plans.layout.etc / "atoll.toml").touch()
    record = surroundings.conflicts(plans)
    assert record.status == "fail"
    assert str(plans.layout.etc) in record.command
    plans.layout.journal.touch()
    assert surroundings.conflicts(plans).status == "pass"


def test_another_model_server(tmp_path: Path) -> None:
    program = tmp_path / "ollama"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    try:
        record = surroundings.conflicts(context(tmp_path, device="cpu"))
        assert record.status == "warn"
        assert f"process {child.pid} (ollama)" in record.observed
        assert surroundings.conflicts(context(tmp_path, device="cpu", own_pids=frozenset({child.pid}))).status == "pass"
    finally:
        child.kill()
        child.wait()
