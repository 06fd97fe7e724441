"""Atoll's PagedAttention engine: token ids in, token ids out, and the OpenAI server in front of it.

``from engine import LLM, SamplingParams`` is the offline API. Names resolve lazily: importing ``engine`` costs
nothing, so command-line tools that only want a version or a config never pay for torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.core.params import SamplingParams
    from engine.llm import LLM, CompletionOutput, RequestOutput

__version__ = "0.1.0"

# OpenMP reads this once, when torch is first imported. By default its threads spin at every barrier; as soon as another
# process wants a core, each of a step's hundreds of barriers then waits for a time slice. Measured on 2 cores with one
# busy neighbour: 2 tokens/s spinning, 15 sleeping; on an idle machine both give the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Read when torch is first imported, too: cuBLASLt chooses kernels that make steps of 64 to 192 sequences up to 1.6 %
# faster (Qwen3-8B on an H100). torch's function for it does the same, with a warning on stderr.
os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")

_PUBLIC = {
    "LLM": "engine.llm",
    "RequestOutput": "engine.llm",
    "CompletionOutput": "engine.llm",
    "SamplingParams": "engine.core.params",
    "EngineConfig": "engine.config",
}
__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
