"""Compiles and launches Triton kernels without a C compiler, and without Triton's Python code for each launch.

Triton itself compiles C stubs at run time, for the driver's functions and for each kernel's signature, but a server in
a closed network has no C compiler. Here Triton compiles the kernel to machine code (it brings its assembler), and the
kernel is launched through the CUDA driver's own functions.

    @kernel
    def add(x_ptr, y_ptr, n, BLOCK: tl.constexpr): ...

    add((triton.cdiv(n, 256),), x, y, n, BLOCK=256, num_warps=4)

With TRITON_INTERPRET=1 the same call runs in Triton's interpreter, on CPU tensors.

Kernels are launched with programmatic dependent launch (PDL): a kernel may start while the previous one still runs, and
then waits for its results. This hides the latency of a launch, and weights may even be loaded before the wait:

    @kernel
    def scale(x_ptr, w_ptr, y_ptr, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
        w = tl.load(w_ptr)          # nothing on the device ever writes it
        wait_for_previous(PDL)
        x = tl.load(x_ptr + ...)

Every program of every kernel with a PDL constant must call `wait_for_previous` before it exits, even if it reads
nothing: otherwise "the last kernel finished" would not imply that earlier ones did. The launcher sets PDL where the GPU
can do it (compute capability 9.0 or newer).

Triton has no e4m3 type before compute capability 8.9: there, kernels get such tensors as bytes (pointwise.e4m3).

A kernel whose warps do different work, or whose threads must load just what they use, is written in Gluon, Triton's
language of explicit layouts and barriers (`kernel_in_gluon`). It states the most registers that a thread starts with.
The interpreter cannot run it.
"""

import functools
import hashlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable

from engine.kernels.runtime import origins, prebuilt
from engine.kernels.runtime.cache_dir import use_cache_dir
from engine.kernels.runtime.driver import KernelError, Variant, load_function
from engine.kernels.runtime.gpu_target import FP8_CAPABILITY, INTERPRETER, PDL_CAPABILITY, Target
from engine.kernels.runtime.prebuilt import MachineCode, Prebuilt

log = logging.getLogger(__name__)

# Do not store intermediate representations and line information: the machine code is the same without them, a kernel's
# file a third as large, and compiling a tenth faster. Set it to 0 to look at them.
os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
triton.knobs.compilation.listener = origins.triton_listener

_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
_RELEASE = "as it came with the release"
_AS_BYTES = {"*fp8e4nv": "*u8", "*fp8e4nv!": "*u8!"}

_POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32", torch.int64: "*i64", torch.int8: "*i8", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip


class Kernel:
    """A Triton function with its compiled variants, one for each set of types, alignments and constants."""

    def __init__(self, function: Callable, registers: int | None = None) -> None:
        """registers: of a kernel in Gluon, the most that a thread has at the start."""
        self.registers = registers
        self.jit: Any = triton.jit(function) if registers is None else _gluon().jit(function)
        self.name = function.__name__
        constant = {p.name: "constexpr" in str(p.annotation) for p in inspect.signature(function).parameters.values()}
        self.arguments = [name for name in constant if not constant[name]]
        self.constants = [name for name in constant if constant[name] and name != "PDL"]
        self.pdl = "PDL" in constant
        # Alignment is part of a variant only for strides: counts change all the time, and each new variant would have
        # to be compiled.
        self._is_stride = ["stride" in name for name in self.arguments]
        self._variants: dict[tuple, Variant] = {}

    def __call__(
        self, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
    ) -> None:
        if _INTERPRET:
            self.jit[grid](*args, **constants, **({"PDL": False} if self.pdl else {}))
            return
        types = tuple([_type_of(a, s) for a, s in zip(args, self._is_stride, strict=True)])
        if _recorded is not None:
            _recorded.add(Job(self, types, tuple(constants.items()), num_warps, num_stages))
            return
        key = (types, num_warps, num_stages, *[constants[name] for name in self.constants])
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = self._compile(types, constants, num_warps, num_stages)
        variant.launch(grid, args)

    def load(self, job: "Job") -> None:
        """Load a variant before its first launch. One that cannot be compiled or loaded is left to that launch, which
        reports it where it matters."""
        constants = dict(job.constants)
        key = (job.types, job.num_warps, job.num_stages, *[constants[name] for name in self.constants])
        if key not in self._variants:
            try:
                self._variants[key] = self._compile(job.types, constants, job.num_warps, job.num_stages)
            except Exception as error:  # of Triton, of its assembler or of the driver
                log.warning("%s was not loaded at the start (%s). Its first use tries again.", self.name, error)

    def _compile(self, types: tuple, constants: dict[str, Any], num_warps: int, num_stages: int) -> "Variant":
        use_cache_dir()
        capability = torch.cuda.get_device_capability()
        job = Job(self, types, tuple(constants.items()), num_warps, num_stages)
        pdl, given = self.pdl and capability >= PDL_CAPABILITY, [t for t in types if t is not None]
        refusal = None
        for origin, code in _machine_codes(job, capability):
            try:
                variant = Variant(self.name, code, given, pdl)
                (origins.came_with_release if origin == _RELEASE else origins.came_from_triton)()
                return variant
            except KernelError as error:
                log.warning("%s cannot be loaded %s; it is compiled again. %s", self.name, origin, error)
                refusal = error
        assert refusal is not None
        raise refusal


class Job(NamedTuple):
    """A variant to compile."""

    kernel: Kernel
    types: tuple[str | None, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int


_recorded: set[Job] | None = None
_recorded_for: Target | None = None


@contextmanager
def recording(target: Target | None = None) -> Iterator[set[Job]]:
    """Inside this context kernels are recorded instead of launched, to find out what a step needs without running it.

    With `target` they are recorded for that GPU, which need not be present; tensors may be on the CPU. A recording
    inside another one adds to it.
    """
    global _recorded, _recorded_for
    if _recorded is not None:
        assert target is None, "the outer recording names the GPU"
        yield _recorded
        return
    _recorded, _recorded_for = set(), target
    try:
        yield _recorded
    finally:
        _recorded = _recorded_for = None


def gpu_is_absent() -> bool:
    """Whether kernels are recorded for a GPU that is not here: then large tensors have shapes, but no numbers."""
    return _recorded_for is not None


def target_of(device: torch.device) -> Target:
    """The GPU that kernels for `device` are compiled for."""
    return _recorded_for or _target_of(device)


def shared_memory(device: torch.device) -> int:
    """Shared memory that one program may have, in bytes."""
    return target_of(device).shared_memory


@functools.cache
def _target_of(device: torch.device) -> Target:
    if device.type != "cuda":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    return Target(
        (found.major, found.minor), found.shared_memory_per_block_optin, found.multi_processor_count, found.name
    )


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return _INTERPRET


def kernel(function: Callable) -> Kernel:
    """Decorator: a Triton function that is launched as `f(grid, *arguments, num_warps=, num_stages=, **constants)`."""
    return Kernel(function)


def kernel_in_gluon(registers: int) -> Callable[[Callable], Kernel]:
    """Decorator: a Gluon function, launched like a Triton function."""
    return functools.partial(Kernel, registers=registers)


def _gluon() -> Any:
    """Only when a kernel is written in it: importing it takes 30 ms."""
    from triton.experimental import gluon

    return gluon


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Allow the next kernel to start, and wait until the results of the previous one are visible."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_in_order(PDL: tl.constexpr):
    """`wait_for_previous` the other way round: later kernels start only when everything before this one is complete, so
    they may read that before they wait."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def compile_for(
    kernel: Kernel,
    types: tuple,
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
    capability: tuple[int, int],
) -> Any:
    """The kernel, compiled by Triton or from its cache, for GPUs of this compute capability; needs no GPU."""
    assert len(types) == len(kernel.arguments), f"{kernel.name} takes {kernel.arguments}"
    assert set(constants) == set(kernel.constants), f"{kernel.name} has the constants {kernel.constants}"
    pdl = kernel.pdl and capability >= PDL_CAPABILITY
    signature, values, attributes = {}, dict(constants), {}
    if kernel.pdl:
        values["PDL"] = pdl
    by_name = dict(zip(kernel.arguments, types, strict=True))
    for index, parameter in enumerate(kernel.jit.params):
        kind = by_name.get(parameter.name)
        if capability < FP8_CAPABILITY:
            kind = _AS_BYTES.get(kind or "", kind)
        if kind is None:
            signature[parameter.name] = "constexpr"
            values.setdefault(parameter.name, None)
            continue
        signature[parameter.name] = kind.removesuffix("!")
        if kind.endswith("!"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source_key(kernel)
    language = ASTSource if kernel.registers is None else _gluon()._runtime.GluonASTSource
    source = language(fn=kernel.jit, signature=signature, constexprs=values, attrs=attributes)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": pdl, "maxnreg": kernel.registers}
    return triton.compile(source, target=target, options=options)


def _machine_codes(job: "Job", capability: tuple[int, int]) -> Iterator[tuple[str, MachineCode]]:
    """Ways to get a variant's machine code, and where it comes from. The next one is for where the driver refuses it: a
    file may be damaged, or made for another driver."""
    came = prebuilt_kernels(capability)
    code = None if came is None else came.code(variant_key(job, capability))
    if code is not None:
        yield _RELEASE, code
    yield "from the cache", machine_code(job, capability)
    yield "as it was compiled", machine_code(job, capability, fresh=True)


@functools.cache
def prebuilt_kernels(capability: tuple[int, int]) -> Prebuilt | None:
    """The kernels that came with the release for such a GPU, if this machine's driver takes them.

    One kernel is tried for all: a driver older than the assembler that made them refuses each, and a start must know
    that before it decides what to compile.
    """
    came = prebuilt.for_capability(capability)
    if came is None or not torch.cuda.is_available() or capability != torch.cuda.get_device_capability():
        return came
    code = came.smallest()
    try:
        if code is not None:
            load_function(code, code.function)
    except KernelError as error:
        log.warning("The prebuilt kernels in %s are ignored, and kernels are compiled here: %s", came.directory, error)
        return None
    return came


def machine_code(job: "Job", capability: tuple[int, int], *, fresh: bool = False) -> MachineCode:
    """What `compile_for` compiles."""
    if fresh:
        binary = _compiled_again(job, capability)
    else:
        try:
            binary = compile_for(
                job.kernel, job.types, dict(job.constants), job.num_warps, job.num_stages, capability
            )
        except (OSError, KeyError, TypeError, ValueError) as error:  # so Triton reads a damaged file of its cache
            log.warning("%s: the cache cannot be used (%s); it is compiled again.", job.kernel.name, error)
            binary = _compiled_again(job, capability)
    meta = binary.metadata
    return MachineCode(binary.asm["cubin"], meta.name, meta.num_warps, meta.shared, meta.global_scratch_size)


def _compiled_again(job: "Job", capability: tuple[int, int]) -> Any:
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        return compile_for(job.kernel, job.types, dict(job.constants), job.num_warps, job.num_stages, capability)


def variant_key(job: Job, capability: tuple[int, int]) -> str:
    """Names a variant for such a GPU among prebuilt kernels. Together with prebuilt.toolchain it changes with whatever
    decides over the machine code."""
    what = [
        job.kernel.jit.fn.__module__, job.kernel.name, job.types, sorted(job.constants), job.num_warps, job.num_stages,
        job.kernel.registers, capability, source_key(job.kernel),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def load_compiler() -> None:
    """Do what Triton does before a process's first kernel: hash its own library of 400 MB, for the names in its cache.

    This takes half a second, without the GIL: best done in parallel with other work, or before a process forks.
    """
    triton_key()


def source_key(kernel: Kernel) -> str:
    """A cache key: it changes with the source of the kernel and of the functions it calls, and with the constants they
    use.

    Triton's own key (3.6, DependenciesFinder._update_hash) contains a callee's constants only if the callee's key was
    computed before. So it depends on the order in which kernels are compiled, and one process might not find what
    another left in the cache. Computing the callees' keys first makes it the same in every process.
    """
    return _settled(kernel.jit)


def _settled(function: Any) -> str:
    for name in function.fn.__code__.co_names:
        callee = function.fn.__globals__.get(name, getattr(tl, name, None))
        if isinstance(callee, JITCallable) and callee is not function:
            _settled(callee)
    return function.cache_key


def _type_of(value: Any, is_stride: bool) -> str | None:
    """Triton's name for the type of a run-time argument; '!' marks a multiple of 16, which allows wide loads."""
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype] + "!" if value.data_ptr() % 16 == 0 else _POINTERS[value.dtype]
    if isinstance(value, int):
        name = "i32" if -(2**31) <= value < 2**31 else "i64"
        return name + "!" if is_stride and value % 16 == 0 else name
    return None if value is None else "fp32"
