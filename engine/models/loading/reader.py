"""Tensors from checkpoint files into device memory at the speed of the bus.

    file ─(threads: preadv)─► ring of pinned buffers ─(asynchronous copy)─► device tensor

Reading goes ahead of copying by the length of the ring; host memory holds the ring and nothing else. A tensor of
another dtype is converted on the device, a buffer at a time.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelError
from engine.message import msg, reason
from engine.models.loading.checkpoint import TensorInfo

_BUFFER_BYTES = 16 << 20
_NUM_BUFFERS = 8
_NUM_THREADS = 8  # a thread copies 3-8 GB/s out of the page cache

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class Reader:
    """Context manager that reads `tensors` in order, each into the target given to `copy_to`.

    Leaving it, even by an exception, ends the threads; that takes at most one buffer's read.
    """

    def __init__(
        self,
        tensors: Sequence[TensorInfo],
        device: torch.device,
        *,
        buffer_bytes: int = _BUFFER_BYTES,
        num_buffers: int = _NUM_BUFFERS,
    ) -> None:
        assert buffer_bytes % 8 == 0, "an element must not fall between two buffers"
        self._device = device
        self._tensors = deque(tensors)
        self._pieces = deque(_pieces(tensors, buffer_bytes))
        self._buffer_bytes = min(buffer_bytes, max((t.num_bytes for t in tensors), default=0))
        self._num_buffers = min(num_buffers, len(self._pieces))
        self._buffers: list[torch.Tensor] = []
        self._views: list[memoryview] = []
        # A buffer may be written again when the copy out of it is done. Waiting threads sleep instead of spinning.
        self._copied: list[Any] = []
        self._files: dict[Path, int] = {}
        self._reads: deque[Future[None]] = deque()
        self._threads = ThreadPoolExecutor(max(1, min(_NUM_THREADS, num_buffers, os.cpu_count() or 1)), "weights")
        self._next_buffer = 0   # index of the buffer with the next piece to copy
        self._started = 0       # reads, each into buffer number i % num_buffers

    def __enter__(self) -> "Reader":
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def copy_to(self, target: torch.Tensor) -> None:
        """The next tensor into `target`: contiguous, of its shape, on the device. On a GPU the copy is only queued.

        Raises ModelError if the file cannot be read or ends early.
        """
        info = self._tensors.popleft()
        assert tuple(target.shape) == info.shape
        assert target.is_contiguous()
        dtype = DTYPES[info.dtype]
        flat, done = target.view(-1), 0
        while done < flat.numel():
            self._reads.popleft().result()
            buffer = self._buffers[self._next_buffer]
            count = min(buffer.numel() // dtype.itemsize, flat.numel() - done)
            self._copy(flat[done : done + count], buffer[: count * dtype.itemsize].view(dtype))
            done += count
            self._next_buffer = (self._next_buffer + 1) % self._num_buffers
            self._start_read()

    def _open(self) -> None:
        """Open the files, make the buffers, start the first reads."""
        for shard in {info.shard for info in self._tensors}:
            self._files[shard] = _open(shard)
        on_gpu = self._device.type == "cuda"
        for _ in range(self._num_buffers):
            # Pinning takes about as long as reading: the first buffer is read into while the second is pinned.
            buffer = torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=on_gpu)
            self._buffers.append(buffer)
            self._views.append(buffer.numpy().data)
            self._copied.append(torch.cuda.Event(blocking=True) if on_gpu else None)
            self._start_read()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        event = self._copied[self._next_buffer]
        if event is None:
            target.copy_(source)
            return
        if target.dtype != source.dtype:
            source = source.to(self._device, non_blocking=True)  # as it is; the copy below converts on the device
        target.copy_(source, non_blocking=True)
        event.record()

    def _start_read(self) -> None:
        if self._pieces:
            shard, offset, size = self._pieces.popleft()
            index = self._started % self._num_buffers
            self._reads.append(self._threads.submit(self._read, index, shard, offset, size))
            self._started += 1

    def _read(self, index: int, shard: Path, offset: int, size: int) -> None:
        """In a thread: fill buffer `index`. No torch operation here: its modes belong to the calling thread."""
        if (event := self._copied[index]) is not None:
            event.synchronize()
        _read_whole(shard, self._files[shard], offset, self._views[index][:size])


def read_into(info: TensorInfo, target: torch.Tensor, advance: Callable[[int], None]) -> None:
    """Read a tensor into host memory with several threads: directly, or through a ring of buffers if `target` has
    another dtype. Calls `advance(bytes)` on the way. Raises ModelError as a Reader does."""
    if DTYPES[info.dtype] != target.dtype:
        with Reader([info], torch.device("cpu")) as reader:
            reader.copy_to(target)
        advance(info.num_bytes)
        return
    assert tuple(target.shape) == info.shape
    assert target.is_contiguous()
    content = target.view(-1).view(torch.uint8).numpy().data
    descriptor = _open(info.shard)
    threads = ThreadPoolExecutor(max(1, min(_NUM_THREADS, os.cpu_count() or 1)), "weights")
    try:
        reads = []
        for shard, offset, size in _pieces([info], _BUFFER_BYTES):
            at = offset - info.offset
            reads.append((size, threads.submit(_read_whole, shard, descriptor, offset, content[at : at + size])))
        for size, read in reads:
            read.result()
            advance(size)
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
        os.close(descriptor)


def _open(shard: Path) -> int:
    try:
        return os.open(shard, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(msg("Weight file {shard} cannot be read: {strerror}.", shard=shard,
                             strerror=reason(error))) from None


def _read_whole(shard: Path, descriptor: int, offset: int, view: memoryview) -> None:
    """Fill `view` with the file's bytes from `offset` on."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise ModelError(msg("Weight file {shard} cannot be read: {strerror}.", shard=shard,
                                 strerror=reason(error))) from None
        if count == 0:
            raise ModelError(msg("Weight file {shard} became shorter while it was read.", shard=shard))
        done += count


def _pieces(tensors: Sequence[TensorInfo], buffer_bytes: int) -> Iterator[tuple[Path, int, int]]:
    """(file, offset, bytes) of each read; a read never spans two tensors."""
    for info in tensors:
        for at in range(0, info.num_bytes, buffer_bytes):
            yield info.shard, info.offset + at, min(buffer_bytes, info.num_bytes - at)
