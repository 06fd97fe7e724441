"""Embedding tables that stay in host memory, from which the GPU reads the rows it needs: --per-layer-embeddings.

For each token, Gemma 4 E2B and E4B look up a row in a table of 4.7 or 5.6 GB, half of all their weights. If the table
is on the host, that much more GPU memory is left for pages; reading a row over the bus takes less than half a
microsecond.

    keep_tables   before loading: is there room on the host?    else they stay on the GPU, and the log says why
    lock_tables   after loading: page-lock them for the GPU     else they move there, if they fit
"""

import logging

import torch
from torch import nn

from engine.config import EngineConfig
from engine.core.kv.planner import gib
from engine.errors import ConfigError, OutOfMemoryPlanError
from engine.kernels.runtime.host_memory import HostMemoryError, lock
from engine.message import msg
from engine.models.base import CausalLM
from engine.worker.startup.host import host_memory
from engine.worker.startup.memory import host_bytes

log = logging.getLogger(__name__)

FLAG = "--per-layer-embeddings"
_RESERVE = 4 << 30  # host memory left to the engine (PyTorch, CUDA, running compilers) and the rest of the machine
_WAYS = msg("Free host memory (a unit's MemoryMax= counts too), or use {flag} gpu.", flag=FLAG)


def keep_tables(model: CausalLM, config: EngineConfig, device: torch.device) -> None:
    """Give the tables host memory if asked to, or by default if possible and worthwhile. Raises ConfigError if
    `--per-layer-embeddings host` is impossible."""
    wanted, tables = config.per_layer_embeddings, model.lookup_tables()
    if not tables:
        if wanted != "auto":
            log.info("%s %s changes nothing: the model has no such embeddings.", FLAG, wanted)
        return
    if wanted == "gpu" or (wanted == "auto" and _shares_memory(device)):
        return
    size = sum(table.weight.nbytes for table in tables)
    problem = _lack_of_memory(size)
    try:
        for table in tables if problem is None else ():
            table.keep_on_host()
    except HostMemoryError as error:
        problem = error.args[0]
    if problem is None:
        return
    if wanted == "host":
        raise ConfigError(msg("{flag} host: {size} cannot be kept in host memory: {problem}.", flag=FLAG,
                              size=gib(size), problem=problem), FLAG, _WAYS)
    log.warning("Per-layer embeddings take %s of the GPU's memory: on the host, %s.", gib(size), problem)


def lock_tables(model: CausalLM, config: EngineConfig, device: torch.device) -> None:
    """Make the tables that were kept on the host readable by the GPU; if that fails, move them to the GPU.

    Raises ConfigError if they were asked to stay, OutOfMemoryPlanError if they do not fit.
    """
    size = host_bytes(model)
    try:
        for table in model.lookup_tables():
            if table.on_host:
                lock(table.weight)
        return
    except HostMemoryError as error:
        reason = error.args[0]
    if config.per_layer_embeddings == "host":
        raise ConfigError(msg("{flag} host: {size} of host memory cannot be locked for {device}: {reason}.",
                              flag=FLAG, size=gib(size), device=device, reason=reason), FLAG,
                          msg("Use {flag} gpu, or leave the flag out.", flag=FLAG))  # fmt: skip
    log.warning("Per-layer embeddings take %s of the GPU's memory: the host's cannot be locked, %s.", gib(size), reason)
    try:
        for table in model.lookup_tables():
            if table.on_host:
                table.weight = nn.Parameter(table.weight.to(device), requires_grad=False)
                table.on_host = False
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        raise OutOfMemoryPlanError(
            msg("The per-layer embeddings ({size}) fit nowhere: host memory cannot be locked for the GPU ({reason}), "
                "and {free} of the {total} on {device} are free.", size=gib(size), reason=reason, free=gib(free),
                total=gib(total), device=device), FLAG,
            msg("Free memory on the GPU, or find the driver's fault with atoll doctor."),
        ) from None  # fmt: skip


def _lack_of_memory(size: int) -> str | None:
    """Why a table of this size cannot be kept on the host; None if it can."""
    _, available = host_memory()
    if available >= size + _RESERVE:
        return None
    return msg("{available} are available, and {size} with {reserve} to spare are needed", available=gib(available),
               size=gib(size), reserve=gib(_RESERVE))


def _shares_memory(device: torch.device) -> bool:
    """Whether GPU and host share one memory, so that offloading saves nothing."""
    return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", 0))
