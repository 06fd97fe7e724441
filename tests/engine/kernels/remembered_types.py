"""What Triton's interpreter finds out about types, remembered: describing types and shapes anew at each operation took
two thirds of its time. Values are computed as before, and what does not fit together is refused as before.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

SetAttr = Callable[[Any, str, Any], None]


def remember_types(setattr: SetAttr) -> None:
    """Replace functions of the language, in a process whose kernels run in the interpreter."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    setattr(core, "_unwrap_if_constexpr", _unwrapper(core))
    setattr(core.dtype, "__eq__", _same_or(core.dtype.__eq__))
    setattr(core.block_type, "__eq__", _same_or(core.block_type.__eq__))
    setattr(core.dtype, "is_int", _among(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES))
    setattr(core.dtype, "is_floating", _among(core.dtype.FP_TYPES))
    setattr(interpreter, "_patch_attr", _patch_attr(interpreter))
    _remember_shapes(core, interpreter, semantic.TritonSemantic, setattr)


def _unwrapper(core: Any) -> Callable:
    """Most of what is asked about is no constant and no list."""
    original, constexpr = core._unwrap_if_constexpr, core.constexpr
    lists = (list, tuple, core.tuple)

    def unwrap(value):
        if type(value) is constexpr:
            return value.value
        return original(value) if isinstance(value, lists) else value

    return unwrap


def _same_or(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def _among(names: list[str]) -> Callable[[Any], bool]:
    known = frozenset(names)
    return lambda self: self.name in known


def _patch_attr(interpreter: Any) -> Callable:
    """A function of the language, called at once with the interpreter's semantics instead of through two others."""

    def patch(obj, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)

        def call(*args, _semantic=None, **kwargs):
            return function(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

        scope.set_attr(obj, name, call)

    return patch


class Shape:
    """What blocks of a shape have in common."""

    def __init__(self, core: Any, sizes: tuple[int, ...], of_type: Any, numel: int) -> None:
        self.sizes, self.of_type = sizes, of_type
        self.of_tensor = core.tuple([core.constexpr(size) for size in sizes])
        self.numel = core.constexpr(numel)
        self.types: dict[tuple, Any] = {}  # of such blocks, by what is in them
        self.beside: dict[Shape, Shape] = {}  # another shape -> that of an operation on both


def _remember_shapes(core: Any, interpreter: Any, semantic: Any, setattr: SetAttr) -> None:
    block_type, tensor, unwrap = core.block_type, core.tensor, core._unwrap_if_constexpr
    new_type, new_broadcast, new_cast = block_type.__init__, semantic.broadcast_impl_value, semantic.cast
    scalar = Shape(core, (), None, 1)
    shapes: dict[tuple[int, ...], Shape] = {}

    def key_of(element):
        return element.name, element.address_space if element.is_ptr() else None

    def fill(self, element, shape):
        sizes = tuple([unwrap(size) for size in unwrap(shape)])
        known, key = shapes.get(sizes), key_of(element)
        if known is None or key not in known.types:
            new_type(self, element, shape)
            if known is None:
                known = shapes[sizes] = Shape(core, sizes, self.shape, self.numel)
            self.shape, self.remembered = known.of_type, known
            known.types[key] = self
        self.__dict__ = known.types[key].__dict__

    def of_shape(shape, element):
        found = shape.types.get(key_of(element))
        return block_type(element, list(shape.sizes)) if found is None else found

    def fill_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = type.remembered if type.is_block() else scalar
        self.shape, self.numel = shape.of_tensor, shape.numel

    def splat(value, shape):
        data = np.full(shape.sizes, value.handle.data, interpreter._get_np_dtype(value.dtype))
        return tensor(interpreter.TensorHandle(data, value.dtype), of_shape(shape, value.dtype))

    def cast(self, value, wanted, *rounding, **options):
        return value if value.dtype is wanted.scalar else new_cast(self, value, wanted, *rounding, **options)

    def broadcast(self, lhs, rhs):
        if lhs.shape is rhs.shape:  # two scalars, or blocks of one shape
            return lhs, rhs
        if not rhs.type.is_block():
            return lhs, splat(rhs, lhs.type.remembered)
        if not lhs.type.is_block():
            return splat(lhs, rhs.type.remembered), rhs
        first, second = lhs.type.remembered, rhs.type.remembered
        shape = first.beside.get(second)
        if shape is None:
            found = new_broadcast(self, lhs, rhs)
            if len(first.sizes) == len(second.sizes):
                first.beside[second] = found[0].type.remembered
            return found
        return tuple([
            each if each.type.remembered is shape else
            tensor(self.builder.create_broadcast(each.handle, shape.sizes), of_shape(shape, each.dtype))
            for each in (lhs, rhs)
        ])  # fmt: skip

    setattr(block_type, "__init__", fill)
    setattr(block_type, "with_element_ty", lambda self, element: of_shape(self.remembered, element))
    setattr(tensor, "__init__", fill_tensor)
    setattr(semantic, "broadcast_impl_value", broadcast)
    setattr(semantic, "cast", cast)
