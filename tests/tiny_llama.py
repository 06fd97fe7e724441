"""Random tiny Llama checkpoints for tests: real files in the real format.

Each is made once by transformers and kept in .cache, because importing torch and transformers takes longer than most
tests that need a model.
"""

import hashlib
import json
import shutil
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

KEPT = Path(__file__).resolve().parents[1] / ".cache/tiny-llamas"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Shapes that break sloppy code: grouped and single KV heads, head_dim ≠ hidden / heads, odd head counts, untied and
# tied embeddings, biases, each rope type. All have the same vocabulary, so they share one tokenizer.
TINY_LLAMAS: dict[str, dict] = {
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mha": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "mqa": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "odd_heads": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1},
    "wide_heads": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "narrow_heads": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "tied": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "biased": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "rope_llama3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "rope_linear": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
}


def save_tiny_llama(directory: Path, *, seed: int = 0, **overrides: object) -> None:
    """Write a random Llama of two layers, hidden size 64 and a byte-level vocabulary of 320 into `directory`."""
    recipe = hashlib.sha256(Path(__file__).read_bytes())
    for library in ("torch", "transformers", "tokenizers"):
        recipe.update(version(library).encode())
    recipe.update(json.dumps([seed, overrides], sort_keys=True).encode())
    made = KEPT / recipe.hexdigest()[:16]
    if not made.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=KEPT))
        _make(partial, seed, overrides)
        with suppress(OSError):  # another process was first
            partial.rename(made)
        shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(made, directory, dirs_exist_ok=True)


def _make(directory: Path, seed: int, overrides: dict[str, object]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.25,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    generator_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(settings | overrides))).to(torch.float32)
        with torch.no_grad():  # biases and norms start as zeros and ones: a forward pass that drops them would pass
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    finally:
        torch.random.set_rng_state(generator_state)
    model.save_pretrained(directory)
    save_byte_tokenizer(directory)


def save_byte_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer of 320 entries: 3 specials, the 256 bytes, and pairs merged from English letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in "thaeinrs" for b in "thaeinrs"][: 320 - len(specials) - len(alphabet)]
    entries = specials + alphabet + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    fast.chat_template = CHATML
    fast.save_pretrained(directory)
