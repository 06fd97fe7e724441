"""Compares what is listed for a start with what a start and its requests launch on the GPU that is played, and with
what all layers of the model need, not one of each kind.

    python list_steps.py FAMILY [stored=FORMAT] [KEY=VALUE of EngineConfig ...]      one of gpu_kit's families; as a
                                                                                    checkpoint in one of FORMATS

Prints JSON. Run by test_prebuild.py in a process of its own. No kernel runs.
"""

import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from gpu_kit import FAMILIES, SHAPE
from note_steps import name_of, some_steps

from engine.config import EngineConfig
from engine.kernels.runtime import launcher
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import fill_with_nothing
from engine.prebuild.gpus import GPUS
from engine.prebuild.listing import kernels_for
from engine.prebuild.without_gpu import GPU, without_gpu
from engine.worker.cache import Cache, cache_spec
from engine.worker.cuda_graphs import graph_sizes
from engine.worker.device_runner import DeviceRunner
from engine.worker.startup import memory_profile, warmup
from engine.worker.startup.build import empty_model
from engine.worker.startup.copies import keep_copies
from engine.worker.startup.resolve import resolve_dtype, resolve_kv_dtype

SEQS, TOKENS = 48, 256
_BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FORMATS = {
    "w8a8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, _BY_TOKEN),
    "w8a16": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64}, None),
    "w4a16": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
              None),
}


def launched(config, target):
    """What `_start_on_gpu` and steps of all kinds launch. As engine/worker/startup/build.py does."""
    found = set()

    def note(kernel, grid, *args, num_warps=4, num_stages=3, **constants):
        types = tuple(launcher._type_of(a, s) for a, s in zip(args, kernel._is_stride, strict=True))
        found.add(launcher.Job(kernel, types, tuple(constants.items()), num_warps, num_stages))

    launcher.Kernel.__call__ = note
    with without_gpu(target), torch.inference_mode():
        model_config = ModelConfig.load(config.model)
        kv_dtype = resolve_kv_dtype(config, resolve_dtype(config, model_config))
        model = empty_model(config, model_config, GPU)
        for table in model.lookup_tables():
            table.on_host = True
        fill_with_nothing(model)
        keep_copies(model, config, 1 << 40)
        spec = cache_spec(model.cache_layers(), kv_dtype, 16)
        runner = DeviceRunner(
            model, spec, num_rows=SEQS + 1, max_model_len=1024, max_num_tokens=TOKENS, device=GPU
        )
        runner.bind_cache(Cache(spec, 4, kv_dtype, GPU))
        runner.warm_up()
        for shape in runner.mixed_shapes():
            runner.mixed_of(shape)
        for size in graph_sizes(SEQS):
            runner._decode(size)
        for lengths in some_steps(SEQS, TOKENS):
            for plan in memory_profile._largest_steps(lengths):
                runner.sample(runner.forward(plan))
    return found


def stored(name):
    layout, weights, inputs = FORMATS[name]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*(router|gate$|per_layer).*"]}  # fmt: skip


def main(family, *options):
    flags = dict(option.split("=") for option in options)
    raw = SHAPE | FAMILIES[family]
    if "stored" in flags:
        raw |= {"quantization_config": stored(flags.pop("stored"))}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw))
        config = EngineConfig(
            Path(directory), load_format="dummy", max_num_seqs=SEQS, max_num_batched_tokens=TOKENS, max_model_len=1024,
            **flags,
        )  # fmt: skip
        target, total = GPUS["h100"]
        listed = kernels_for(config, target, total)
        with patch.object(warmup, "one_of_each_kind", lambda layers: nullcontext()):
            of_all_layers = kernels_for(config, target, total)
        needed = launched(config, target)
    print(json.dumps({
        "kernels": sorted({job.kernel.name for job in needed}),
        "listed": len(listed), "launched": len(needed), "not listed": sorted(map(name_of, needed - listed)),
        "of some layers only": sorted(map(name_of, listed ^ of_all_layers)),
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
