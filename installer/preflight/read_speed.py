"""How fast this machine reads weights: 1 GiB past the page cache, from several places at once."""

import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from installer.base.i18n import t
from installer.preflight.record import PreflightContext, Seen, check
from installer.preflight.storage import block_device, existing_parent

AMOUNT = 1 << 30
BLOCK = 8 << 20
READERS = 4            # an NVMe disk is only fast with several requests at once, and the loader sends several
PATIENCE = 4.0         # seconds; a slow disk is recognised before it has read 1 GiB
LEAST_FILE = 64 << 20  # shorter files measure the first request more than the disk
GOOD, POOR = 1e9, 0.2e9
SOON = 10.0            # seconds of reading that are acceptable when trying a small model under a prefix


@check(
    17, "read-speed", t("Read speed"), timeout=8.0,
    required=t("1 GB/s or more"), why=t("It decides how long a start takes: the weights are read once."),
)  # fmt: skip
def read_speed(context: PreflightContext) -> Seen:
    """Reads only: installed models, else the disk itself (root), else the bundle."""
    said = "-"
    for source in _sources(context):
        try:
            return _judged(context, source, *measure(source))
        except OSError as error:
            said = f"{source}: {error.strerror or error}"
    status = "warn" if context.system else "pass"
    seen = t("not measured: no large file is here, and the device may not be read")
    fix = t("Measure it by hand, on the disk that will hold the models.")
    return Seen(status, seen, fix, "dd if=/dev/DISK of=/dev/null bs=8M count=128 iflag=direct", evidence=said)


def _judged(context: PreflightContext, source: Path, count: int, seconds: float) -> Seen:
    speed = count / max(seconds, 1e-6)
    observed = t("{speed} GB/s from {source}", speed=f"{speed / 1e9:.2f}", source=source)
    command = f"dd if={source} of=/dev/null bs=8M count=128 iflag=direct"
    evidence = f"O_DIRECT, {count >> 20} MiB, {seconds:.2f} s"
    trial = not context.system and context.weight_bytes / speed < SOON
    if speed >= GOOD or trial:
        return Seen("pass", observed, evidence=evidence)
    if speed < POOR:
        fix = t("Put the models on a faster disk: at this speed a 60 GB model takes more than five minutes to start.")
        return Seen("warn", observed, fix, command, evidence)
    return Seen("warn", observed, t("Put the models on an NVMe disk if starts must be quick."), command, evidence)


def _sources(context: PreflightContext) -> list[Path]:
    """The largest model file in the store; the device below it; the largest file of the bundle."""
    device = block_device(context.machine, existing_parent(context.layout.lib))
    sources = (_largest(context.layout.models), device, _largest(context.bundle) if context.bundle else None)
    return [source for source in sources if source is not None]


def _largest(directory: Path) -> Path | None:
    """The largest file worth reading. Looks only a few directories deep, in case a whole disk was given by mistake."""
    found: list[tuple[int, Path]] = []
    for pattern in ("*.safetensors", "*/*.safetensors", "*/*/*.safetensors"):
        for path in directory.glob(pattern):
            try:
                if path.is_file() and not path.is_symlink():
                    found.append((path.stat().st_size, path))
            except OSError:
                continue
    size, path = max(found, default=(0, directory))
    return path if size >= LEAST_FILE else None


def measure(source: Path, amount: int = AMOUNT, patience: float = PATIENCE) -> tuple[int, float]:
    """(bytes, seconds) of direct reads spread over the source.

    If the file system does not support O_DIRECT, the cache is dropped first. Raises OSError if it cannot be read at
    all.
    """
    fd = _open(source)
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
        amount = min(amount, size) // BLOCK * BLOCK
        if not amount:
            raise OSError(0, "it is too short to measure")
        offsets = iter([(size // amount) * part // BLOCK * BLOCK for part in range(0, amount, BLOCK)])
        return _read_all(fd, offsets, time.monotonic() + patience)
    finally:
        os.close(fd)


def _open(source: Path) -> int:
    try:
        return os.open(source, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return fd


def _read_all(fd: int, offsets: Iterator[int], deadline: float) -> tuple[int, float]:
    lock, done, failures = threading.Lock(), [0], []

    def read() -> None:
        with mmap.mmap(-1, BLOCK) as buffer:  # page-aligned, as O_DIRECT requires
            while time.monotonic() < deadline and not failures:
                with lock:
                    at = next(offsets, None)
                if at is None:
                    return
                try:
                    count = os.preadv(fd, [buffer], at)
                except OSError as error:
                    failures.append(error)
                    return
                with lock:
                    done[0] += count

    began = time.monotonic()
    threads = [threading.Thread(target=read, daemon=True) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures and not done[0]:
        raise failures[0]
    return done[0], time.monotonic() - began
