"""Plain HTTP is allowed only on loopback: on any other address, keys and prompts would cross the network in the
clear."""

import ipaddress
import logging
from pathlib import Path

from engine.errors import ConfigError
from engine.message import msg

log = logging.getLogger("atoll.serve")


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`. False for names other than localhost, which may resolve to
    anything."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, uds: Path | None, tls: bool, allow_plain_http: bool = False) -> None:
    """Refuse to speak plain HTTP to other machines. Raises ConfigError.

    With `allow_plain_http` the operator asserts that something in front of us speaks TLS; a warning is logged.
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
