"""What the worker needs of any model family."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.core.kv.spec import AttentionLayer, CacheLayer
from engine.layers.attention import Attention
from engine.layers.embed import Embedding
from engine.models.config.model import ModelConfig

if TYPE_CHECKING:
    from engine.models.config.quantization import QuantizationPlan

Weights = Mapping[str, torch.Tensor]


class CausalLM(nn.Module, ABC):
    """Token ids [T] -> hidden states [T, H], or of the last tokens [N, H] (`forward`) -> logits [S, V] (`logits`).

    The tokens of all sequences in a step are concatenated; `get_context()` tells layers which belong together.
    """

    layers: nn.ModuleList                          # the decoder layers, in the order in which they run
    weight_pool: torch.cuda.MemPool | None = None  # memory pool of its weights, on a GPU
    stored: "QuantizationPlan | None" = None       # how a quantised checkpoint stores it (loading/quantized.py)
    kv_scales: frozenset[str] = frozenset()        # names of scales that an fp8 cache uses (loading/kv_scales.py)
    compute_dtype: torch.dtype | None = None       # dtype of activations on a CPU, if it was chosen (loader.compute_in)

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        self.config = config
        self.max_model_len = max_model_len

    @abstractmethod
    def forward(self, token_ids: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def adapt(self, names: Iterable[str]) -> None:
        """Called with all tensor names before loading, for families whose checkpoints come in several layouts."""

    @abstractmethod
    def weights(self) -> Weights:
        """Checkpoint name -> the tensor (or slice of a fused one) into which it is loaded: exactly the names that a
        checkpoint must have."""

    def cache_layers(self) -> list[CacheLayer]:
        """What each layer with a cache keeps, in layer order. By default all layers are equal attention layers."""
        config = self.config
        return [AttentionLayer(config.num_kv_heads, config.head_dim, config.sliding_window)] * config.num_layers

    def cache_modules(self) -> list[nn.Module]:
        """The modules behind `cache_layers`, in the same order: those that the worker gives memory.

        An attention module gets `k_cache` and `v_cache`, a recurrent one `state`, a tuple of [num_slots, *shape].
        """
        return [m for m in self.modules() if isinstance(m, Attention)]

    def lookup_tables(self) -> list[Embedding]:
        """Large tables of which a step reads one row per token, after its first layer has run. They may stay in host
        memory (worker/startup/embedding_offload.py)."""
        return []

    def set_state_dtype(self, wanted: str, device: str) -> None:
        """Set the dtype of recurrent states: --mamba-ssm-cache-dtype, on "cpu" or "cuda"."""

    def ignores(self, name: str) -> bool:
        """Whether a tensor is one that some checkpoints have and this family does not need."""
        return name.endswith("rotary_emb.inv_freq")
