"""Triton's interpreter as these tests want it: exact where it rounds wrongly, and without doing the same work again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from remembered_types import remember_types

_DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def _as_float64(interpreter: Any, handle: Any) -> Any:
    """An operand's numbers; None for a type that NumPy has not."""
    if handle.dtype.primitive_bitwidth == 8 and handle.dtype.is_floating():
        half = interpreter.tl.float16
        return interpreter._convert_float(handle.data, handle.dtype, half, None).view(np.float16).astype(np.float64)
    return handle.data.astype(np.float64) if handle.data.dtype in (np.float16, np.float32) else None


def exact_products(setattr: Callable[[Any, str, Any], None] = setattr) -> None:
    """Products of matrices that do not depend on a row's place, as on a GPU. NumPy's library adds up the last
    rows of a matrix in another order than those before, on some CPUs: so sum in float64, and round once."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    original = builder.create_dot

    def create_dot(a, b, d, input_precision, max_num_imprecise_acc):
        wide = [_as_float64(interpreter, each) for each in (a, b)]
        if d.data.dtype != np.float32 or wide[0] is None or wide[1] is None:
            return original(a, b, d, input_precision, max_num_imprecise_acc)
        product = np.matmul(wide[0], wide[1])
        return interpreter.TensorHandle(product.astype(np.float32) + d.data, d.dtype.scalar)

    setattr(builder, "create_dot", create_dot)


def mend(setattr: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace functions of the interpreter, which must be loaded with TRITON_INTERPRET=1."""
    from triton.runtime import interpreter

    setattr(interpreter, "_convert_float", _converter(interpreter))
    setattr(interpreter, "_get_np_dtype", _dtypes(interpreter))
    setattr(interpreter, "_patch_lang", _patcher(interpreter))
    # Its check for overflows is one for eyes: without the language's debug option nothing looks at the result.
    without_checks = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    setattr(interpreter.interpreter_builder, "options", without_checks)
    remember_types(setattr)


def _converter(interpreter: Any) -> Callable:
    """Narrow numbers as the hardware does. The interpreter's own conversion loses the carry when a mantissa rounds up
    to the next power of two (127 becomes 64 in e4m3)."""
    original, nearest = interpreter._convert_float, interpreter._ir.ROUNDING_MODE.RTNE

    def convert(data, source, target, rounding):
        if source.name not in _DTYPES or target.name not in _DTYPES or rounding not in (None, nearest):
            return original(data, source, target, rounding)
        numbers = torch.frombuffer(bytearray(data.tobytes()), dtype=_DTYPES[source.name]).to(_DTYPES[target.name])
        return numbers.view(_BITS[numbers.element_size()]).numpy().reshape(data.shape)

    return convert


def _dtypes(interpreter: Any) -> Callable:
    """The interpreter writes its table of types anew at every operation."""
    original, tl = interpreter._get_np_dtype, interpreter.tl
    known: dict[str, Any] = {}

    def np_dtype(dtype):
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(element, tl.pointer_type):
            return original(element)
        if element.name not in known:
            known[element.name] = original(element)
        return known[element.name]

    return np_dtype


def _patcher(interpreter: Any) -> Callable:
    """The interpreter replaces the functions of triton.language for a launch, and again, to no effect, in every call of
    a kernel's helper: a third of the time. Once a launch is enough."""
    original, tl = interpreter._patch_lang, interpreter.tl
    patched: set[frozenset[int]] = set()
    languages: dict[Callable, frozenset[int]] = {}

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_lang(fn):
        if fn not in languages:
            values = fn.__globals__.values()
            languages[fn] = frozenset(id(value) for value in values if value is tl or value is tl.core)
        names, scope = languages[fn], Scope()
        if names not in patched:
            scope._changes = original(fn)._changes
            patched.add(names)
        return scope

    return patch_lang
