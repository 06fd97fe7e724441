"""Plain HTTP only on loopback: on any other address keys and prompts would cross the network readable by all."""

import ipaddress
import logging
from pathlib import Path

from engine.errors import ConfigError
from engine.message import msg

log = logging.getLogger("atoll.serve")


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`. Names other than localhost may mean anything."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, uds: Path | None, tls: bool, allow_plain_http: bool = False) -> None:
    """Refuse to speak plain HTTP to other machines. Raises ConfigError.

    `allow_plain_http` is the operator's word that something in front of us speaks TLS; it is logged, loudly.
    """
    if tls or uds is not None or is_loopback(host):
        return
    if allow_plain_http:
        log.warning("PLAIN HTTP ON %s: keys, prompts and answers can be read by anyone between here and the client",
                    host or "every address")
        return
    raise ConfigError(
        msg("Plain HTTP on {host} is refused: anyone on that network could read keys, prompts and "
            "answers.", host=host or msg("every address")), "--host",
        msg("Give --ssl-certfile and --ssl-keyfile, listen on 127.0.0.1, or, behind a proxy that speaks TLS, say "
            "--allow-plain-http."),
    )
