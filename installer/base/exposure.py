"""Plain HTTP is allowed on loopback only: on any other address, keys and prompts would be readable on the network."""

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`. A name other than localhost may resolve to any address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(table: Mapping[str, Any], path: Path) -> None:
    """Refuse settings of a server (flag → value) that would speak plain HTTP to other machines. Raises InstallError
    (usage).

    Servers whose unit brings the certificate need no such check.
    """
    host = str(table.get("host", "127.0.0.1"))
    if is_loopback(host) or table.get("uds") or (table.get("ssl-certfile") and table.get("ssl-keyfile")):
        return
    raise InstallError(
        t("The settings in {path} would serve plain HTTP on {host}, which other machines can reach.", path=path,
          host=host),
        exit_code=ExitCode.USAGE,
        why=t("Anyone on that network could read keys, prompts and answers."),
        changed=t("Nothing was changed."),
        hint=t('Set host = "127.0.0.1", or give the endpoint a certificate: atoll install with --tls, or atoll tls '
               "renew"),
    )
