"""Weights that the engine keeps in main memory instead of on the GPU: per-layer embeddings of Gemma 4 E2B and E4B.

Half of their weights is a table of which each token reads one row (`--per-layer-embeddings`, docs/en/serve.md). Its
size follows from the model's config.json, which is used only if it is the signed one.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offline_bundle.model.manifest import BundleManifest

FLAG = "per-layer-embeddings"
CONFIG = "model/config.json"
_LIMIT = 1 << 20
_MOST = 1 << 40  # bytes; a larger table is not plausible
# Defaults of these models' configuration. Nothing is assumed for other models.
_DEFAULTS = {"vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "num_hidden_layers": 30}
_ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def of_bundle(bundle: Path, manifest: BundleManifest) -> int:
    """Bytes of such tables; 0 for a model without them, and for a configuration that is not the signed one."""
    found = of_config(signed_config(bundle, manifest))
    return min(found, sum(file.size for file in manifest.files if file.role == "weights"))


def signed_config(bundle: Path, manifest: BundleManifest) -> Any:
    """config.json as JSON; None if it is not the signed one, which the install reports when it verifies that file."""
    entry = manifest.file(CONFIG)
    if entry is None or entry.size > _LIMIT:
        return None
    try:
        fd = os.open(bundle / CONFIG, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            data = file.read(_LIMIT + 1)
    except OSError:
        return None
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def text_config(config: Any) -> dict[str, Any]:
    """The part about text, if the model has others too. Empty if `config` is no configuration."""
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def of_config(config: Any) -> int:
    """Rows × layers × numbers per row and layer × the size of the dtype that the weights are used in."""
    outer: Mapping[str, Any] = config if isinstance(config, dict) else {}
    inner = text_config(config)
    named = outer.get("architectures")
    known = isinstance(named, list) and any(name in _ARCHITECTURES for name in named)
    size = 1
    for name, default in _DEFAULTS.items():
        value = inner.get(name, default if known else 0)
        size *= value if type(value) is int and 0 < value <= _MOST else 0
    kinds = [table.get(name) for table in (inner, outer) for name in ("dtype", "torch_dtype")]
    kind = next((kind for kind in kinds if isinstance(kind, str)), "bfloat16")
    return min(size * _BYTES.get(kind, 2), _MOST)
