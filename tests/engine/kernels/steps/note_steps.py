"""Notes which kernels a start runs, and which of those that serving needs were not among them.

    python note_steps.py FAMILY MAX_SEQS MAX_TOKENS [large]        one of gpu_kit's families

large: its weights are taken for large ones, whose products of two rows are not in vector form.

Prints JSON. Run by test_prepared_steps.py in a process of its own. Nothing here needs a GPU, for no kernel runs: what
torch itself computes between them, it computes on the CPU from whatever stands there.
"""

import json
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from gpu_kit import FAMILIES, SHAPE

from engine.core.kv.spec import CacheSpec
from engine.kernels.runtime import launcher
from engine.layers import linear
from engine.layers.quant import unquantized
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import fill_randomly
from engine.models.registry import model_class
from engine.worker.cache import Cache
from engine.worker.cuda_graphs import graph_sizes
from engine.worker.device_runner import DeviceRunner
from engine.worker.startup import memory_profile, warmup

CPU = torch.device("cpu")
MULTIPROCESSORS, SHARED = 132, 227 << 10


def stand_in_for_a_gpu():
    """CPU tensors take the GPU's path; there are events and memory to ask about."""
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.Tensor.pin_memory = lambda tensor: tensor
    for name in ("zeros", "empty"):
        def make(*shape, make=getattr(torch, name), pin_memory=False, **options):
            return make(*shape, **options)
        setattr(torch, name, make)
    nothing = SimpleNamespace(record=lambda: None, synchronize=lambda: None, query=lambda: True)
    torch.cuda.Event = lambda *_, **__: nothing
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    torch.cuda.get_device_capability = lambda _: (9, 0)
    torch.cuda.mem_get_info = lambda _: (0, 0)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *_: 0)
    launcher._target_of = lambda _: launcher.Target((9, 0), SHARED, MULTIPROCESSORS)


def random_model(family):
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPE | {"hidden_size": 128} | FAMILIES[family]))
        config = ModelConfig.load(Path(directory))
    torch.set_default_dtype(torch.bfloat16)
    model = model_class(config)(config, 1024).eval()
    torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        fill_randomly(model, device=CPU)
    return model


def some_steps(max_seqs, max_tokens):
    """Lengths of prompts: short and long ones, alone and together; those of one token come first."""
    yield from ([n] for n in (2, 3, 5, 33, 63, 64, 65, 129, max_tokens) if n <= max_tokens)
    choose = random.Random(1)
    for count in (2, 5, 15, 16, 17, 18, 33, max_seqs - 1, max_seqs):
        spare = max_tokens - count
        if 1 < count <= max_seqs and spare > 0:
            chunks = choose.randint(1, min(count, spare))
            yield [1] * (count - chunks) + [1 + choose.randint(1, spare // chunks) for _ in range(chunks)]


def main(family, max_seqs, max_tokens, weights):
    stand_in_for_a_gpu()
    if weights == ["large"]:
        linear._SMALL_WEIGHT = unquantized.SOME_OUTPUTS = 0
    model = random_model(family)
    with torch.inference_mode():
        print(json.dumps(noted(model, max_seqs, max_tokens)))


def noted(model, max_seqs, max_tokens):
    ahead, started, late = set(), set(), set()
    seen = started

    def note(kernel, grid, *args, num_warps=4, num_stages=3, **constants):
        types = tuple(launcher._type_of(a, s) for a, s in zip(args, kernel._is_stride, strict=True))
        job = launcher.Job(kernel, types, tuple(constants.items()), num_warps, num_stages)
        (seen if launcher._recorded is None else ahead).add(job)

    launcher.Kernel.__call__ = note
    warmup.compile_ahead = lambda jobs, capability: 0
    warmup.load_kernels = lambda jobs: None

    # As engine/worker/startup/build.py does.
    spec = CacheSpec(tuple(model.cache_layers()), 2, 16)
    memory_profile.measure_steps(model, spec, torch.bfloat16, max_tokens, max_seqs, CPU, graphs=False)
    runner = DeviceRunner(
        model, spec, num_rows=max_seqs + 1, max_model_len=1024, max_num_tokens=max_tokens, device=CPU
    )
    runner.bind_cache(Cache(spec, 4, torch.bfloat16, CPU))
    runner.warm_up()
    sizes = graph_sizes(min(max_seqs, max_tokens))
    for size in sizes:
        runner._decode(size)
    runner.graphs = SimpleNamespace(
        size_for=lambda batch: next(s for s in sizes if s >= batch), has=lambda _: True, replay=runner._decode
    )

    seen = late
    for lengths in some_steps(max_seqs, max_tokens):
        prompts, decodes = memory_profile._largest_steps(lengths)
        for plan in (prompts, decodes):
            runner.sample(runner.forward(plan))
    return {
        "ahead": len(ahead),
        "not ahead": sorted(name_of(job) for job in started - ahead),
        "late": sorted(name_of(job) for job in late - started),
    }


def name_of(job):
    return f"{job.kernel.name} {dict(job.constants)} {job.types}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
