"""Thread counts are the calling thread's own, and are given back."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from engine.kernels.runtime.cpu_threads import gemm_threads, num_threads


def test_the_callers_number_comes_back_and_other_threads_keep_theirs() -> None:
    before = torch.get_num_threads()
    elsewhere: list[int] = []
    with num_threads(before + 3):
        assert torch.get_num_threads() == before + 3
        with num_threads(1):
            assert torch.get_num_threads() == 1
            thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert torch.get_num_threads() == before + 3
    assert torch.get_num_threads() == before
    assert elsewhere == [before]


def test_a_gemm_gets_the_team_only_if_the_others_take_over_enough() -> None:
    smollm, llama_8b = 576 * 3072, 4096 * 14336
    assert gemm_threads(2, smollm, rows=1) == 1
    assert gemm_threads(2, smollm, rows=64) == 2
    assert gemm_threads(2, llama_8b, rows=1) == 2
    assert gemm_threads(1, llama_8b, rows=64) == 1


IN_MKL = """
import torch
from engine.kernels.runtime.cpu_threads import num_threads

def mkl() -> int:
    line, = [line for line in torch.__config__.parallel_info().splitlines() if "mkl_get_max_threads" in line]
    return int(line.rpartition(":")[2])

torch.set_num_threads(2)
with num_threads(1):
    inside = mkl()
    with num_threads(2):
        deeper = mkl()
print(inside, deeper, mkl())
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this PyTorch has no MKL")
def test_mkl_keeps_to_it_even_if_somebody_gave_it_a_number_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", IN_MKL], env={**os.environ, "OMP_NUM_THREADS": "2"},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.split() == ["1", "2", "2"]
