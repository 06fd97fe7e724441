"""``gemv``: each product of one row with a weight of a decode step, against the time that reading the weight takes.

DIR needs only a config.json; without one the products of all shipped shapes are measured, each once. A product is run
with several copies of its weight in turn, so that none of them stays in a cache.

``--search`` looks for the best tiles of their kernel instead, and of the kernels of sparse blocks: in the decode step
of one sequence, of each model in turn with random weights and a few of its layers, for at most ``--budget`` seconds in
all. A row for each tells the step's milliseconds before and after. With ``--out engine/kernels/gemm/tuned.json`` and
``--moe-out engine/kernels/moe/tuned.json`` the tiles found are used from then on; the files are written row by row.
A GPU of another kind gets files of its own: engine/kernels/runtime/gpu_target.py has their names.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.bench import floor, report
from engine.bench.gemv_operands import Operands
from engine.bench.gemv_products import Subject, find_subjects, sensible_forms
from engine.bench.timing import step_seconds
from engine.capabilities import resolve_device
from engine.errors import ConfigError
from engine.kernels.gemm.tiles import vector_tiles

if TYPE_CHECKING:
    from engine.bench.gemv_search import Chosen

SEVERAL_MODELS = True
DEFAULT_MODELS = tuple(sorted(path.name for path in floor.CONFIGS.iterdir()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto")
    words = "default: both, but fp8 alone for models of more than 20 GB"
    parser.add_argument("--quantization", choices=["none", "fp8"], help=words)
    parser.add_argument("--search", action="store_true", help="try tiles in decode steps, and print the best of them")
    parser.add_argument("--budget", type=float, default=300, metavar="SECONDS", help="of a search (default: 300)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where a search also writes products' tiles, as JSON")
    parser.add_argument("--moe-out", type=Path, metavar="FILE", help="the same of sparse blocks with one token")


def run(args: argparse.Namespace) -> Iterator[report.Row]:
    device = torch.device(resolve_device(args.device, torch.cuda.is_available()))
    if device.type == "cpu":
        raise ConfigError("These products are a GPU's: on a CPU the library has its own.", "--device")
    if args.search:
        yield from _run_search(args, device)
        return
    read = floor.bandwidth(device)["copy"]
    for subject in find_subjects(_configs(args), args.quantization):
        yield {**facts(subject), **measure(subject, device, read), **report.machine(device)}


def _configs(args: argparse.Namespace) -> list[Path]:
    return args.model or [floor.CONFIGS / name for name in DEFAULT_MODELS]


def _run_search(args: argparse.Namespace, device: torch.device) -> Iterator[report.Row]:
    start = time.monotonic()
    known: Chosen = {}  # a product of several models starts with what was best for the last one
    for config in _configs(args):
        for form in [args.quantization] if args.quantization else sensible_forms(config):
            if time.monotonic() > start + args.budget:
                report.say(f"{config.name} {form} is left out: the budget is spent.")
            else:
                yield from _search_model(args, config, form, device, start + args.budget, known)
    report.say(f"{time.monotonic() - start:.0f} s")


def _search_model(
    args: argparse.Namespace, config: Path, form: str, device: torch.device, deadline: float, known: "Chosen"
) -> Iterator[report.Row]:
    """Adds to `known`. A function of its own: with it the model goes, before the next one comes."""
    from engine.bench import gemv_search, gemv_step

    about = {"bench": "gemv", "engine": "atoll", "model": config.name, "quantization": form}
    with gemv_step.start(config, form) as step:
        todo = gemv_step.plan(step, config.name, known)
        done = 0
        with gemv_step.OnGpu(step, todo, device) as ready:
            for found in gemv_search.search(todo.stages, todo.start, ready, deadline):
                gemv_search.write(found, args.out, args.moe_out)
                known[found.stage.part] = found.tiles
                done += 1
                yield {**about, **found.row, **report.machine(device)}
        report.say(f"{config.name} {form}: {done} of {len(todo.stages)} searched")


def facts(subject: Subject) -> report.Row:
    return {
        "bench": "gemv", "engine": "atoll", "models": " ".join(subject.models), "product": str(subject),
        "mb": round(subject.num_bytes / 1e6, 1),
    }  # fmt: skip


def measure(subject: Subject, device: torch.device, read: float) -> report.Row:
    """With the tiles that are used. `read`: GB/s."""
    from engine.kernels.runtime.launcher import target_of

    tiles = vector_tiles(subject.product, gpu=target_of(device))
    with torch.inference_mode():
        seconds = step_seconds(Operands(subject, device).steps(tiles), device)
    return {"us": round(seconds * 1e6, 1), "tiles": list(tiles), **speed(subject, seconds, read)}


def speed(subject: Subject, seconds: float, read: float) -> report.Row:
    """`of_floor`: the time to read the weight once at `read` GB/s, over that of the product."""
    return {
        "tb_s": round(subject.num_bytes / seconds / 1e12, 3),
        "of_floor": round(subject.num_bytes / (read * 1e9) / seconds, 3),
    }
