"""Secrets of the gateway: the copies that systemd makes at its start, and newer ones that a reload publishes.

A systemd credential (`LoadCredential=`) does not change while the service runs, and the gateway cannot read root's
files. So `systemctl reload` first runs `publish` as root::

    /etc/atoll/credentials/api-keys.json   root's, 0600
      start  -> $CREDENTIALS_DIRECTORY/api-keys.json
      reload -> /run/atoll/credentials/api-keys.json    root's directory, readable by the gateway's user only

Once a newer copy has been seen, the copy from the start is never used again, even if the newer one is removed: a
revoked key must not become valid again.
"""

import os
import pwd
from pathlib import Path

from engine.errors import ConfigError
from engine.message import msg, reason
from engine.server.access.auth import ApiKey, KeyFile

KEYS = "api-keys.json"
TLS_KEY = "server.key"
PUBLISHED = (KEYS, TLS_KEY)
MAX_BYTES = 4 << 20
_NO_KEYS = b'{"keys": []}\n'


class GatewayKeys(KeyFile):
    """The key file from the start, until `published` contains a newer one."""

    def __init__(self, path: Path, published: Path | None) -> None:
        """Raises ConfigError if the file cannot be used now."""
        self._published = published
        super().__init__(published if published is not None and published.exists() else path)

    def check(self, presented: str) -> ApiKey | None:
        if self._published is not None and self._path != self._published and self._published.exists():
            self._path = self._published
        return super().check(presented)


def newest(path: Path, published: Path | None) -> Path:
    """The published copy of a secret if there is one, else the copy from the start."""
    return published if published is not None and published.exists() else path


def publish(source: Path, target: Path, user: str) -> None:
    """Copy the secrets of `source` into the directory `target` for `user`. Run as root. Raises ConfigError.

    `target` belongs to root, so the user cannot plant anything in it. If the key file is gone, one without keys is
    published: whoever removed it wants nobody admitted.
    """
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(msg("{user}: no such user on this machine.", user=user), "--user") from None
    try:
        target.mkdir(mode=0o711, exist_ok=True)
        directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(directory).st_uid != os.geteuid():
                raise ConfigError(
                    msg("{target} does not belong to us.", target=target), "--to",
                    msg("Remove it; it is created again."),
                )  # fmt: skip
            os.fchmod(directory, 0o711)
            for name in PUBLISHED:
                try:
                    with open(source / name, "rb") as file:
                        data = file.read(MAX_BYTES + 1)
                except FileNotFoundError:
                    if name != KEYS:
                        continue
                    data = _NO_KEYS
                if len(data) > MAX_BYTES:
                    raise ConfigError(msg("{source} is larger than {max_bytes} bytes.", source=source / name,
                                          max_bytes=MAX_BYTES), "--publish")
                _replace(directory, name, data, account.pw_uid, account.pw_gid)
        finally:
            os.close(directory)
    except OSError as error:
        raise ConfigError(msg("The credentials could not be published: {error}.", error=reason(error)),
                          "--publish") from None


def _replace(directory: int, name: str, data: bytes, uid: int, gid: int) -> None:
    """Replace a file atomically. Only `uid` can read it, old or new."""
    temporary = f".{name}.partial"
    try:
        os.unlink(temporary, dir_fd=directory)
    except FileNotFoundError:
        pass
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o400, dir_fd=directory)
    with open(fd, "wb") as file:
        if os.geteuid() == 0:
            os.fchown(fd, uid, gid)
        os.fchmod(fd, 0o400)
        file.write(data)
    os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
