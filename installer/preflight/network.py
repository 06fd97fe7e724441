"""The address that the endpoint will have, and the way out that it should not have."""

import errno
import ipaddress
import socket
from pathlib import Path

import psutil

from installer.preflight.record import CheckRecord, PreflightContext


def address(context: PreflightContext) -> CheckRecord:
    """The address to listen on must belong to this machine."""
    host = context.endpoint.host
    required = "an address of this machine"
    why = "The endpoint listens on it."
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except OSError as error:
        fix = "Give one of this machine's addresses as --host (ip -brief address)."
        observed = f"{host}: {error.strerror or error}"
        return CheckRecord("address", "fail", observed, required, why, fix, "bind(2)", strict=True)
    return CheckRecord("address", "pass", host, required, why, evidence="bind(2)", strict=True)


def port(context: PreflightContext) -> CheckRecord:
    """The port must be free, or held by the running Atoll that the switch will stop."""
    host, number = context.endpoint.host, context.endpoint.port
    required = f"port {number} free on {host}"
    why = "The endpoint listens on it."
    evidence = f"ss -ltnp 'sport = :{number}'"
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
        return CheckRecord("port", "pass", f"{number} is free", required, why, evidence=evidence, strict=True)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            fix = "Choose another --port (1024 or above needs no privilege)."
            return CheckRecord("port", "fail", f"{number}: {error.strerror}", required, why, fix, evidence, strict=True)
    pid, name = _listener(number)
    if pid is not None and pid in context.own_pids:
        observed = f"{number} is held by the running Atoll"
        return CheckRecord("port", "pass", observed, required, why, evidence=evidence, strict=True)
    who = f"process {pid} ({name})" if pid else "a process of another user"
    fix = f"Stop it{f' (kill {pid})' if pid else ''}, or choose another --port."
    return CheckRecord("port", "fail", f"{number} is in use by {who}", required, why, fix, evidence, strict=True)


def exposure(context: PreflightContext) -> CheckRecord:
    """Without TLS the endpoint belongs on loopback: keys and prompts would cross the LAN readable."""
    host = context.endpoint.host
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    required = "a loopback address"
    why = "This form of the endpoint speaks plain HTTP: on a LAN anyone could read keys and prompts."
    if loopback:
        return CheckRecord("exposure", "pass", host, required, why)
    fix = "Use --host 127.0.0.1 behind a TLS proxy, or accept it: --waive exposure='reason'"
    return CheckRecord("exposure", "fail", f"{host} is reachable from other machines", required, why, fix)


def egress(context: PreflightContext) -> CheckRecord:
    """Only told, never judged: Atoll opens no connection to the outside either way."""
    try:
        routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
        default = next((fields[0] for fields in routes if fields[1] == "00000000"), None)
    except (OSError, IndexError):
        default = None
    observed = f"a default route through {default}: not air-gapped" if default else "no default route"
    why = "For information: Atoll never connects to the outside, and works with no route at all."
    return CheckRecord("egress", "pass", observed, "nothing", why, evidence="/proc/net/route")


def _listener(number: int) -> tuple[int | None, str]:
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return None, ""
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == number
        if listens and connection.pid:
            try:
                return connection.pid, psutil.Process(connection.pid).name()
            except psutil.Error:
                return connection.pid, "unknown"
    return None, ""
