"""A stub for PyTorch in processes that import kernels only to compile them: PyTorch itself takes two to four seconds.

Kernels only use Triton; their modules mention PyTorch in the functions that launch them, in annotations and in tables
of dtypes. So the stub only has names: each name always gives the same object, different names different ones. Calling
such an object, deriving a class from it, or importing a module that is not listed here is an error.
"""

import sys
from types import ModuleType

_MODULES = ("torch", "torch.nn", "torch.nn.functional")


class _Name:
    """Stands for `torch.Tensor` and the like. `|` only has to work, for annotations: nobody evaluates the result."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> "_Name":
        if name.startswith("__"):  # Python itself looks up special names and acts on them: the stub must not have any
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
        self.__path__ = []  # a package without submodules


def stand_in() -> None:
    """From now on, make `import torch` give the stub, unless PyTorch is already loaded."""
    if "torch" in sys.modules:
        return
    for name in _MODULES:
        sys.modules[name] = _Module(name)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, sys.modules[name])
