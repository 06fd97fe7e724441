"""The demonstration: the whole path from a model to a streamed answer, on one machine without a GPU."""
