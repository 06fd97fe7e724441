"""The address of the endpoint, its name, and a route to the outside that should not exist."""

import errno
import ipaddress
import re
import socket
from collections.abc import Collection

import psutil

from installer.base.i18n import Text, joined, t
from installer.gpu.command import run
from installer.preflight.certificate import names_in
from installer.preflight.machine import Machine
from installer.preflight.owners import Owner
from installer.preflight.record import PreflightContext, Seen, check

_RTF_REJECT = 0x200
_ANY = ("0.0.0.0", "::", "")  # noqa: S104
ANOTHER_PORT = t("in the screens, the field Port (key 0); on the command line, --port")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\Z")


def _literal(machine: Machine, host: str) -> str | None:
    """The address that `host` is, or that /etc/hosts gives for it. Never asks a name server: nothing is sent
    anywhere."""
    if host in _ANY:
        return host or "0.0.0.0"  # noqa: S104
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        pass
    for line in machine.read("/etc/hosts").splitlines():
        words = line.partition("#")[0].split()
        if host.lower() in (word.lower() for word in words[1:]):
            return words[0]
    return "127.0.0.1" if host == "localhost" else None


def _bind(address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        if port:
            probe.listen(1)


def is_free(address: str, port: int) -> bool:
    """Whether a program could listen there now."""
    try:
        _bind(address, port)
    except OSError:
        return False
    return True


@check(
    18, "port", t("Port"),
    required=t("free"), why=t("The endpoint listens on it."),
)  # fmt: skip
def port(context: PreflightContext) -> Seen:
    """The port must be free, or held by the running Atoll that the switch will stop."""
    number, address = context.endpoint.port, _literal(context.machine, context.endpoint.host)
    required = t("port {number} free on {host}", number=number, host=context.endpoint.host)
    evidence = f"ss -ltnp 'sport = :{number}'"
    if address is None:
        seen = t("{host} is not an address", host=context.endpoint.host)
        return Seen("fail", seen, t("See the check '{id}'.", id="address"), "", evidence, required)
    try:
        _bind(address, number)
        return Seen("pass", t("{number} is free", number=number), evidence=evidence, required=required)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:  # the check of the address reports it
            return Seen("pass", t("{number} is free", number=number), evidence=evidence, required=required)
        if error.errno != errno.EADDRINUSE:
            fix = t("Choose another port (1024 or above needs no privilege): {how}.", how=ANOTHER_PORT)
            return Seen("fail", f"{number}: {error.strerror}", fix, evidence, evidence, required)
    holders = [Owner.of(context.machine, pid) for pid in _listeners(number)]
    if holders and all(_is_ours(context, holder, number) for holder in holders):
        seen = t("{number} is held by the running Atoll", number=number)
        return Seen("pass", seen, evidence=evidence, required=required)
    named = [holder for holder in holders if not _is_ours(context, holder, number)]
    unit = _socket_unit(number) if any(holder.pid == 1 for holder in named) else ""
    who: Text = t("the unit {unit}", unit=unit) if unit else joined([holder.text for holder in named], "; ")
    fix = t("Stop it, or choose another port: {how}.", how=ANOTHER_PORT)
    command = f"systemctl disable --now {unit}" if unit else named[0].stop_command if named else evidence
    return Seen("fail", t("{number} is in use by {who}", number=number, who=who or t("a process of another user")), fix,
                command, evidence, required)  # fmt: skip


def _is_ours(context: PreflightContext, holder: Owner, number: int) -> bool:
    if holder.pid in context.own_pids or holder.unit.startswith("atoll-"):
        return True
    return holder.pid == 1 and _socket_unit(number).startswith("atoll-")


def _socket_unit(number: int) -> str:
    """The socket unit through which systemd itself listens on this port."""
    for line in run(["systemctl", "list-sockets", "--no-legend", "--no-pager", "--full"], 3).stdout.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0].endswith(f":{number}"):
            return words[1]
    return ""


def held_by_others(number: int, ours: Collection[int]) -> bool:
    """Whether a process that is not one of `ours` listens on this TCP port."""
    return any(pid not in ours for pid in _pids_at(number))


def _listeners(number: int) -> list[int]:
    """Processes that listen on this TCP port; empty if the system does not tell this user."""
    return sorted(pid for pid in _pids_at(number) if pid)


def _pids_at(number: int) -> set[int | None]:
    """As `_listeners`; None for a process of another user."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return set()
    return {c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == number}


@check(
    19, "address", t("Address"),
    required=t("an address of this machine"), why=t("The endpoint listens on it."),
)  # fmt: skip
def address(context: PreflightContext) -> Seen:
    """The address to listen on must belong to this machine."""
    host = context.endpoint.host
    command = "ip -brief address"
    literal = _literal(context.machine, host)
    if literal is None:
        fix = t("Give an address as --host, or write the name into /etc/hosts. Name servers are not asked.")
        return Seen("fail", t("{host} is not an address", host=host), fix, command, "/etc/hosts")
    try:
        _bind(literal, 0)
    except OSError as error:
        fix = t("Give one of this machine's addresses as --host.")
        return Seen("fail", f"{host}: {error.strerror or error}", fix, command, "bind(2)")
    if ipaddress.ip_address(literal).is_loopback:
        return Seen("pass", host, evidence="bind(2)")
    lan = sorted({a.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for a in entries
                  if a.family in (socket.AF_INET, socket.AF_INET6) and _is_lan(a.address)})  # fmt: skip
    if not lan:
        fix = t("Connect the network, then set an address.")
        seen = t("{host}, but this machine has only its loopback", host=host)
        return Seen("warn", seen, fix, command, command, t("an address in the network of the clients"),
                    t("Other machines cannot reach the endpoint."))  # fmt: skip
    seen = t("{host} (this machine: {addresses})", host=host, addresses=", ".join(lan)) if literal in _ANY else host
    if context.system and not _routes(context.machine, beyond=True):
        why = t("Atoll needs no default route, but only clients in the same network will be answered.")
        fix = t("If clients are in other networks, add a route to them.")
        return Seen("warn", t("{seen}; no route to other networks", seen=seen), fix,
                    "ip route add NETWORK via GATEWAY", "/proc/net/route", why=why)  # fmt: skip
    return Seen("pass", seen, evidence="bind(2)")


def _is_lan(text: str) -> bool:
    found = ipaddress.ip_address(text.partition("%")[0])
    return not (found.is_loopback or found.is_link_local)


def _routes(machine: Machine, *, beyond: bool = False) -> list[str]:
    """Routes to public addresses; with `beyond`, all routes through a gateway."""
    found = []
    for line in machine.read("/proc/net/route").splitlines()[1:]:
        words = line.split()
        if len(words) < 8 or int(words[3], 16) & _RTF_REJECT:
            continue
        target, gateway, mask = (socket.inet_ntoa(bytes.fromhex(words[i])[::-1]) for i in (1, 2, 7))
        if (gateway != "0.0.0.0") if beyond else _is_public(f"{target}/{mask}"):  # noqa: S104
            found.append(f"{words[0]}: {_named(f'{target}/{mask}')} via {gateway}")
    for line in machine.read("/proc/net/ipv6_route").splitlines():
        words = line.split()
        if len(words) < 10 or words[9] == "lo" or int(words[8], 16) & _RTF_REJECT:
            continue
        target, gateway = (str(ipaddress.IPv6Address(bytes.fromhex(words[i]))) for i in (0, 4))
        prefix = f"{target}/{int(words[1], 16)}"
        if (gateway != "::") if beyond else _is_public(prefix):
            found.append(f"{words[9]}: {_named(prefix)} via {gateway}")
    return list(dict.fromkeys(found))


def _named(network: str) -> str:
    parsed = ipaddress.ip_network(network, strict=False)
    return "default" if parsed.prefixlen == 0 else str(parsed)


def _is_public(network: str) -> bool:
    parsed = ipaddress.ip_network(network, strict=False)
    return parsed.prefixlen == 0 or not (parsed.is_private or parsed.is_link_local or parsed.is_multicast)


@check(
    24, "egress", t("Way out"),
    required=t("no route to the Internet"),
    why=t("Atoll never connects to the outside, and works with no route at all."),
)  # fmt: skip
def egress(context: PreflightContext) -> Seen:
    """Looks only at the routing table; sends nothing."""
    routes = _routes(context.machine)
    evidence = "/proc/net/route, /proc/net/ipv6_route"
    if not routes:
        return Seen("pass", t("none"), evidence=evidence)
    seen = t("a route leads out: {routes}", routes="; ".join(routes[:4]))
    if not context.system:
        return Seen("pass", seen, evidence=evidence, required=t("nothing: under a prefix this is only for information"))
    fix = t("If this server is to be isolated, replace it with routes to your own networks.")
    return Seen("warn", seen, fix, "ip route del default", evidence)


@check(
    21, "hostname", t("Host name"),
    required=t("a valid name of at most 63 characters that resolves, and is in the certificate"),
    why=t("Clients check the certificate against the name that they call."),
)  # fmt: skip
def hostname(context: PreflightContext) -> Seen:
    """Resolved by /etc/hosts or by the system itself; no name server is asked."""
    name = context.machine.read("/proc/sys/kernel/hostname").strip() or socket.gethostname()
    command = "hostnamectl set-hostname NAME"
    labels = name.split(".")
    if len(name) > 253 or any(len(label) > 63 or not _LABEL.match(label) for label in labels):
        fix = t("Give the machine a shorter, plain name: letters, digits and hyphens.")
        return Seen("warn", t("'{name}' cannot be used in a certificate", name=name[:80]), fix, command, "hostname")
    hosts_line = re.search(r"^hosts:(.*)", context.machine.read("/etc/nsswitch.conf"), re.MULTILINE)
    by_system = "myhostname" in (hosts_line[1] if hosts_line else "")
    if not by_system and _literal(context.machine, name) is None:
        fix = t("Write the name into /etc/hosts.")
        seen = t("{name} does not resolve here", name=name)
        return Seen("warn", seen, fix, f"echo '127.0.1.1 {name}' >> /etc/hosts", "/etc/hosts, /etc/nsswitch.conf")
    names = context.certificate_names or names_in(context.endpoint.certificate)
    if names is not None and not any(_covers(pattern, name) for pattern in names):
        fix = t("Let clients call it by a name of the certificate, or have a certificate made with this name.")
        seen = t("{name} is not in the certificate ({names})", name=name, names=", ".join(names[:6]))
        return Seen("warn", seen, fix, "openssl x509 -noout -ext subjectAltName -in server.crt", "subjectAltName")
    return Seen("pass", name, evidence="hostname")


def _covers(pattern: str, name: str) -> bool:
    """Whether a name of a certificate, possibly with a wildcard, covers this host."""
    pattern, name = pattern.lower(), name.lower()
    if pattern.startswith("*."):
        return name.partition(".")[2] == pattern[2:]
    return pattern == name or pattern.partition(".")[0] == name  # the short form of a full name


@check(
    27, "exposure", t("Encryption"),
    required=t("TLS, or a loopback address"),
    why=t("Over plain HTTP anyone on the network could read keys and prompts."),
)  # fmt: skip
def exposure(context: PreflightContext) -> Seen:
    """Without TLS the endpoint belongs on loopback."""
    host = context.endpoint.host
    if context.tls:
        return Seen("pass", t("{host}, with TLS", host=host))
    literal = _literal(context.machine, host)
    if literal is not None and literal not in _ANY and ipaddress.ip_address(literal).is_loopback:
        return Seen("pass", t("{host}: this machine only", host=host))
    fix = t("Use TLS, or --host 127.0.0.1 behind a proxy of your own.")
    return Seen("fail", t("{host} is reachable from other machines, without TLS", host=host), fix)
