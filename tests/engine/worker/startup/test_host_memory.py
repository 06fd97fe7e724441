"""Host memory for a GPU: exact pages, locked and unlocked in the right order, and what of the machine's is left."""

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch

from engine.kernels.runtime import host_memory
from engine.kernels.runtime.host_memory import HostMemoryError
from engine.worker.startup.host import host_memory as left

GIB = 1 << 30


class FakeDriver:
    """What libcuda would be asked, in order. `elsewhere`: the GPU sees memory under other addresses."""

    def __init__(self, refuse=0, elsewhere=False):
        self.calls, self.refuse, self.elsewhere = [], refuse, elsewhere

    def cuCtxGetCurrent(self, context):
        context._obj.value = 77
        return 0

    def cuMemHostRegister_v2(self, address, size, flags):
        self.calls.append(("register", address, size, flags))
        return self.refuse

    def cuMemHostGetDevicePointer_v2(self, seen, address, flags):
        seen._obj.value = address + (4096 if self.elsewhere else 0)
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.calls.append(("push", context.value))
        return 0

    def cuCtxSynchronize(self):
        self.calls.append(("synchronize",))
        return 0

    def cuMemHostUnregister(self, address):
        ctypes.string_at(address, 1)  # still mapped
        self.calls.append(("unregister", address))
        return 0

    def cuCtxPopCurrent_v2(self, context):
        self.calls.append(("pop",))
        return 0

    def cuGetErrorString(self, result, text):
        text._obj.value = b"out of memory"
        return 0


@pytest.fixture
def driver(monkeypatch):
    def use(**options):
        fake = FakeDriver(**options)
        monkeypatch.setattr(host_memory, "_driver", lambda: fake)
        return fake

    return use


def mapping(address):
    """(first byte, end, flags) of the mapping that holds `address`."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(match[1], 16), int(match[2], 16)
        elif line.startswith("VmFlags:") and found and found[0] <= address < found[1]:
            return *found, set(line.split()[1:])
    raise AssertionError("not mapped")


def test_the_size_is_exact_and_no_child_inherits_it():
    table = host_memory.empty((1000, 1231), torch.bfloat16)
    assert (table.shape, table.dtype, table.is_contiguous()) == ((1000, 1231), torch.bfloat16, True)
    assert not table.any()
    start, end, flags = mapping(table.data_ptr())
    whole = -(-table.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert len(host_memory._alive[table.data_ptr()]) == whole, "pages, and no power of two"
    assert end - start >= whole
    assert {"dc", "dd"} <= flags, "neither forks nor core dumps have it"


def test_unlocked_after_the_last_reader_and_before_it_is_unmapped(driver):
    calls = driver().calls
    table = host_memory.empty((64, 1024), torch.float32)
    address = table.data_ptr()
    assert not host_memory.is_locked(table)
    host_memory.lock(table)
    host_memory.lock(table)
    assert host_memory.is_locked(table)
    assert calls == [("register", address, 64 * 4096, 3)], "portable and mapped, once"
    parameter = torch.nn.Parameter(table, requires_grad=False)
    view = parameter.as_strided((3, 1024), (1024, 1), 0)
    del table, parameter
    assert len(calls) == 1, "a view still needs it"
    del view
    assert calls[1:] == [("push", 77), ("synchronize",), ("unregister", address), ("pop",)]


def test_a_refusal_is_told_and_leaves_the_memory_as_it_was(driver):
    fake = driver(refuse=2)
    table = host_memory.empty((8, 16), torch.float32).fill_(3)
    with pytest.raises(HostMemoryError, match=r"driver says: out of memory \(2\)"):
        host_memory.lock(table)
    assert not host_memory.is_locked(table)
    assert table.eq(3).all()
    del table
    assert [call[0] for call in fake.calls] == ["register"], "nothing to unlock"


def test_memory_that_the_gpu_sees_elsewhere_is_of_no_use(driver):
    fake = driver(elsewhere=True)
    table = host_memory.empty((8, 16), torch.float32)
    with pytest.raises(HostMemoryError, match="another address"):
        host_memory.lock(table)
    assert [call[0] for call in fake.calls] == ["register", "push", "synchronize", "unregister", "pop"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_that_is_said():
    with pytest.raises(HostMemoryError, match="no CUDA driver"):
        host_memory.lock(host_memory.empty((2, 2), torch.float32))


def test_more_than_the_system_gives_is_refused():
    with pytest.raises(HostMemoryError, match="the system refused memory"):
        host_memory.empty((1 << 40, 1 << 10), torch.float32)


@pytest.fixture
def machine(tmp_path):
    """16 GiB, 10 of them available, and no control group."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {10 << 20} kB\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def group(machine, path, limit, used, files=0):
    """A control group of version 2; `files` bytes of `used` are pages of files."""
    directory = machine / "cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\ninactive_file {files // 2}\nactive_file {files // 2}\nshmem 9\n")


def available(machine):
    total, found = left(machine / "proc", machine / "cgroup")
    assert total == 16 * GIB
    return found


def test_what_is_left_of_the_machine(machine):
    assert available(machine) == 10 * GIB
    (machine / "proc" / "self" / "cgroup").write_text("1:name=systemd:/x\n0::/a.slice/b.service\n")
    assert available(machine) == 10 * GIB, "no memory controller"
    group(machine, "a.slice/b.service", "max", 5 * GIB)
    assert available(machine) == 10 * GIB


def test_the_limit_of_a_unit_counts_and_files_in_it_do_not(machine):
    (machine / "proc" / "self" / "cgroup").write_text("0::/a.slice/b.service\n")
    group(machine, "a.slice/b.service", 8 * GIB, 3 * GIB, files=2 * GIB)
    assert available(machine) == 7 * GIB
    group(machine, "a.slice", 9 * GIB, 6 * GIB)
    assert available(machine) == 3 * GIB, "the slice around it has less"
    group(machine, "a.slice", 5 * GIB, 6 * GIB)
    assert available(machine) == 0


def test_the_limit_of_a_container_counts(machine):
    (machine / "proc" / "self" / "cgroup").write_text("0::/\n")
    group(machine, "", 4 * GIB, GIB)
    assert available(machine) == 3 * GIB


def test_this_machine():
    total, found = left()
    assert 0 < found <= total
