"""The properties of a GPU that decide which kernel variants and which shipped table of tiles it uses. Plain Python:
needs no GPU.

Atoll ships tables of measured tiles, one file for each kind of GPU that was measured:

    tuned.json                    H100 and H200
    tuned-8.9-142-99.json         another GPU: compute capability, multiprocessors, KiB of shared memory per program

A GPU without a file takes that of the most similar GPU: one with the same compute capability, else with the same major
version, else with the closest one; among several, the one with the most similar number of multiprocessors. Entries that
do not fit its shared memory are ignored, and those shapes follow the rule. A table that an operator measured on this
server has precedence: tuned_tables.
"""

import functools
from pathlib import Path
from typing import NamedTuple

FP8_CAPABILITY = (8, 9)   # instructions and tensor cores for e4m3 numbers
PDL_CAPABILITY = (9, 0)   # programmatic dependent launch
LARGE_SHARED = 200 << 10  # H100, H200, B200 have 227 KiB, A100 has 163, and L40S, RTX 4090, RTX PRO 6000 have 99


class Target(NamedTuple):
    """The properties of a GPU that decide which kernel variants it uses."""

    capability: tuple[int, int]
    shared_memory: int  # bytes that one program may have
    multiprocessors: int
    name: str = ""      # the driver's name, for GPUs in this machine: it is part of the name of their own table

    @property
    def fp8_units(self) -> bool:
        """Whether its tensor cores multiply e4m3. If not, GEMMs widen fp8 weights and do not quantise activations."""
        return self == INTERPRETER or self.capability >= FP8_CAPABILITY

    @property
    def wgmma(self) -> bool:
        """Whether four warps together multiply operands in shared memory, which leaves registers for more rows of
        results. Only Hopper does this: elsewhere tiles of 256 rows would spill."""
        return self.capability[0] == 9

    @property
    def large_shared(self) -> bool:
        """Whether a program may have about as much shared memory as on an H100."""
        return self != INTERPRETER and self.shared_memory >= LARGE_SHARED


INTERPRETER = Target((0, 0), 1 << 30, 0)
H100 = Target((9, 0), 232_448, 132)


@functools.cache
def tuned_file(common: Path, gpu: Target | None) -> Path:
    """The file of measured tiles for `gpu`: `common`, which is the H100's, or one next to it. With None, the H100's."""
    if gpu is None or gpu == INTERPRETER:
        return common
    files = {H100: common}
    for path in sorted(common.parent.glob(f"{common.stem}-*.json")):
        capability, multiprocessors, kib = path.stem.removeprefix(f"{common.stem}-").split("-")
        major, minor = map(int, capability.split("."))
        files[Target((major, minor), int(kib) << 10, int(multiprocessors))] = path
    return files[min(files, key=lambda measured: _distance(measured, gpu))]


def tuned_on(common: Path, gpu: Target) -> str:
    """A phrase for the log: where the tiles that `gpu` uses were measured."""
    path = tuned_file(common, gpu)
    whose = "an H100's" if path == common else path.name
    own = path != common and path.stem == f"{common.stem}-{name_of(gpu)}"
    return "measured on a GPU of this kind" if own or gpu[:2] == H100[:2] else f"{whose} where they fit, else by rule"


def name_of(gpu: Target) -> str:
    """The GPU as it appears in file names."""
    return f"{gpu.capability[0]}.{gpu.capability[1]}-{gpu.multiprocessors}-{gpu.shared_memory >> 10}"


def _distance(measured: Target, gpu: Target) -> tuple[int, ...]:
    majors, minors = zip(measured.capability, gpu.capability, strict=True)
    return (
        abs(majors[0] - majors[1]), abs(minors[0] - minors[1]), abs(measured.multiprocessors - gpu.multiprocessors),
        abs(measured.shared_memory - gpu.shared_memory),
    )  # fmt: skip
