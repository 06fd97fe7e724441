"""Lets the code of a start run on a machine without a GPU, to record which kernels it would launch.

Tensors stay in host memory and say that they are on the GPU. Operations on large ones only give results of the right
shape: a model of 60 GB takes no memory, for nothing ever writes to it. Small ones are really computed, since the host
may read them.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from engine.kernels.runtime.gpu_target import Target

GPU = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_LARGE = 1 << 18  # bytes
_INDICES = (torch.int32, torch.int64)  # hardly ever of weights, so small enough to be set to zero
_MAY_NAME_A_DEVICE = (torch.device, tuple, list, dict)  # most calls have only tensors and numbers
_FACTORIES = ("zeros", "ones", "full", "arange", "randn", "rand")


@contextlib.contextmanager
def without_gpu(target: Target) -> Iterator[None]:
    """Inside, `GPU` is a device like `target`, of which torch can be asked what a start asks."""
    properties = SimpleNamespace(
        major=target.capability[0], minor=target.capability[1], multi_processor_count=target.multiprocessors,
        shared_memory_per_block_optin=target.shared_memory, name=target.name, is_integrated=0,
    )  # fmt: skip
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, query=lambda: True)
    answers = {
        "get_device_properties": lambda _=None: properties, "get_device_capability": lambda _=None: target.capability,
        "get_device_name": lambda _=None: target.name, "current_device": lambda: 0, "Event": lambda *_, **__: event,
        "synchronize": lambda _=None: None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(_SaysGpu())
        stack.enter_context(_ShapesOnly())
        yield


class _SaysGpu(TorchFunctionMode):
    """Calls that name the GPU get host memory; tensors say that they are on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not args[0].is_meta
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            found = func(*args)
            return GPU if found == _HOST else found
        if func == torch.Tensor.pin_memory:
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if any(isinstance(value, _MAY_NAME_A_DEVICE) for value in (*args, *kwargs.values())):
            args, kwargs = tree_map_only(torch.device, _here, (args, kwargs))
        return func(*args, **kwargs)


class _ShapesOnly(TorchDispatchMode):
    """Does not compute what is large."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
        if func.is_view or any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if not tensors and func.overloadpacket.__name__ not in _FACTORIES:
            return _small(func, args, kwargs)
        if tensors and all(tensor.nbytes <= _LARGE for tensor in tensors):
            with contextlib.suppress(IndexError):  # an index that a kernel would have written
                return _small(func, args, kwargs)
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        return _shaped(func, args, kwargs, tensors)


def _small(func: Any, args: Any, kwargs: Any) -> Any:
    found = func(*args, **kwargs)
    if "empty" in func.overloadpacket.__name__ and isinstance(found, torch.Tensor) and found.nbytes <= _LARGE:
        found.zero_()  # the host may take what a kernel would have written there for an index
    return found


def _shaped(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
    """Results of the right shapes, without content."""
    copies = {id(tensor): _on_meta(tensor) for tensor in tensors}
    back = {id(copy): tensor for tensor, copy in zip(tensors, copies.values(), strict=False)}
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: copies[id(tensor)], (args, kwargs))
    if not tensors or "device" in kwargs:
        kwargs = kwargs | {"device": torch.device("meta")}
    found = func(*args, **kwargs)

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in back:  # it works in place
            return back[id(value)]
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_HOST)
        return made.zero_() if made.nbytes <= _LARGE or made.dtype in _INDICES else made

    return tree_map(given, found)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _here(device: torch.device) -> torch.device:
    return _HOST if device.type == "cuda" else device
