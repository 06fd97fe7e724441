"""Turn one GGUF file into a plain checkpoint: bf16 safetensors, tokenizer, chat template.

Runs in its own process (``python -m appliance.demo.convert FILE.gguf OUT``), because transformers and a dequantised
model take a gigabyte of memory that the caller should not keep. Prints one line per stage on stdout.
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")


def convert(gguf: Path, out: Path) -> None:
    """Write the checkpoint of `gguf` into the existing, empty directory `out`."""
    print("stage: loading the converter", flush=True)
    import gguf as gguf_library
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers parses the whole file for tokenizer, configuration and weights, and makes the map for each module.
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf_library, name, functools.cache(getattr(gguf_library, name)))

    print("stage: reading the tokenizer", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    print("stage: unpacking the weights", flush=True)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

    # transformers still regards the model as GGUF-quantised and would refuse to save it.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]

    print("stage: writing bf16 safetensors", flush=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    _tidy(out, model_max_length=model.config.max_position_embeddings)
    _check(out)


def _tidy(out: Path, model_max_length: int) -> None:
    """Drop what only describes this conversion, and what GGUF cannot say exactly, from the JSON files."""
    config = _read(out / "config.json")
    config.pop("_model_name_or_path", None)
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")  # GGUF keeps it as a float32: 9.9999997e-06
    _write(out / "config.json", config)

    generation = _read(out / "generation_config.json")
    generation.pop("_from_model_config", None)
    _write(out / "generation_config.json", generation)

    tokenizer = _read(out / "tokenizer_config.json")
    for name in ("is_local", "local_files_only"):
        tokenizer.pop(name, None)
    tokenizer["model_max_length"] = model_max_length
    _write(out / "tokenizer_config.json", tokenizer)


def _read(path: Path) -> dict:
    return json.loads(path.read_text("utf-8"))


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")


def _check(out: Path) -> None:
    """Refuse to hand over a checkpoint that lacks a file or names code to run."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                 "chat_template.jinja", "model.safetensors"):
        if not (out / name).is_file():
            raise SystemExit(f"the conversion did not write {name}")
    for name in ("config.json", "tokenizer_config.json"):
        if "auto_map" in _read(out / name):
            raise SystemExit(f"{name} names remote code (auto_map)")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
