"""``load``: how fast weights go from the page cache to ready parameters, and how much memory that takes.

If DIR contains only a config.json, random weights with its shapes are written first, and removed afterwards. The first
load is not timed, because it fills the page cache and allocates the process's buffers.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from engine.bench import report
from engine.bench.author import load_stages, random_checkpoint
from engine.capabilities import resolve_device
from engine.models.loading.checkpoint import check_checkpoint
from engine.models.loading.loader import load_weights, quantize
from engine.worker.startup.memory import weight_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="timed loads; the median counts (default 3)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--layers", type=int, help="of random weights; default: as many as 8 GiB hold")
    parser.add_argument("--dir", type=Path, help="where to write random weights (default /dev/shm, which is memory: "
                        "the page cache of a disk may be faster or slower)")
    parser.add_argument("--stages", action="store_true", help="also measure reading, copying and both alone")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 8, 16], help="of --stages")
    parser.add_argument("--buffer-mib", type=int, nargs="+", default=[1, 4, 16], help="of --stages")
    parser.add_argument("--cold", action="store_true", help="the page cache gives up the files before each load")


def run(args: argparse.Namespace) -> list[report.Row]:
    device = torch.device(resolve_device(args.device, torch.cuda.is_available()))
    with ExitStack() as stack:
        model_dir, facts = args.model, {}
        if not any(model_dir.glob("*.safetensors")):
            layers = args.layers or random_checkpoint.layers_within(model_dir)
            report.say(f"Writing random weights of {layers} layers …")
            model_dir = stack.enter_context(random_checkpoint.temporary(model_dir, args.dir, layers))
            facts = {"layers": layers}
        stages = []
        if args.stages:
            stages = list(load_stages.rows(model_dir, device, args.threads, args.buffer_mib, args.repeats,
                                           cold=args.cold))  # fmt: skip
        row = measure(model_dir, device, args.quantization, args.repeats, cold=args.cold)
    return [*stages, {"bench": "load", "engine": "atoll", "model": args.model.name, "quantization": args.quantization,
                      **facts, **report.machine(device), **row}]  # fmt: skip


def measure(
    model_dir: Path, device: torch.device, quantization: str | None, repeats: int, *, cold: bool = False
) -> report.Row:
    """Load once, then `repeats` times with timing. GB refers to the files; memory is the maximum of all loads."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.zeros(1, device=device)  # the CUDA context is not a part of loading
    files = check_checkpoint(model_dir).values()
    file_bytes = sum(info.num_bytes for info in files)
    host_before = _resident("VmRSS")
    _reset_peak()
    seconds, extra, weights = [], [], 0
    for turn in range(repeats + 1):
        report.say(f"load {turn}/{repeats}" if turn else "load (warm-up)")
        model = random_checkpoint.empty_model(model_dir)
        if quantization:
            quantize(model, quantization)
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            reserved = torch.cuda.memory_reserved(device)
        if cold:
            load_stages.forget({info.shard for info in files})
        start = time.perf_counter()
        with torch.inference_mode():
            load_weights(model, model_dir, device=device)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
        weights = weight_bytes(model)
        if on_gpu:
            extra.append(torch.cuda.max_memory_reserved(device) - reserved - weights)
        del model
    timed = seconds[1:] or seconds
    middle = statistics.median(timed)
    row = {
        "cold": cold,
        "file_gb": round(file_bytes / 1e9, 3),
        "weights_gb": round(weights / 1e9, 3),
        "secs": round(middle, 3),
        "secs_all": [round(s, 3) for s in timed],
        "first_secs": round(seconds[0], 3),
        "gb_s": round(file_bytes / middle / 1e9, 2),
        "host_rss_growth_gb": round(max(0, _resident("VmHWM") - host_before) / 1e9, 3),
    }
    return row | ({"device_peak_over_weights_gb": round(max(extra) / 1e9, 3)} if on_gpu else {})


def _resident(which: str) -> int:
    """Bytes of this process in memory now (VmRSS) or at most so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    """Reset VmHWM to the current value."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pass  # not allowed here: the peak includes what was before
