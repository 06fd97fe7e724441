"""``gemv``: each one-row GEMM of a decode step, compared with the time that reading its weight takes.

DIR needs only a config.json; without DIR, the GEMMs of all shipped shapes are measured, each once. A GEMM is run with
several copies of its weight in turn, so that none of them stays in a cache.

The search for better tiles is `python -m engine.kernels.tuning`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.bench import floor, report
from engine.capabilities import resolve_device
from engine.errors import ConfigError
from engine.kernels.gemm.tiles import vector_tiles
from engine.kernels.tuning.gemm_operands import Operands
from engine.kernels.tuning.step_gemms import Subject, find_subjects
from engine.kernels.tuning.timing import step_seconds

SEVERAL_MODELS = True
DEFAULT_MODELS = tuple(sorted(path.name for path in floor.CONFIGS.iterdir()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto")
    words = "default: both, but fp8 alone for models of more than 20 GB"
    parser.add_argument("--quantization", choices=["none", "fp8"], help=words)


def run(args: argparse.Namespace) -> Iterator[report.Row]:
    device = torch.device(resolve_device(args.device, torch.cuda.is_available()))
    if device.type == "cpu":
        raise ConfigError("These products are a GPU's: on a CPU the library has its own.", "--device")
    read = floor.bandwidth(device)["copy"]
    for subject in find_subjects(_configs(args), args.quantization):
        yield {**facts(subject), **measure(subject, device, read), **report.machine(device)}


def _configs(args: argparse.Namespace) -> list[Path]:
    return args.model or [floor.CONFIGS / name for name in DEFAULT_MODELS]


def facts(subject: Subject) -> report.Row:
    return {
        "bench": "gemv", "engine": "atoll", "models": " ".join(subject.models), "product": str(subject),
        "mb": round(subject.num_bytes / 1e6, 1),
    }  # fmt: skip


def measure(subject: Subject, device: torch.device, read: float) -> report.Row:
    """Time a GEMM with the tiles that the engine uses. `read`: GB/s."""
    from engine.kernels.runtime.launcher import target_of

    tiles = vector_tiles(subject.gemm, gpu=target_of(device))
    with torch.inference_mode():
        seconds = step_seconds(Operands(subject, device).steps(tiles), device)
    return {"us": round(seconds * 1e6, 1), "tiles": list(tiles), **speed(subject, seconds, read)}


def speed(subject: Subject, seconds: float, read: float) -> report.Row:
    """`of_floor`: the time to read the weight once at `read` GB/s, divided by the GEMM's time."""
    return {
        "tb_s": round(subject.num_bytes / seconds / 1e12, 3),
        "of_floor": round(subject.num_bytes / (read * 1e9) / seconds, 3),
    }
