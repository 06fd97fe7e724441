"""Every knob of the engine, with vLLM's flag names and meanings."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]

PAGE_SIZES = (8, 16, 32, 64)
TABLE_PLACES = ("host", "gpu")  # where a table that is only looked up may be
STATE_DTYPES = ("float32", "bfloat16")  # in which a recurrent layer may keep its state
# Tokens a page by default. The GPU's kernels like 16. Short answers on a CPU waste less in pages of 8: of 64 requests
# of 16-128 tokens in and out, 2.1 % of the slots are never written, against 5.0 %.
DEFAULT_PAGE_SIZE = {"cpu": 8, "cuda": 16}


@dataclass(slots=True)
class EngineConfig:
    """How to run one model. Construction does not touch the disk or the device; `build_engine` validates.

    `max_model_len` None takes the model's own limit (fitted to memory, with a note, if it does not fit); "auto" asks
    for the largest that fits; a number is honoured or refused. `gpu_memory_utilization` is the share of the device's
    total memory that weights, activations and KV pages may use together (on CPU: of the memory now available, for KV
    only, unless `kv_cache_memory_bytes` is given).
    """

    model: Path
    served_model_name: list[str] = field(default_factory=list)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    device: Device = "auto"
    max_model_len: int | Literal["auto"] | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None               # tokens a page, one of PAGE_SIZES; None: by device
    max_num_seqs: int | None = None             # None: 256 on CPU, 1024 on a GPU, fitted to memory
    max_num_batched_tokens: int | None = None   # None: 512 on CPU; on a GPU 8192, or what suits its memory (planner.py)
    tensor_parallel_size: int = 1
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    overlap: bool | None = None                 # schedule step N+1 while step N runs; None: only where it helps (GPU)
    seed: int | None = None                     # base of the seeds of requests without one; None: random
    skip_tokenizer_init: bool = False
    per_layer_embeddings: Literal["auto", "host", "gpu"] = "auto"  # Gemma 4 E2B, E4B: where their table is
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of recurrent layers' states
    batch_invariant: bool = False               # a request's result is the same bits in any batch; slower (GPU)

    def __post_init__(self) -> None:
        self.model = Path(self.model)

    @property
    def model_name(self) -> str:
        return self.served_model_name[0] if self.served_model_name else str(self.model)
