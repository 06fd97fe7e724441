"""An embedding as a client gets it: cut to the dimensions asked for, then brought to length 1.

In plain Python: the gateway, which does this, holds no tensor library. 4096 dimensions take half as long as their JSON.
"""

import math
from array import array


def finished(embedding: bytes, dimensions: int | None = None, *, normalize: bool = True) -> array:
    """What the engine sends (`StepOutput.embedding`) as float32 [dimensions]. `dimensions` None: all.

    A vector of zeros has no direction and stays as it is.
    """
    vector = array("f", embedding)[:dimensions]
    length = math.hypot(*vector) if normalize else 0.0
    return array("f", [x / length for x in vector]) if length else vector
