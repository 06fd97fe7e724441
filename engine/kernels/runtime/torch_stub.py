"""A stand-in for PyTorch, where a process imports kernels only to compile them: it is there in no time, PyTorch itself
in two to four seconds.

What a kernel computes is Triton's alone; its module names PyTorch for the function that starts it, in annotations and
in tables of dtypes. So the stand-in has names and nothing else: each is an object of its own, the same each time, equal
to no other. To call one, to derive a class from one, or to import a module that is not listed here is an error.
"""

import sys
from types import ModuleType

_MODULES = ("torch", "torch.nn", "torch.nn.functional")


class _Name:
    """`torch.Tensor` and the like; what `x: torch.Tensor | None` means nobody asks."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> "_Name":
        if name.startswith("__"):  # what Python asks an object for means something: there is no such thing here
            raise AttributeError(f"{self.__name__} stands in for PyTorch's and has no {name}")
        found = _Name(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found

    def __or__(self, other: object) -> "_Name":
        return self

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<no {self.__name__}>"


class _Module(_Name, ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package, of which nothing more can be found


def stand_in() -> None:
    """From now on `import torch` gives the stand-in, unless PyTorch was loaded before."""
    if "torch" in sys.modules:
        return
    for name in _MODULES:
        sys.modules[name] = _Module(name)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, sys.modules[name])
