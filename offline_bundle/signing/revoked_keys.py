"""The keys that were revoked on this server: etc/atoll/trust/revoked.json. A part of install.sh.

    {"revoked": [{"at": "2026-01-31T12:00:00Z", "by": "root", "fingerprint": "<64 hex>", "reason": "…"}, …],
     "schema_version": 1}

The installed Atoll writes the list and reads it with the same functions. A list that cannot be read or understood is
an error, never an empty list: otherwise damaging the file would bring a stolen key back.
"""

import json
import os
import re
import stat

LIST = "revoked.json"
MAX_LIST = 1 << 20
FINGERPRINT = re.compile(r"[0-9a-f]{64}\Z")


def check_owner(path, info, t):
    """Raise ValueError unless only the owner of the installation may change `path` (whose stat is `info`)."""
    owners = {0, os.geteuid()}
    folder = path if stat.S_ISDIR(info.st_mode) else os.path.dirname(path)
    owners.add(os.stat(os.path.dirname(os.path.dirname(folder))).st_uid)  # of etc, for a prefix of another user
    if info.st_uid not in owners:
        raise ValueError(t("it belongs to another user (chown root:root {path})", path=path))
    if info.st_mode & 0o022:
        raise ValueError(t("other users may write to it (chmod go-w {path})", path=path))


def check_folder(folder, t):
    """Whether the directory of keys exists. Raises OSError, or ValueError if others could put keys into it."""
    try:
        info = os.lstat(folder)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(info.st_mode):
        raise ValueError(t("it is not a directory"))
    check_owner(folder, info, t)
    return True


def read_revoked(folder, t):
    """fingerprint -> its entry. Raises OSError if the list cannot be read, ValueError if it cannot be trusted."""
    path = os.path.join(folder, LIST)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(t("it is not a regular file"))
        check_owner(path, info, t)
        data = file.read(MAX_LIST + 1)
    if len(data) > MAX_LIST:
        raise ValueError(t("it is larger than it may be"))
    try:
        content = json.loads(data.decode("utf-8"))
        if content["schema_version"] != 1 or not isinstance(content["revoked"], list):
            raise ValueError
        entries = {entry["fingerprint"]: dict(entry) for entry in content["revoked"]}
        if not all(FINGERPRINT.match(fingerprint) for fingerprint in entries):
            raise ValueError
        if not all(isinstance(entry.get(k, ""), str) for entry in entries.values() for k in ("at", "by", "reason")):
            raise ValueError
        return entries
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(t("it is damaged")) from None
