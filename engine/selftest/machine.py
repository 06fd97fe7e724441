"""Hard facts of this machine: is there a GPU that torch can use, new enough, and how fast is it?"""

import ctypes
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from engine.capabilities import FP8_COMPUTE_CAPABILITY, MIN_COMPUTE_CAPABILITY, nvidia_driver_present
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
    """Report the facts. Returns the exit code instead where no GPU can be used."""
    cuda = torch.version.cuda
    tally.fact("PyTorch", f"{torch.__version__}, built for {f'CUDA {cuda}' if cuda else 'CPUs only'}")
    if not nvidia_driver_present():
        return tally.no_gpu(
            "There is no usable GPU here: no NVIDIA driver is loaded.",
            "On a machine with an NVIDIA GPU, install its driver until nvidia-smi lists the GPU. Without one, "
            "'atoll serve' uses the CPU.",
        )
    tally.fact("driver", _driver())
    if cuda is None:
        return tally.no_gpu(
            f"No GPU can be used: this PyTorch ({torch.__version__}) is a build for CPUs.",
            "Install Atoll with the PyTorch build for CUDA.",
        )
    try:
        device = _first_gpu()
    except RuntimeError as error:
        return tally.no_gpu(
            f"No GPU can be used: {_sentence(error)}",
            f"See whether nvidia-smi lists the GPU; this PyTorch needs a driver for CUDA {cuda}. A variable "
            "CUDA_VISIBLE_DEVICES hides GPUs.",
        )
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    tally.fact("GPU", properties.name)
    tally.fact("compute capability", f"{properties.major}.{properties.minor}")
    if capability < MIN_COMPUTE_CAPABILITY:
        return tally.no_gpu(
            f"This GPU is too old: {properties.name} has compute capability {properties.major}.{properties.minor}, and "
            f"{'.'.join(map(str, MIN_COMPUTE_CAPABILITY))} is needed.",
            "Use a newer GPU, or 'atoll serve --device cpu'.",
        )
    tally.fact("Triton", metadata.version("triton"))
    fp8 = capability >= FP8_COMPUTE_CAPABILITY
    tally.fact("fp8", "yes" if fp8 else "weights only: units for it need compute capability 8.9")
    free, total = torch.cuda.mem_get_info(device)
    tally.fact("free memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB", free)
    return Machine(device, fp8, free)


def measure(tally: Tally, machine: Machine) -> None:
    """Report how fast the GPU is. Others may use the processors meanwhile."""
    _rate(tally, "memory bandwidth", "GB/s", lambda: _bandwidth(machine.device, machine.free))
    _rate(tally, "bf16 products", "TFLOP/s", lambda: _product_rate(machine.device))


def _first_gpu() -> torch.device:
    """The current CUDA device, with its context made. Raises RuntimeError with torch's reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same words come as the error
        torch.cuda.init()
        if not torch.cuda.device_count():
            raise RuntimeError("the driver shows no GPU to this process.")
        device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.mem_get_info(device)
    return device


def _driver() -> str:
    """Version of the kernel's driver, and of CUDA that it brings."""
    module = Path("/sys/module/nvidia/version")
    version = module.read_text("ascii").strip() if module.exists() else "of unknown version"
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return f"{version}; its library libcuda.so.1 cannot be loaded"
    return version if failed else f"{version}, CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")[:300] + "."


def _rate(tally: Tally, name: str, unit: str, measure: Callable[[], float]) -> None:
    try:
        rate = measure()
    except RuntimeError as error:
        tally.fact(name, f"not measured: {_sentence(error)}")
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
    """Of the fastest round: in another one this process may have had to wait for a processor."""
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
