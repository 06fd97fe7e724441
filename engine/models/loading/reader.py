"""Tensors from checkpoint files into device memory at the speed of the bus.

    file ─(threads: preadv)─► ring of pinned buffers ─(asynchronous copy)─► device tensor

Reading goes ahead of copying by the length of the ring; host memory holds the ring and nothing else. A buffer holds a
part of a large tensor or several small ones, so that a checkpoint of many small tensors takes no more steps than its
bytes do. A tensor of another dtype is converted on the device, a part at a time.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.errors import ModelError
from engine.message import msg, reason
from engine.models.loading.checkpoint import TensorInfo

# Twice as many buffers as threads, so that none has to wait until the device has copied what it read before.
_BUFFER_BYTES = 8 << 20
_NUM_BUFFERS = 16
_NUM_THREADS = 8  # a thread copies 3-8 GB/s out of the page cache
_ALIGNMENT = 64  # of tensors in a buffer: for all dtypes, and a whole cache line
_SWITCH_SECONDS = 0.0005  # a thread that returns from reading waits at most that long for Python's lock; usually 0.005

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class _Part(NamedTuple):
    """Bytes of one tensor in one buffer."""

    shard: Path
    offset: int  # in the file
    start: int   # in the buffer
    size: int


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
        num_threads: int = _NUM_THREADS,
    ) -> None:
        assert buffer_bytes % _ALIGNMENT == 0, "an element must not fall between two buffers"
        self._device = device
        self._tensors = deque(tensors)
        self._fills = deque(_fills(tensors, buffer_bytes))  # what is still to be read, a buffer at a time
        self._buffer_bytes = max((fill[-1].start + fill[-1].size for fill in self._fills), default=0)
        self._num_buffers = min(num_buffers, len(self._fills))
        self._buffers: list[torch.Tensor] = []
        self._views: list[memoryview] = []
        # A buffer may be written again when the copies out of it are done. Waiting threads sleep instead of spinning.
        self._copied: list[Any] = []
        self._files: dict[Path, int] = {}
        self._reads: deque[tuple[Future[None], list[_Part]]] = deque()
        self._threads = ThreadPoolExecutor(max(1, min(num_threads, num_buffers, os.cpu_count() or 1)), "weights")
        self._parts: deque[_Part] = deque()  # of the buffer that is being copied out of
        self._current = -1      # its index
        self._started = 0       # reads, each into buffer number i % num_buffers
        self._switch_interval = sys.getswitchinterval()

    def __enter__(self) -> "Reader":
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        sys.setswitchinterval(self._switch_interval)
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
            if not self._parts:
                self._next_buffer()
            part = self._parts.popleft()
            count = part.size // dtype.itemsize
            source = self._buffers[self._current][part.start : part.start + part.size].view(dtype)
            self._copy(flat[done : done + count], source)
            done += count
            if not self._parts:
                self._release_buffer()

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

    def _next_buffer(self) -> None:
        """Wait until the next buffer has been read."""
        read, parts = self._reads.popleft()
        read.result()
        self._parts.extend(parts)
        self._current = (self._current + 1) % self._num_buffers

    def _release_buffer(self) -> None:
        """Everything in the current buffer is copied, or will be when the device gets there: read more."""
        if (event := self._copied[self._current]) is not None:
            event.record()
        self._start_read()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        on_gpu = self._device.type == "cuda"
        if on_gpu and target.dtype != source.dtype:
            source = source.to(self._device, non_blocking=True)  # as it is; the copy below converts on the device
        target.copy_(source, non_blocking=on_gpu)

    def _start_read(self) -> None:
        if self._fills:
            parts = self._fills.popleft()
            index = self._started % self._num_buffers
            self._reads.append((self._threads.submit(self._read, index, parts), parts))
            self._started += 1

    def _read(self, index: int, parts: Sequence[_Part]) -> None:
        """In a thread: fill buffer `index`. No torch operation here: its modes belong to the calling thread."""
        if (event := self._copied[index]) is not None:
            event.synchronize()
        view = self._views[index]
        for shard, offset, start, size in parts:
            _read_whole(shard, self._files[shard], offset, view[start : start + size])


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
        for at in range(0, info.num_bytes, _BUFFER_BYTES):
            part = content[at : at + _BUFFER_BYTES]
            reads.append((len(part), threads.submit(_read_whole, info.shard, descriptor, info.offset + at, part)))
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


def _fills(tensors: Sequence[TensorInfo], buffer_bytes: int) -> list[list[_Part]]:
    """What each buffer is filled with: the tensors in order, cut where a buffer is full."""
    fills: list[list[_Part]] = []
    used = buffer_bytes
    for info in tensors:
        done = 0
        while done < info.num_bytes:
            start = -(-used // _ALIGNMENT) * _ALIGNMENT
            if start >= buffer_bytes:
                fills.append([])
                start = 0
            size = min(buffer_bytes - start, info.num_bytes - done)
            fills[-1].append(_Part(info.shard, info.offset + done, start, size))
            used, done = start + size, done + size
    return fills
