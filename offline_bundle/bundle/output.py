"""What writing a bundle needs, whichever kind it is."""

import errno
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from offline_bundle.errors import SPACE_IO, BundleError
from offline_bundle.text import reason, t


def write_failed(where: Path, e: OSError) -> BundleError:
    """The error for a destination that cannot be written."""
    hint = t("Free space or choose another disk, then run the same command again.")
    if e.errno == errno.EFBIG:
        hint = (
            t("FAT32 holds no file of 4 GiB or more: format the disk as exFAT or ext4, then run the same command "
              "again.")
        )
    return BundleError(
        t("Writing below {where} failed: {why}.", where=where, why=reason(e)),
        hint,
        SPACE_IO,
    )


def now() -> str:
    """The time for `created`: SOURCE_DATE_EPOCH if that is set, so that equal input makes an equal bundle."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    seconds = int(epoch) if epoch.isdecimal() else int(time.time())
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def sync_directory(path: Path) -> None:
    """Make the names in the directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
