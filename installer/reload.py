"""Telling the running gateway that its keys or its certificate have changed."""

import shutil
import subprocess
from pathlib import Path

from installer.layout import Layout

GATEWAY = "atoll-gateway.service"
_TIMEOUT = 60.0


def reload_gateway(layout: Layout) -> str | None:
    """Make the gateway use the new files; returns what is left to do, in words, or None if all is done.

    Under systemd a reload hands it new copies and no connection breaks. In the prefix form it reads the key file by
    itself; a new certificate takes a restart there.
    """
    if not layout.system or layout.prefix != Path("/") or shutil.which("systemctl") is None:
        return None
    if _systemctl("is-active", "--quiet", GATEWAY) != 0:
        return None  # it reads the files when it starts
    if _systemctl("reload", GATEWAY) == 0:
        return None
    return f"The running gateway could not be told: systemctl restart {GATEWAY}"


def _systemctl(*arguments: str) -> int:
    try:
        return subprocess.run(
            ["systemctl", *arguments], capture_output=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 1
