"""What a start on the GPU is held to: weights at the speed of the page cache, nothing left for collections to see."""

import gc
import json
import time
from pathlib import Path

import pytest
import torch
from gpu_kit import checkpoint, on_gpu

from engine.bench.author import random_checkpoint
from engine.models.loading.checkpoint import check_checkpoint
from engine.models.loading.loader import load_weights, quantize

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

CONFIG = Path(__file__).parents[2] / "engine" / "bench" / "configs" / "qwen3-8b" / "config.json"
LEAST = 4e9  # bytes a second


@pytest.mark.alone
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_weights_load_at_the_speed_of_the_page_cache(quantization: str | None, tmp_path: Path) -> None:
    """3.6 GB in the shapes of Qwen3-8B, read twice: the first time fills the cache."""
    (tmp_path / "config.json").write_text(json.dumps(json.loads(CONFIG.read_text()) | {"vocab_size": 32_000}))
    rates = []
    with random_checkpoint.temporary(tmp_path, None, 8) as directory:
        size = sum(info.num_bytes for info in check_checkpoint(directory).values())
        for _ in range(3):
            model = random_checkpoint.empty_model(directory)
            if quantization:
                quantize(model, quantization)
            torch.cuda.synchronize()
            began = time.monotonic()
            with torch.inference_mode():
                load_weights(model, directory, device=torch.device("cuda"))
            torch.cuda.synchronize()
            rates.append(size / (time.monotonic() - began))
            del model
            gc.collect()
    print(f"{quantization or 'bf16'}: {size / 1e9:.1f} GB at {', '.join(f'{rate / 1e9:.1f}' for rate in rates)} GB/s")
    assert max(rates[1:]) >= LEAST


def test_what_a_start_made_is_frozen(tmp_path: Path) -> None:
    gc.unfreeze()
    llm = on_gpu(checkpoint(tmp_path / "m", "qwen3"))
    assert gc.get_freeze_count() > 10_000, "collections between steps look at what requests make, and at nothing else"
    assert llm.engine.depth == 2, "the next step is planned while one runs"
    gc.unfreeze()
