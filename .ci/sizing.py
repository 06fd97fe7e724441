"""The sizing tables of docs/en/sizing.md and docs/ko/sizing.md, computed by the engine's own memory planner.

    python .ci/sizing.py            write them between the markers of both pages
    python .ci/sizing.py --check    exit 1 if a page holds something else

No GPU is needed. Weights, pages and states are exact: the models are built without memory, as the engine does before it
loads them. What an engine measures on its GPU (activations, graphs, the CUDA context) is estimated: see `RESERVED` and
`activation_bytes`. On an H100 the estimate for Gemma 4 31B in fp8 is 5 % below the pages that the engine then had.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.core.kv.planner import GIB, MemoryBudget, plan_memory, sensible_batched_tokens, sensible_seqs
from engine.core.kv.spec import CacheSpec
from engine.errors import OutOfMemoryPlanError
from engine.models.base import CausalLM
from engine.models.config.model import ModelConfig
from engine.models.loading.loader import quantize
from engine.models.registry import model_class
from engine.worker.memory import activation_bytes, loaded_bytes

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "engine/bench/configs"
MARKERS = "<!-- sizing: written by .ci/sizing.py -->", "<!-- sizing: end -->"
HEADS = {"en": "Model, weights", "ko": "모델, 가중치"}

MODELS = {
    "Qwen3-0.6B": "qwen3-0.6b",
    "Gemma 4 E2B": "gemma4-e2b",
    "Qwen3-8B": "qwen3-8b",
    "Gemma 4 26B-A4B": "gemma4-26b-a4b",
    "Qwen3.6-27B": "qwen3.6-27b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Gemma 4 31B": "gemma4-31b",
    "Qwen3.6-35B-A3B": "qwen3.6-35b-a3b",
}
GPUS = {  # GiB that the driver shows
    "24 GB (L4, A10, RTX 4090)": 22.5,
    "48 GB (L40S)": 44.4,
    "80 GB (A100, H100)": 79.2,
    "141 GB (H200)": 139.8,
}
CONTEXTS = (8_192, 32_768)
UTILIZATION = 0.9
RESERVED = int(2.5 * GIB)  # CUDA context, kernels, library workspaces; graphs; buffers of a step
PAGE_SIZE = 16
MOST_SEQS, MOST_TOKENS = 1024, 8192


def load(config: str, fp8: bool) -> tuple[ModelConfig, CausalLM]:
    model_config = ModelConfig.load(CONFIGS / config)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = model_class(model_config)(model_config, model_config.max_position_embeddings).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    model.set_state_dtype("auto", "cuda")
    if fp8:
        quantize(model, "fp8")
    return model_config, model


def fits(model_config: ModelConfig, model: CausalLM, total: int) -> tuple[int, dict[int, int]] | None:
    """(largest context, users at each of CONTEXTS); None if the model does not fit."""
    tables = sum(table.weight.nbytes for table in model.lookup_tables())  # these stay in host memory
    weights = loaded_bytes(model) - tables
    usable = int(total * UTILIZATION)
    free = usable - weights
    spec = CacheSpec(tuple(model.cache_layers()), 2, PAGE_SIZE)
    tokens = sensible_batched_tokens(
        MOST_TOKENS, total, free, lambda count: activation_bytes(model_config, torch.bfloat16, count, 0)
    )
    seqs = sensible_seqs(spec, MOST_SEQS, free)
    activations = activation_bytes(model_config, torch.bfloat16, tokens, 0)
    budget = MemoryBudget(total, usable, weights, activations, overhead=RESERVED, on_host=tables)
    try:
        plan = plan_memory(
            budget, spec, device="cuda", max_model_len=None, model_max_len=model_config.max_position_embeddings,
            max_num_seqs=None, default_num_seqs=seqs, step_tokens=tokens,
        )  # fmt: skip
    except OutOfMemoryPlanError:
        return None
    users = {}
    for context in CONTEXTS:
        if context > plan.max_model_len:
            continue
        low, high = 0, plan.max_num_seqs
        while low < high:
            middle = (low + high + 1) // 2
            if spec.extents_for(context, tokens, middle) <= plan.num_extents:
                low = middle
            else:
                high = middle - 1
        users[context] = low
    return plan.max_model_len, users


def rows(language: str) -> Iterator[str]:
    yield f"| {HEADS[language]} | " + " | ".join(GPUS) + " |"
    yield "|---" * (len(GPUS) + 1) + "|"
    for name, config in MODELS.items():
        for fp8 in (False, True):
            model_config, model = load(config, fp8)
            cells = []
            for size in GPUS.values():
                found = fits(model_config, model, int(size * GIB))
                if found is None:
                    cells.append("–")
                    continue
                counts = " / ".join(f"{found[1][c]:,}" if c in found[1] else "–" for c in CONTEXTS)
                cells.append(f"{counts} ({found[0]:,})")
            weights = loaded_bytes(model) - sum(table.weight.nbytes for table in model.lookup_tables())
            yield f"| {name} {'fp8' if fp8 else 'bf16'}, {weights / GIB:.1f} GiB | " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for language in HEADS:
        page = REPOSITORY / f"docs/{language}/sizing.md"
        before = page.read_text("utf-8")
        table = "\n".join(rows(language))
        pattern = re.escape(MARKERS[0]) + ".*?" + re.escape(MARKERS[1])
        after = re.sub(pattern, lambda _, table=table: f"{MARKERS[0]}\n\n{table}\n\n{MARKERS[1]}", before, flags=re.S)
        if after == before:
            continue
        stale.append(page.relative_to(REPOSITORY).as_posix())
        if not check:
            page.write_text(after, "utf-8")
    if check and stale:
        print(f"{', '.join(stale)}: the sizing table is not what the planner says. Run: python .ci/sizing.py")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
