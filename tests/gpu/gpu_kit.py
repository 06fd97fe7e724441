"""What the GPU tests share: random checkpoints of each family, engines on the GPU and the CPU, random prompts."""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from engine import LLM, SamplingParams, capabilities
from engine.core.loop import EngineCore
from engine.core.request import EngineRequest, StepOutput
from engine.errors import OutOfMemoryPlanError
from engine.layers import attention
from engine.layers.quant.fp8 import FP8, FP8_MAX
from engine.models.base import CausalLM
from engine.models.config.model import ModelConfig
from engine.models.registry import model_class

DEVICE = torch.device("cuda")
VOCAB = 1000
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "eos_token_id": 0,
}  # fmt: skip
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 40,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64, "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA4 = GEMMA | {
    "architectures": ["Gemma4ForCausalLM"], "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 4,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}},
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 256,
    "num_attention_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-g3": {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 6},
    "llama-window": {"architectures": ["MistralForCausalLM"], "sliding_window": 40},
    "llama-d128": {"architectures": ["LlamaForCausalLM"], "head_dim": 128, "num_key_value_heads": 8},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False},
    # Each token goes to all experts: where only some are chosen, a rounding may choose others, and scores jump.
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 4,
                  "moe_intermediate_size": 128, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 4},
    "gemma2": GEMMA | {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 5.0},
    "gemma3": GEMMA | {"architectures": ["Gemma3ForCausalLM"]},
    "gemma4-31b": GEMMA4 | {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "gemma4-26b": GEMMA4 | {
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 4, "moe_intermediate_size": 64},
    "gemma4-e2b": GEMMA4 | {
        "num_key_value_heads": 1, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": VOCAB, "use_double_wide_mlp": True},
    "qwen3.5": DELTA | {"architectures": ["Qwen3_5ForCausalLM"]},
    "qwen3.5-moe": DELTA | {
        "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 4,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
}  # fmt: skip


def checkpoint(directory: Path, family: str, seed: int = 0) -> Path:
    """Write a random model of three layers in bf16; norms near 1, so that no layer drowns the others and attention is
    not decided by roundings."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = SHAPE | FAMILIES[family]
    (directory / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.load(directory)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, target in model_class(config)(config, 16).weights().items():
        noise = torch.randn(tuple(target.shape), generator=generator)
        scales = any(word in name for word in ("norm", "scalar", "scale"))
        centre = centre_of(family, name, tuple(target.shape)) if scales else 0.0
        weights[name] = (centre + noise * (0.1 if scales else 0.06)).bfloat16()
    save_file(weights, directory / "model.safetensors")
    return directory


def centre_of(family: str, name: str, shape: tuple[int, ...]) -> float:
    """What a norm's weight or a scale is near to. Some families store what exceeds 1; Gemma 4's k_norm has the scale of
    attention in it."""
    if family.startswith("gemma4"):
        return shape[0] ** -0.5 if "k_norm" in name else 1.0
    stores_excess = family.startswith(("gemma", "qwen3.5")) and "linear_attn" not in name
    return 0.0 if stores_excess else 1.0


def on_gpu(model: Path, **kwargs: Any) -> LLM:
    """A small engine on the GPU; its pages are few, so that several can stand side by side.

    It is tried again where memory did not suffice: what another test's process takes while this one measures counts as
    its own."""
    kwargs = {
        "max_num_seqs": 64, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 256 << 20, "skip_tokenizer_init": True,
    } | kwargs  # fmt: skip
    for seconds in (2, 8):
        try:
            return LLM(model=model, device="cuda", **kwargs)
        except OutOfMemoryPlanError:
            time.sleep(seconds)
    return LLM(model=model, device="cuda", **kwargs)


def on_cpu(model: Path, **kwargs: Any) -> LLM:
    """The CPU path in float32: what the GPU is compared with."""
    kwargs = {"dtype": "float32", "skip_tokenizer_init": True} | kwargs
    return LLM(model=model, device="cpu", **kwargs)


def model_of(llm: LLM) -> CausalLM:
    runner: Any = llm.engine.runner
    return runner.model


def fp8_on_cpu(model: Path, **kwargs: Any) -> LLM:
    """The CPU path with the roundings of `quantization` and `kv_cache_dtype` "fp8": of weights, of the activations of
    more than a few tokens, of keys and values on their way into the cache. All else is float32: what is lost against
    `on_cpu` is what fp8 costs this model, with no kernel's doing. (A server refuses these flags on a CPU, where fp8
    makes nothing faster.)"""
    with patch.object(capabilities, "CPU_QUANTIZATION", frozenset({"fp8"})):
        llm = on_cpu(model, quantization="fp8", **kwargs)
    for module in model_of(llm).modules():
        if isinstance(module, attention.Attention):
            setattr(module, "_on_cpu", partial(_attend_rounded, module._on_cpu))  # noqa: B010 (a method, this once)
    return llm


def _attend_rounded(attend: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    write = attention.write_kv

    def rounded(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, *rest: torch.Tensor, **scales: Any) -> None:
        k, v = (x.clamp(-FP8_MAX, FP8_MAX).to(FP8).to(k_cache.dtype) for x in (k, v))
        write(k, v, k_cache, *rest, **scales)

    with patch.object(attention, "write_kv", rounded):
        return attend(*args)


def prompts(count: int, seed: int = 1, longest: int = 400) -> list[dict]:
    """Random token ids, no end token among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [{"prompt_token_ids": torch.randint(1, VOCAB, (n,), generator=generator).tolist()} for n in lengths]


def generated(llm: LLM, asked: Sequence[dict], params: SamplingParams | Sequence[SamplingParams]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(asked, params, use_tqdm=False)]


def drain(core: EngineCore, requests: Sequence[EngineRequest] = ()) -> dict[str, list[StepOutput]]:
    """Run until nothing is left, checking the engine's invariants after every step; outputs by request."""
    for request in requests:
        core.add_request(request)
    outputs: dict[str, list[StepOutput]] = {r.request_id: [] for r in requests}
    while core.has_work():
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        core.check()
    return outputs


def tokens_of(outputs: Sequence[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def assert_idle(core: EngineCore) -> None:
    """Every page is free (cached ones count as free), every row is free, and no invariant is broken."""
    core.check()
    stats = core.stats()
    assert not core.has_work()
    free_rows = len(core.scheduler.rows.free)
    state = {
        "running": stats.num_running, "waiting": stats.num_waiting, "pages in use": stats.pages_in_use,
        "pages in flight": core.kv.num_deferred, "rows in use": core.max_num_seqs - free_rows,
    }  # fmt: skip
    assert not any(state.values()), state
