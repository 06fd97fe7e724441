"""Counts every attempt of a machine to talk to an address, in the kernel, whether or not it succeeds.

Four tiny eBPF programs hang on the control group that the whole machine lives in: on connect(2) and on sendmsg(2)
without a connection, for IPv4 and IPv6. The kernel runs them before it looks for a route, so an attempt counts even
where there is no network at all, and no process of the machine can step out of its control group. Each notes family,
kind of socket, address and port in a map that the test reads. They allow everything: what stops the attempts is the
missing network, and the tests check that separately.

Unix sockets are not counted: they lead nowhere outside.
"""

import ctypes
import ipaddress
import os
import platform
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

BPF_MAP_CREATE, BPF_MAP_LOOKUP_ELEM, BPF_MAP_GET_NEXT_KEY, BPF_PROG_LOAD, BPF_PROG_ATTACH = 0, 1, 4, 5, 8
MAP_TYPE_HASH, PROG_TYPE_CGROUP_SOCK_ADDR, F_ALLOW_MULTI = 1, 18, 2
HOOKS = {"connect4": 10, "connect6": 11, "sendmsg4": 14, "sendmsg6": 15}
SYSCALL = {"x86_64": 321, "aarch64": 280}

KEY = struct.Struct("=II16sI")  # family, kind of socket, address, port as the network writes it
MAP_ENTRIES = 4096

# offsets in struct bpf_sock_addr
USER_IP4, USER_IP6, USER_PORT, FAMILY, TYPE = 4, 8, 24, 28, 32


class NoCounter(Exception):
    """This kernel, or this user, cannot count connects."""


@dataclass(frozen=True)
class Attempt:
    """One destination and how often it was tried."""

    kind: str
    address: str
    port: int
    times: int

    @property
    def outbound(self) -> bool:
        """Whether it leaves the machine: anything but the loopback."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return not (mapped or address).is_loopback

    def __str__(self) -> str:
        return f"{self.kind} {self.address} port {self.port}, {self.times} times"


class ConnectCounter:
    """Counts for one control group (version 2) and everything below it, from now on."""

    def __init__(self, cgroup: Path) -> None:
        self._map = _bpf(BPF_MAP_CREATE, struct.pack("=IIII", MAP_TYPE_HASH, KEY.size, 8, MAP_ENTRIES))
        directory = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for hook, attach_type in HOOKS.items():
                program = _load(_program(self._map, ipv6=hook.endswith("6")), attach_type)
                _bpf(BPF_PROG_ATTACH, struct.pack("=IIII", directory, program, attach_type, F_ALLOW_MULTI))
                os.close(program)  # the control group holds it until it is removed
        finally:
            os.close(directory)

    def close(self) -> None:
        os.close(self._map)

    def attempts(self) -> list[Attempt]:
        """Every destination so far."""
        found, key, following = [], None, ctypes.create_string_buffer(KEY.size)
        value = ctypes.create_string_buffer(8)
        while True:
            here = ctypes.create_string_buffer(key, KEY.size) if key is not None else None
            address = ctypes.addressof(here) if here is not None else 0
            try:
                _bpf(BPF_MAP_GET_NEXT_KEY, struct.pack("=IxxxxQQ", self._map, address, ctypes.addressof(following)))
            except FileNotFoundError:
                return found
            key = following.raw
            pointers = struct.pack("=IxxxxQQQ", self._map, ctypes.addressof(following), ctypes.addressof(value), 0)
            _bpf(BPF_MAP_LOOKUP_ELEM, pointers)
            found.append(_attempt(key, struct.unpack("=Q", value.raw)[0]))

    def outbound(self) -> list[Attempt]:
        """Every destination that is not this machine itself."""
        return [attempt for attempt in self.attempts() if attempt.outbound]


def _attempt(key: bytes, times: int) -> Attempt:
    family, kind, raw, port = KEY.unpack(key)
    address = socket.inet_ntop(family, raw[:4] if family == socket.AF_INET else raw)
    name = {socket.SOCK_STREAM: "TCP", socket.SOCK_DGRAM: "UDP"}.get(kind, f"socket type {kind}")
    return Attempt(name, address, socket.ntohs(port & 0xFFFF), times)


# One instruction: opcode, destination and source register, offset, immediate.
def _op(code: int, to: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, source << 4 | to, offset, value)


LOAD_W, STORE_W, STORE_DW_IMM, ADD_DW = 0x61, 0x63, 0x7A, 0xDB
MOVE, MOVE_IMM, ADD_IMM, JUMP_EQUAL_IMM, JUMP, CALL, EXIT, LOAD_MAP = 0xBF, 0xB7, 0x07, 0x15, 0x05, 0x85, 0x95, 0x18
LOOKUP, UPDATE = 1, 2  # helper functions


def _program(map_fd: int, *, ipv6: bool) -> bytes:
    """map[family, type, address, port] += 1; allow."""
    key, one = -KEY.size - 4, -KEY.size - 12  # on the stack, below register 10; the value is aligned to 8
    assert one % 8 == 0
    assert key % 4 == 0
    code = [_op(MOVE, 6, 1)]
    address = [USER_IP6 + 4 * i for i in range(4)] if ipv6 else [USER_IP4]
    fields = [(0, FAMILY), (4, TYPE), *((8 + 4 * i, field) for i, field in enumerate(address)), (24, USER_PORT)]
    for at, field in fields:
        code += [_op(LOAD_W, 2, 6, field), _op(STORE_W, 10, 2, key + at)]
    if not ipv6:
        code += [_op(0x62, 10, 0, key + at, 0) for at in (12, 16, 20)]
    load_map = [_op(LOAD_MAP, 1, 1, 0, map_fd), _op(0)]
    key_address = [_op(MOVE, 2, 10), _op(ADD_IMM, 2, 0, 0, key)]
    code += [*load_map, *key_address, _op(CALL, value=LOOKUP)]
    count = [_op(MOVE_IMM, 1, 0, 0, 1), _op(ADD_DW, 0, 1, 0, 0)]
    first = [
        _op(STORE_DW_IMM, 10, 0, one, 1), *load_map, *key_address,
        _op(MOVE, 3, 10), _op(ADD_IMM, 3, 0, 0, one), _op(MOVE_IMM, 4, 0, 0, 0), _op(CALL, value=UPDATE),
    ]  # fmt: skip
    code += [_op(JUMP_EQUAL_IMM, 0, 0, len(count) + 1, 0), *count, _op(JUMP, 0, 0, len(first)), *first]
    return b"".join([*code, _op(MOVE_IMM, 0, 0, 0, 1), _op(EXIT)])


def _load(program: bytes, attach_type: int) -> int:
    code, licence = ctypes.create_string_buffer(program, len(program)), ctypes.create_string_buffer(b"Apache-2.0")
    attributes = struct.pack(
        "=IIQQIIQII16sII",
        PROG_TYPE_CGROUP_SOCK_ADDR, len(program) // 8, ctypes.addressof(code), ctypes.addressof(licence),
        0, 0, 0, 0, 0, b"atoll_connects", 0, attach_type,
    )  # fmt: skip
    return _bpf(BPF_PROG_LOAD, attributes)


def _bpf(command: int, attributes: bytes) -> int:
    number = SYSCALL.get(platform.machine())
    if number is None:
        raise NoCounter(f"the number of bpf(2) on {platform.machine()} is not known here")
    libc = ctypes.CDLL(None, use_errno=True)
    block = ctypes.create_string_buffer(attributes, 128)
    result = libc.syscall(number, command, block, 128)
    if result >= 0:
        return result
    error = ctypes.get_errno()
    if command in (BPF_MAP_GET_NEXT_KEY, BPF_MAP_LOOKUP_ELEM):
        raise OSError(error, os.strerror(error))
    raise NoCounter(f"bpf(2) command {command}: {os.strerror(error)}")
