"""Starts an engine in a process of its own, and prints what its memory plan came to and what its kernels spill.

    python plan_child.py CONFIG QUANTIZATION

CONFIG: a folder of engine/bench/configs, of which a few layers are enough. Started by test_gpu_memory.py; prints JSON.
"""

import ctypes
import io
import json
import logging
import re
import sys

from engine import LLM
from engine.bench import floor
from engine.kernels.runtime import driver, launcher
from engine.kernels.tuning import decode_step

_LOCAL_SIZE_BYTES = 3  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES


def local_bytes(variant: driver.Variant) -> int:
    """Of a thread, what has no room in registers; the driver sets it aside for all threads of the card."""
    found = ctypes.c_int()
    library = driver.driver()
    driver.check(library.cuFuncGetAttribute(ctypes.byref(found), _LOCAL_SIZE_BYTES, variant._function), variant.name)
    return found.value


def main(config: str, quantization: str) -> None:
    log = io.StringIO()
    logging.basicConfig(level=logging.INFO, stream=log)
    with decode_step.few_layers(floor.CONFIGS / config) as model:
        LLM(model=model, device="cuda", load_format="dummy", skip_tokenizer_init=True, max_model_len=8192,
            gpu_memory_utilization=0.5, quantization=None if quantization == "none" else quantization)  # fmt: skip
    found = re.search(r"([\d.]+) GiB taken, ([\d.]+) GiB planned", log.getvalue())
    assert found is not None, log.getvalue()
    kernels = {k for m in sys.modules.copy().values() if str(getattr(m, "__name__", "")).startswith("engine.kernels.")
               for k in vars(m).values() if isinstance(k, launcher.Kernel)}  # fmt: skip
    local = {f"{k.name} {key}": local_bytes(variant) for k in kernels for key, variant in k._variants.items()}
    taken, planned = map(float, found.groups())
    print(json.dumps({"taken": taken, "planned": planned, "kernels": len(local), "local": local}))


if __name__ == "__main__":
    main(*sys.argv[1:])
