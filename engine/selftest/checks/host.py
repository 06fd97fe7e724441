"""Rows that a kernel reads from host memory over the bus (Gemma 4's per-layer embeddings): compared bit for bit."""

from engine.kernels.pointwise import reference as pointwise_reference
from engine.kernels.runtime import host_memory
from engine.selftest.checks.check import Check, Side
from engine.selftest.compare import Result, exact


def rows(side: Side) -> list[Result]:
    """Rows of a table in page-locked memory; in GPU memory if the driver cannot lock any, as in the engine."""
    values, ids = side.randn(300, 8960).cpu(), side.randint(300, 40).long()
    if side.is_reference:
        return [exact(pointwise_reference.gather_rows(values, ids, 16.0))]
    from engine.kernels.pointwise.host_rows import gather_rows

    table = host_memory.empty(tuple(values.shape), values.dtype)
    table.copy_(values)
    if side.device.type == "cuda" and not side.dry:
        try:
            host_memory.lock(table)
        except host_memory.HostMemoryError:
            table = table.to(side.device)
    with side.clock():
        out = gather_rows(table, ids, 16.0)
    return [exact(out)]


CHECKS = [Check("rows out of host memory", rows)]
