"""Triton's interpreter runs the kernels of this folder on CPU tensors: slow, exact, and without a GPU.

Triton reads the variable when it is imported, so this comes before any test module. The interpreter wants float32 or
float16 here: its products of bfloat16 are wrong.
"""

import importlib.util
import os

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]
os.environ["TRITON_INTERPRET"] = "1"
