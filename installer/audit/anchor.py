"""The head of the audit log in systemd's journal, where changing the log's file does not change it.

Root can damage or stop the journal too, so an anchor in it exposes only changes by somebody who left the journal alone.
A journal that is forwarded to another machine, or a head on paper, exposes every change.
"""

import json
import os
import socket
import subprocess
from pathlib import Path

from installer.audit.head import Head

SOCKET = Path("/run/systemd/journal/socket")
JOURNALCTL = "journalctl"
MESSAGE_ID = "5d0ab6d1b7b64b3f9c3e1c0f7a8e2d94"  # of every anchor: journalctl MESSAGE_ID=...
MOST = 10_000   # newest anchors that are compared
_SECONDS = 20.0
_NOTICE = "5"


def send(path: Path, head: Head, event: str) -> bool:
    """Send the head to journald. Returns whether journald accepted it. Without journald the log is as good as its hash
    chain."""
    fields = {
        "MESSAGE": f"{event} {head}",
        "MESSAGE_ID": MESSAGE_ID, "PRIORITY": _NOTICE, "SYSLOG_IDENTIFIER": "atoll-audit",
        "ATOLL_AUDIT_PATH": str(path.absolute()), "ATOLL_AUDIT_COUNT": str(head.count), "ATOLL_AUDIT_HEAD": head.hash,
    }  # fmt: skip
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(2.0)
            sender.sendto(b"".join(_field(name, value) for name, value in fields.items()), str(SOCKET))
    except OSError:
        return False
    return True


def _field(name: str, value: str) -> bytes:
    """A field of journald's native protocol; the length makes newlines in a value harmless."""
    data = value.encode(errors="replace")
    return name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"


def sent(path: Path) -> list[Head] | None:
    """The anchors of this log in journald, oldest first; None if they cannot be read.

    Only those that the log's owner sent: journald itself records the sender's user.
    """
    try:
        owner = os.stat(path if path.exists() else path.parent).st_uid
        done = subprocess.run(
            [JOURNALCTL, "--no-pager", "--quiet", "--output=json", f"--lines={MOST}",
             "--output-fields=ATOLL_AUDIT_COUNT,ATOLL_AUDIT_HEAD", f"MESSAGE_ID={MESSAGE_ID}", f"_UID={owner}",
             f"ATOLL_AUDIT_PATH={path.absolute()}"],
            capture_output=True, timeout=_SECONDS, check=False, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode and not done.stdout:
        return None
    found = []
    for line in done.stdout.splitlines():
        try:
            entry = json.loads(line)
            head = Head(int(entry["ATOLL_AUDIT_COUNT"]), str(entry["ATOLL_AUDIT_HEAD"]))
            found = [*found, head] if head.count else []  # `uninstall --purge` ends a log: the next one starts empty
        except (ValueError, KeyError, TypeError):
            continue
    return found
