"""What bounds a load: reading files alone, copying to the device alone, and both as the loader's Reader does them.

    files ─► buffers                       read, by threads and buffer sizes
             buffers ─► device             copy, out of pinned memory
    files ─► buffers ─► device             both
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

from engine.bench import report
from engine.models.loading.checkpoint import TensorInfo, check_checkpoint
from engine.models.loading.reader import DTYPES, Reader

_COPIED = 4 << 30  # bytes that `copy` moves


def rows(
    model_dir: Path, device: torch.device, threads: Sequence[int], buffer_mib: Sequence[int], repeats: int, *,
    cold: bool,
) -> Iterator[report.Row]:
    """A row for each stage and setting, with GB/s. `cold`: the page cache gives up the files before each turn."""
    tensors = sorted(check_checkpoint(model_dir).values(), key=lambda info: (info.shard, info.offset))
    size = sum(info.num_bytes for info in tensors)
    for count, mib in product(threads, buffer_mib):
        yield _row("read", size, repeats, lambda c=count, m=mib: _read(tensors, c, m << 20), tensors, cold,
                   threads=count, buffer_mib=mib)  # fmt: skip
    if device.type == "cuda":
        for mib in buffer_mib:
            yield _row("copy", _COPIED, repeats, lambda m=mib: _copy(device, m << 20), (), False, buffer_mib=mib)
    for count, mib in product(threads, buffer_mib):
        targets = [torch.empty(info.shape, dtype=DTYPES[info.dtype], device=device) for info in tensors]
        for target in targets:
            target.zero_()  # memory that nothing has touched would cost its first touch
        yield _row("both", size, repeats, lambda c=count, m=mib, t=targets: _both(tensors, t, device, c, m << 20),
                   tensors, cold, threads=count, buffer_mib=mib)  # fmt: skip
        del targets


def forget(shards: set[Path]) -> None:
    """Make the page cache give up these files. Files in memory (/dev/shm) stay where they are."""
    for shard in shards:
        descriptor = os.open(shard, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _row(
    stage: str, size: int, repeats: int, run: Callable[[], None], tensors: Sequence[TensorInfo], cold: bool,
    **setting: int,
) -> report.Row:  # fmt: skip
    seconds = []
    for turn in range(repeats + 1):
        if cold:
            forget({info.shard for info in tensors})
        start = time.perf_counter()
        run()
        if turn or cold:  # the first turn fills the page cache
            seconds.append(time.perf_counter() - start)
    middle = statistics.median(seconds)
    report.say(f"{stage} {setting}: {size / middle / 1e9:.2f} GB/s")
    return {"bench": "load", "stage": stage, "cold": cold, **setting, "gb_s": _digits(size / middle / 1e9),
            "gb_s_all": [_digits(size / each / 1e9) for each in seconds]}  # fmt: skip


def _read(tensors: Sequence[TensorInfo], threads: int, buffer_bytes: int) -> None:
    """Every byte once into a buffer of each thread."""
    files = {shard: os.open(shard, os.O_RDONLY) for shard in {info.shard for info in tensors}}
    pieces = [(files[info.shard], info.offset + at, min(buffer_bytes, info.num_bytes - at))
              for info in tensors for at in range(0, info.num_bytes, buffer_bytes)]  # fmt: skip
    shares = [pieces[first::threads] for first in range(threads)]

    def work(share: list[tuple[int, int, int]]) -> None:
        view = memoryview(bytearray(buffer_bytes))
        for descriptor, offset, size in share:
            done = 0
            while done < size:
                done += os.preadv(descriptor, [view[done:size]], offset + done)

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, shares))
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def _copy(device: torch.device, buffer_bytes: int) -> None:
    source = torch.zeros(buffer_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
    for _ in range(_COPIED // buffer_bytes):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)


def _both(
    tensors: Sequence[TensorInfo], targets: Sequence[torch.Tensor], device: torch.device, threads: int,
    buffer_bytes: int,
) -> None:  # fmt: skip
    with Reader(tensors, device, buffer_bytes=buffer_bytes, num_threads=threads, num_buffers=2 * threads) as reader:
        for target in targets:
            reader.copy_to(target)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _digits(number: float) -> float:
    """Three digits that count: a small file on a busy disk has a rate, too."""
    return float(f"{number:.3g}")
