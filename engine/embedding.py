"""An embedding as a client gets it: cut to the requested dimensions, then normalised to length 1.

In plain Python, because the gateway does this and loads no tensor library. 4096 dimensions take half as long as writing
their JSON.
"""

import math
from array import array


def finished(embedding: bytes, dimensions: int | None = None, *, normalize: bool = True) -> array:
    """`StepOutput.embedding` as float32 [dimensions]. `dimensions` None: all.

    A vector of zeros cannot be normalised and is not changed.
    """
    vector = array("f", embedding)[:dimensions]
    length = math.hypot(*vector) if normalize else 0.0
    return array("f", [x / length for x in vector]) if length else vector
