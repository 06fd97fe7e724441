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

# OpenMP reads these once, when torch is first imported. On two cores its threads spin for about a millisecond before
# they sleep, so that a step's hundreds of operators need not wake them. If another process takes a core, each operator
# would wait for a time slice, so a step uses both threads only while the cores are free (worker/team.py). More than two
# threads were not measured, and beside a GPU they have little to do: these sleep at once.
if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    if len(os.sched_getaffinity(0)) != 2 or os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg"):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        os.environ["GOMP_SPINCOUNT"] = "100000"
# Read with the first tensor: large ones lie in huge pages, so a CPU that reads weights looks up fewer addresses
# (docs/performance/cpu.md).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Also read when torch is first imported: cuBLASLt chooses faster kernels for steps of 64 to 192 sequences. torch's
# function for this would print a warning on stderr.
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
