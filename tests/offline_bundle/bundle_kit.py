"""Small real bundles for the tests, ways to forge them, and the independent `model_signing` command."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from model_signing._cli import main as model_signing_command
from safetensors.numpy import save_file

from offline_bundle import BundleError, BundleManifest, build_bundle
from offline_bundle.signing import model_signing
from offline_bundle.signing.keys import KeyPair, load_private
from offline_bundle.signing.strict_json import canonical

CHUNK = 64 * 1024
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@dataclass(frozen=True)
class Made:
    """A bundle directory and the key pair that signed it."""

    path: Path
    keys: KeyPair
    source: Path

    @property
    def trusted(self) -> list[Path]:
        return [self.keys.public_path]

    def copy_to(self, parent: Path) -> "Made":
        target = parent / self.path.name
        shutil.copytree(self.path, target, symlinks=True)
        return Made(target, self.keys, self.source)


def make_model(directory: Path, *, kib: int = 200, shards: int = 2, seed: int = 0) -> Path:
    """A model directory in the usual layout: `shards` equal-sized weight files of about `kib` KiB, random bytes."""
    random = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    weight_map = {}
    for i in range(1, shards + 1):
        shard = f"model-{i:05}-of-{shards:05}.safetensors"
        tensors = {
            f"layer.{i}.weight": random.integers(0, 255, (kib, 1000), dtype=np.uint8),
            f"layer.{i}.bias": random.standard_normal((3, 5)).astype(np.float32),
        }
        save_file(tensors, directory / shard)
        weight_map |= dict.fromkeys(tensors, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}))
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "auto_map": 1}}}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "README.md").write_text("# Tiny\n")
    return directory


def build(model: Path, out: Path, keys: KeyPair, **changes: Any) -> Path:
    """`build_bundle` with arguments that suit most tests."""
    license_file = out.parent / "LICENSE-TEXT"
    license_file.parent.mkdir(parents=True, exist_ok=True)
    license_file.write_text("You may use this model.\n")
    arguments: dict[str, Any] = {
        "name": "tiny",
        "version": "1.0.0",
        "sequence": 5,
        "license_id": "Apache-2.0",
        "license_file": license_file,
        "source_repo": "example/tiny",
        "source_revision": "0123abcd",
        "private_key": keys.private_path,
        "chunk_size": CHUNK,
    }
    return build_bundle(model, out, **(arguments | changes))


def describe(path: str, data: bytes, role: str) -> dict[str, Any]:
    """A `files` entry of bundle.json."""
    return {
        "path": path,
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "role": role,
        "chunk_size": CHUNK,
        "chunks": [hashlib.sha256(data[i : i + CHUNK]).hexdigest() for i in range(0, len(data), CHUNK)],
    }


def forge(
    made: Made,
    files: Mapping[str, tuple[bytes, str]] | None = None,
    edit: Callable[[dict[str, Any]], None] = lambda manifest: None,
    *,
    encode: Callable[[Any], bytes] = canonical,
    resources: Callable[[dict[str, str]], None] = lambda resources: None,
) -> None:
    """Sign, with the trusted key, what no honest builder would: `files` is path → (content, role).

    `edit` changes the manifest's dictionary, `encode` its text, `resources` the signed path → hash map.
    """
    manifest = json.loads((made.path / "bundle.json").read_bytes())
    entries = {f["path"]: f for f in manifest["files"]}
    for path, (data, role) in (files or {}).items():
        target = made.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        entries[path] = describe(path, data, role)
    manifest["files"] = [entries[p] for p in sorted(entries)]
    edit(manifest)
    text = encode(manifest)
    (made.path / "bundle.json").write_bytes(text)
    signed = {f["path"]: f["sha256"] for f in manifest["files"]}
    signed["bundle.json"] = hashlib.sha256(text).hexdigest()
    resources(signed)
    key = load_private(made.keys.private_path)
    (made.path / "model.sig").write_bytes(model_signing.sign(signed, made.path.name, key))


def refused(exit_code: int, words: str, call: Callable[[], object]) -> BundleError:
    """Assert that `call` is refused with `exit_code`, says `words`, and tells what to do."""
    with pytest.raises(BundleError) as caught:
        call()
    error = caught.value
    assert error.exit_code == exit_code, str(error)
    assert words.lower() in str(error).lower(), str(error)
    assert error.hint
    return error


def independent_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the independent command."""
    program = Path(sys.executable).with_name("model_signing")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def oms_accepts(bundle: Path, public_key: Path) -> bool:
    """Whether `model_signing verify key` accepts the bundle. (Run in this process: starting it takes half a second.)"""
    arguments = ["verify", "key", bundle, "--signature", bundle / "model.sig", "--public_key", public_key]
    done = CliRunner().invoke(model_signing_command, [str(a) for a in arguments])
    assert ("Verification succeeded" in done.output) == (done.exit_code == 0), done.output
    assert done.exit_code == 0 or "Verification failed" in done.output or "does not exist" in done.output, done.output
    return done.exit_code == 0


def manifest_of(bundle: Path) -> BundleManifest:
    """The manifest, unverified."""
    return BundleManifest.parse((bundle / "bundle.json").read_bytes())


def visible(store: Path) -> list[str]:
    """What a reader of the store sees."""
    return sorted(p for p in os.listdir(store) if not p.startswith(".")) if store.exists() else []
