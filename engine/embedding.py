"""An embedding as a client gets it: cut to the dimensions asked for, then brought to length 1."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def finished(embedding: bytes, dimensions: int | None = None, *, normalize: bool = True) -> "np.ndarray":
    """What the engine sends (`StepOutput.embedding`) as float32 [dimensions]. `dimensions` None: all.

    A vector of zeros has no direction and stays as it is.
    """
    import numpy as np  # the gateway starts without it

    vector = np.frombuffer(embedding, "<f4")[:dimensions]
    length = float(np.linalg.norm(vector.astype(np.float64))) if normalize else 0.0
    return (vector / length).astype(np.float32) if length else vector.astype(np.float32)
