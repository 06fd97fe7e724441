"""Counters in GPU memory, by which the programs of a kernel learn which of them arrives last."""

import torch


def counters(device: torch.device, count: int) -> torch.Tensor:
    """Zeros for a kernel that counts with them and leaves them at zero. They are kept for as long as the process lives.

    Raises RuntimeError while a graph is recorded. Made then, they would be zero only once that graph has run, and a
    kernel of another graph might wait for ever. Whoever records runs the step first, and records it again
    (worker/cuda_graphs.py).
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():  # kernels may only be listed here
        raise RuntimeError("counters cannot be made while a graph is recorded")
    return torch.zeros(count, dtype=torch.int32, device=device)
