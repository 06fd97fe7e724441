"""Facts about this machine: is there a GPU that torch can use, is it new enough, and how fast is it?"""

import ctypes
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from engine.capabilities import FP8_COMPUTE_CAPABILITY, MIN_COMPUTE_CAPABILITY, nvidia_driver_present
from engine.message import Message, msg
from engine.selftest.report import Tally

GIB = 1 << 30
_LARGEST_COPY = 512 << 20
_MATRIX = 4096


@dataclass(frozen=True)
class Machine:
    device: torch.device
    fp8: bool
    free: int  # bytes of memory


def examine(tally: Tally) -> Machine | int:
    """Report the facts. Returns an exit code instead if no GPU can be used."""
    cuda = torch.version.cuda
    built = msg("{version}, built for CPUs only", version=torch.__version__)
    if cuda:
        built = msg("{version}, built for CUDA {cuda}", version=torch.__version__, cuda=cuda)
    tally.fact("PyTorch", built)
    if not nvidia_driver_present():
        return tally.no_gpu(
            msg("There is no usable GPU here: no NVIDIA driver is loaded."),
            msg("On a machine with an NVIDIA GPU, install its driver until nvidia-smi lists the GPU. Without one, "
                "'atoll serve' uses the CPU."),
        )
    tally.fact(msg("driver"), _driver())
    if cuda is None:
        return tally.no_gpu(
            msg("No GPU can be used: this PyTorch ({version}) is a build for CPUs.", version=torch.__version__),
            msg("Install Atoll with the PyTorch build for CUDA."),
        )
    try:
        device = _first_gpu()
    except RuntimeError as error:
        return tally.no_gpu(
            msg("No GPU can be used: {why}", why=_sentence(error)),
            msg("Check whether nvidia-smi lists the GPU; this PyTorch needs a driver for CUDA {cuda}. The variable "
                "CUDA_VISIBLE_DEVICES can hide GPUs.", cuda=cuda),
        )
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    tally.fact("GPU", properties.name)
    tally.fact(msg("compute capability"), f"{properties.major}.{properties.minor}")
    if capability < MIN_COMPUTE_CAPABILITY:
        return tally.no_gpu(
            msg("This GPU is too old: {name} has compute capability {capability}, and {needed} is needed.",
                name=properties.name, capability=f"{properties.major}.{properties.minor}",
                needed=".".join(map(str, MIN_COMPUTE_CAPABILITY))),
            msg("Use a newer GPU, or 'atoll serve --device cpu'."),
        )
    tally.fact("Triton", metadata.version("triton"))
    fp8 = capability >= FP8_COMPUTE_CAPABILITY
    tally.fact("fp8", msg("yes") if fp8 else msg("weights only: fp8 arithmetic needs compute capability 8.9"))
    free, total = torch.cuda.mem_get_info(device)
    shown = msg("{free} of {total} GiB", free=f"{free / GIB:.1f}", total=f"{total / GIB:.1f}")
    tally.fact(msg("free memory"), shown, free)
    return Machine(device, fp8, free)


def measure(tally: Tally, machine: Machine) -> None:
    """Report how fast the GPU is. Other processes may use the CPU meanwhile."""
    _rate(tally, msg("memory bandwidth"), "GB/s", lambda: _bandwidth(machine.device, machine.free))
    _rate(tally, msg("bf16 products"), "TFLOP/s", lambda: _product_rate(machine.device))


def _first_gpu() -> torch.device:
    """The current CUDA device, with its context made. Raises RuntimeError with torch's reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error has the same text
        torch.cuda.init()
        if not torch.cuda.device_count():
            raise RuntimeError(msg("the driver shows no GPU to this process."))
        device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.mem_get_info(device)
    return device


def _driver() -> str:
    """The version of the kernel driver, and of the CUDA API that it supports."""
    module = Path("/sys/module/nvidia/version")
    version = module.read_text("ascii").strip() if module.exists() else "of unknown version"
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return msg("{version}; its library libcuda.so.1 cannot be loaded", version=version)
    return version if failed else f"{version}, CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def _sentence(error: Exception) -> str:
    """The error's first sentence; our own errors are shown whole."""
    if error.args and isinstance(error.args[0], Message):
        return error.args[0]
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")[:300] + "."


def _rate(tally: Tally, name: str, unit: str, measure: Callable[[], float]) -> None:
    try:
        rate = measure()
    except RuntimeError as error:
        tally.fact(name, msg("not measured: {why}", why=_sentence(error)))
    else:
        tally.fact(name, f"{rate:,.0f} {unit}", round(rate, 1))


def _bandwidth(device: torch.device, free: int) -> float:
    """GB/s of a copy within the device, reading and writing counted."""
    size = min(_LARGEST_COPY, free // 8)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device) / 1e9


def _product_rate(device: torch.device) -> float:
    """TFLOP/s of a large matrix product."""
    a = torch.randn(_MATRIX, _MATRIX, device=device).bfloat16()
    out = torch.empty_like(a)
    return 2 * _MATRIX**3 / _seconds(lambda: torch.mm(a, a, out=out), device) / 1e12


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 10, rounds: int = 3) -> float:
    """Seconds of the fastest round: in the others, this process may have waited for the CPU."""
    work()
    torch.cuda.synchronize(device)
    fastest = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        torch.cuda.synchronize(device)
        fastest = min(fastest, (time.perf_counter() - began) / repeats)
    return fastest
