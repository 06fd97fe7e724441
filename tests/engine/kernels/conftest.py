"""Triton's interpreter runs the kernels of this folder and its rooms on CPU tensors: slow, exact, and without a GPU.

Triton reads the variable when it is imported, so this comes before any test module. The interpreter wants float32 or
float16 here: its products of bfloat16 are wrong.
"""

import importlib.util
import os

import pytest
import torch
from forks import Forks

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*test_triton_*.py"]
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The interpreter is one thread of Python, and its small operations only wait for others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def compiling():
    """Runs Python in processes in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    forks = Forks(["list_steps", "engine.prebuild.__main__", "engine.selftest.run"], environment)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def interpreting():
    """Runs Python in processes in which Triton interprets."""
    forks = Forks(["run_steps", "engine.worker.device_runner"], dict(os.environ))
    yield forks
    forks.close()


@pytest.fixture(autouse=True, scope="session")
def mended_interpreter():
    if collect_ignore_glob:
        yield
        return
    from interpreter import mend

    with pytest.MonkeyPatch.context() as patch:
        mend(patch.setattr)
        yield
