"""The endpoint's certificate: made here by a local authority, or the customer's.

    etc/atoll/credentials/ca.key       the authority's private key and its certificate   0600, never leaves the host
    etc/atoll/credentials/server.key   the endpoint's private key and its chain          0600, what the gateway is given
    etc/atoll/tls/ca.crt, server.crt   public copies of the certificates                 0644, for clients and status

A key and its certificates are one file, replaced by one rename, so an interruption never leaves a key without its
certificate. The public copies are made from that file, and the next command that runs completes them.
"""

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cryptography import x509

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.tls import certificates as x
from installer.tls.certificates import Pair
from installer.tls.custom import check_import as check_import

RENEW_DAYS = 30      # days before the expiry: ours is renewed, a customer's is warned about
_LIMIT = 1 << 20     # bytes of any file read here
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_LOCAL = b"# Atoll: made by the local authority\n"
_IMPORTED = b"# Atoll: the customer's, imported\n"
_AUTHORITY = b"# Atoll: the local authority; keep it on this machine\n"

Source = Literal["local", "imported"]


@dataclass(frozen=True, slots=True)
class Made:
    """What `ensure` found or did. `uncovered`: names of this machine that the certificate does not hold."""

    source: Source
    changed: bool = False
    new_ca: bool = False
    uncovered: tuple[str, ...] = ()


def wanted_names(host: str, given: Sequence[str] = ()) -> list[str]:
    """Names and addresses for the certificate: the machine's, the address it listens on, and those given.

    Raises InstallError (usage) for a given name that no certificate can hold.
    """
    for name in given:
        if not x.is_name(name):
            raise InstallError(
                t("'{name}' is neither a DNS name nor an IP address.", name=name),
                exit_code=ExitCode.USAGE,
                changed=t("Nothing was changed."),
                hint=t("Give names as clients will use them, without https:// and port."),
            )
    return list(dict.fromkeys(name.lower() for name in (*x.machine_names(), *required_names(host, given))))


def required_names(host: str, given: Sequence[str] = ()) -> list[str]:
    """The names that somebody asked for."""
    specific = [host] if x.is_name(host) and host not in ("0.0.0.0", "::", "") else []  # noqa: S104
    return [name.lower() for name in (*specific, *given)]


def ensure(layout: Layout, names: Sequence[str], *, required: Sequence[str] = ()) -> Made:
    """Make a local authority and a certificate for `names` (none: the names it has now), unless a good one exists. If
    killed, run it again. An imported pair is left alone.

    A name that the authority may not sign for needs a new authority, which every client has to trust; so that happens
    for `required` names only, not because an address has appeared or disappeared. Raises InstallError (I/O) for an
    existing file that cannot be understood: it is never overwritten.
    """
    pair, source = _read(layout.server_key, t("the endpoint's private key"))
    if not names:
        names = x.names_of(pair.leaf) if pair is not None else x.machine_names()
    if pair is not None and source == "imported":
        changed = _publish(layout, None, pair)
        return Made("imported", changed, uncovered=_uncovered(pair, names))
    ca, _ = _read(layout.ca_key, t("the local authority's private key"))
    new_ca = ca is None or x.days_left(ca.leaf) < RENEW_DAYS or not all(x.may_issue(ca.leaf, n) for n in required)
    if ca is None or new_ca:
        ca = _make_ca(layout, names)
    permitted = [name for name in names if x.may_issue(ca.leaf, name)]
    good = pair is not None and x.issued_by(pair.leaf, ca.leaf) and x.days_left(pair.leaf) >= RENEW_DAYS
    if pair is None or not good or _uncovered(pair, permitted):
        held = x.names_of(pair.leaf) if pair is not None else []
        keep = [name for name in held if x.may_issue(ca.leaf, name)]
        pair = _issue(layout, ca, list(dict.fromkeys([*permitted, *keep])))
        good = False
    changed = _publish(layout, ca, pair)
    return Made("local", changed or not good, new_ca, _uncovered(pair, names))


def renew(
    layout: Layout, names: Sequence[str], *, required: Sequence[str] = (), new_ca: bool = False, local: bool = False
) -> Made:
    """Make a new key and certificate now, for the current names and `names`, however long the old one is valid.

    Raises InstallError (usage) if the certificate is the customer's and `local` does not allow replacing it, or if
    `required` names need a new authority and `new_ca` does not allow that.
    """
    pair, source = _read(layout.server_key, t("the endpoint's private key"))
    if pair is not None and source == "imported" and not local:
        raise InstallError(
            t("The certificate was not made here, so it cannot be renewed here."),
            exit_code=ExitCode.USAGE,
            changed=t("Nothing was changed."),
            hint=t("Import a new one: atoll tls import --cert FILE --key FILE. Or go back to a certificate of our "
                   "own: atoll tls renew --local"),
        )
    ca, _ = _read(layout.ca_key, t("the local authority's private key")) if not new_ca else (None, "local")
    if ca is not None and (outside := [name for name in required if not x.may_issue(ca.leaf, name)]):
        raise InstallError(
            t("The local authority was made for other names than {names}.", names=joined(outside)),
            exit_code=ExitCode.USAGE,
            why=t("It can only sign for the names that this machine had when the CA was made."),
            changed=t("Nothing was changed."),
            hint=t("Create a new local CA, which every client must then trust: atoll tls renew --new-ca"),
        )
    held = x.names_of(pair.leaf) if pair is not None and source == "local" and not new_ca else []
    everything = list(dict.fromkeys([*names, *required, *held]))
    made_ca = ca is None
    if ca is None:
        ca = _make_ca(layout, everything)
    pair = _issue(layout, ca, [name for name in everything if x.may_issue(ca.leaf, name)])
    _publish(layout, ca, pair)
    return Made("local", True, made_ca, _uncovered(pair, names))


def install_import(layout: Layout, pair: Pair) -> None:
    """Install a checked pair (installer/tls/custom.py) in place of the current one."""
    _make_directories(layout)
    fs.write_atomic(layout.server_key, _IMPORTED + pair.key_pem() + pair.chain_pem(), 0o600)
    _publish(layout, None, pair)


def planned_files(layout: Layout) -> list[tuple[Path, int]]:
    """(path, bytes) of everything that may be written, for the plan."""
    return [(layout.ca_key, 1100), (layout.server_key, 1200), (layout.ca_cert, 800), (layout.server_cert, 900)]


def plan_files(layout: Layout) -> list[tuple[Path, int, str]]:
    """The same with a note on each."""
    notes = (t("mode 0600"), t("mode 0600"), t("for clients"), t("public"))
    return [(path, size, note) for (path, size), note in zip(planned_files(layout), notes, strict=True)]


def settings(layout: Layout) -> dict[str, Any]:
    """The flags of a server that reads the files itself: one file holds the key and its certificates."""
    return {"ssl-certfile": str(layout.server_key), "ssl-keyfile": str(layout.server_key)}


def ca_file(layout: Layout) -> Path:
    """What a client must trust to reach this endpoint: our authority, or the served certificate itself."""
    chain = read_public(layout.server_cert)
    ca = read_public(layout.ca_cert)
    return layout.ca_cert if chain and ca and x.issued_by(chain[0], ca[0]) else layout.server_cert


def read_public(path: Path) -> tuple[x509.Certificate, ...]:
    """The certificates of a public copy; empty if it is missing or not a certificate."""
    try:
        return x.parse_certificates(_bytes(path))
    except OSError:
        return ()


def facts(layout: Layout) -> dict[str, Any] | None:
    """What is served, from the public copies alone; None without a certificate. Ready for JSON."""
    chain = read_public(layout.server_cert)
    if not chain:
        return None
    leaf, ca = chain[0], next(iter(read_public(layout.ca_cert)), None)
    local = ca is not None and x.issued_by(leaf, ca)
    return {
        "source": "local" if local else "imported",
        "subject": x.title(leaf.subject),
        "issuer": x.title(leaf.issuer),
        "names": x.names_of(leaf),
        "not_before": f"{leaf.not_valid_before_utc:{_TIME}}",
        "not_after": f"{leaf.not_valid_after_utc:{_TIME}}",
        "days_left": x.days_left(leaf),
        "sha256": x.fingerprint(leaf),
        "chain": [x.title(certificate.subject) for certificate in chain],
        "ca": {
            "file": str(layout.ca_cert),
            "sha256": x.fingerprint(ca),
            "not_after": f"{ca.not_valid_after_utc:{_TIME}}",
            "days_left": x.days_left(ca),
        } if local and ca is not None else None,
        "missing_names": [name for name in x.machine_names() if local and not x.covers(leaf, name)],
    }


def _make_ca(layout: Layout, names: Sequence[str]) -> Pair:
    _make_directories(layout)
    ca = x.make_ca(names)
    fs.write_atomic(layout.ca_key, _AUTHORITY + ca.key_pem() + ca.chain_pem(), 0o600)
    return ca


def _issue(layout: Layout, ca: Pair, names: Sequence[str]) -> Pair:
    pair = x.issue(ca, names)
    fs.write_atomic(layout.server_key, _LOCAL + pair.key_pem() + pair.chain_pem(), 0o600)
    return pair


def _publish(layout: Layout, ca: Pair | None, pair: Pair) -> bool:
    """Bring the public copies and the modes of the private files up to date. Returns whether anything was changed."""
    changed = False
    fs.make_dir(layout.tls, 0o755)
    for path, wanted in ((layout.ca_cert, ca), (layout.server_cert, pair)):
        if wanted is not None and (not path.is_file() or path.is_symlink() or _bytes(path) != wanted.chain_pem()):
            fs.write_atomic(path, wanted.chain_pem(), 0o644)
            changed = True
    for path in (layout.ca_key, layout.server_key):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) != 0o600:
            path.chmod(0o600)
            changed = True
    return changed


def _make_directories(layout: Layout) -> None:
    fs.make_dir(layout.credentials, 0o700)
    fs.make_dir(layout.tls, 0o755)


def _read(path: Path, what: str) -> tuple[Pair | None, Source]:
    try:
        data = _bytes(path)
    except FileNotFoundError:
        return None, "local"
    pair = x.parse_pair(data)
    if pair is None:
        raise InstallError(
            t("{path}, {what}, is damaged: it does not hold a private key and its certificate.", path=path, what=what),
            exit_code=ExitCode.IO,
            changed=t("It was left as it is."),
            hint=t("Restore it from a backup, or move it away for a new one: mv {path} {path}.damaged; atoll tls "
                   "renew", path=path),
        )
    return pair, "imported" if data.startswith(_IMPORTED) else "local"


def _bytes(path: Path) -> bytes:
    return fs.read_regular(path, _LIMIT)[0]


def _uncovered(pair: Pair, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not x.covers(pair.leaf, name))
