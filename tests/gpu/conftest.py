"""Without a GPU nothing here is collected: importing these tests would load Triton before the tests of kernels have
chosen its interpreter (tests/engine/kernels/conftest.py)."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_gpu_*.py"]
