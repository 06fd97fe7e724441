"""Models for the test of long contexts: narrow, with the heads of the large ones, and weights that look far back.

Random weights attend to everything alike, so that at 32k tokens no single one matters, and a kernel that forgot most
of them would hardly show. Here the scores of full attention are SHARP times as wide: every token takes most of what it
gets from a few dozen of those before it, wherever they are. Recurrent heads forget at rates between a few and some ten
thousand tokens.
"""

import json
from pathlib import Path

import torch
from gpu_kit import DELTA, GEMMA4, SHAPE
from safetensors.torch import save_file

from engine import LLM, SamplingParams
from engine.models.config.model import ModelConfig
from engine.models.registry import model_class

LENGTH = 32_768
SHARP = 3.0
VOCAB = 2000
ANSWER = 32      # of the 32,768 tokens the last ones, which are decoded
PARTS = {
    "first 1,024": slice(0, 1024), "to 8,192": slice(1024, 8192), "to the end": slice(8192, LENGTH - ANSWER - 1),
    "decoded": slice(LENGTH - ANSWER - 1, LENGTH - 1),
}  # fmt: skip
_NARROW = SHAPE | {"vocab_size": VOCAB, "num_attention_heads": 2, "max_position_embeddings": LENGTH + 64}
MODELS = {
    "gemma4": _NARROW | GEMMA4 | {
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 1024},
    "qwen3.5": _NARROW | DELTA | {
        "architectures": ["Qwen3_5ForCausalLM"], "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}  # fmt: skip


def checkpoint(directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    raw = MODELS[name]
    (directory / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.load(directory)
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for key, target in model_class(config)(config, 16).weights().items():
        noise = torch.randn(tuple(target.shape), generator=generator)
        if key.endswith("A_log"):
            value = torch.linspace(-1.0, -10.0, len(noise))
        elif any(word in key for word in ("norm", "scalar", "dt_bias")):
            value = _centre(name, key, target) + 0.1 * noise
        else:
            value = 0.06 * noise
        weights[key] = value if target.dtype == torch.float32 else value.bfloat16()
    save_file(weights, directory / "model.safetensors")
    return directory


def _centre(name: str, key: str, target: torch.Tensor) -> float:
    """What a norm's weight is near to. Qwen3.5 stores what exceeds 1, but for the norm of recurrent heads."""
    far = target.shape[0] == 512 if name == "gemma4" else True  # global layers have heads of 512
    if name == "gemma4":
        return (SHARP if far else 1.0) * target.shape[0] ** -0.5 if "k_norm" in key else 1.0
    if "q_norm" in key:
        return SHARP - 1
    return 1.0 if "linear_attn.norm" in key else 0.0


def text() -> list[int]:
    return torch.randint(1, VOCAB, (LENGTH - ANSWER,), generator=torch.Generator().manual_seed(4)).tolist()


def scores(llm: LLM, ids: list[int], answer: int = 1) -> tuple[list[int], torch.Tensor]:
    """`answer` tokens; and the log-probability of every token but the first, the answer's included.

    The tokens are drawn: the likeliest ones are the same one again and again, and scores of it are of another kind."""
    params = SamplingParams(max_tokens=answer, temperature=1, seed=6, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    found = [(entry or {})[token].logprob for token, entry in zip([*ids[1:], *tokens], entries, strict=True)]
    return tokens, torch.tensor(found)


def error(ours: torch.Tensor, reference: torch.Tensor, at: slice = slice(None)) -> float:
    """Of the scores `at` some tokens, relative to how much all of them differ: they are near -log(VOCAB)."""
    return float((ours - reference)[at].square().mean().sqrt() / reference.std())


def errors(ours: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Of each of PARTS; both [LENGTH - 1]."""
    return {part: error(ours, reference, at) for part, at in PARTS.items()}
