"""Thread counts are the calling thread's own, and are given back."""

import threading

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
