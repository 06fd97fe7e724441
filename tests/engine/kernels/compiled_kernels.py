"""Results of compiling the kernels, kept in git so that only changed kernels are compiled again.

By kernel, a line for each variant: its hash, then the bytes of shared memory, of stack for each thread, and of scratch.

    {"_add_kernel": {
    "0f3c…": [1024, 0, 0],
    …
"""

import ast
import hashlib
import json
from collections import defaultdict

import triton
from triton.runtime.jit import JITCallable

SAMPLE = 40  # each day, one in 40 unchanged variants is compiled again


def hash_of(kernel, line):
    """Identifies the machine code by what it is made from: the statements of the kernel and of the functions it calls,
    their constants, Triton's version, and the job (`compile_ahead.line_of`). Comments and line numbers do not count,
    unlike in Triton's own key. A change that this misses, such as an option of the launcher, shows in the sample."""
    text = "\n".join([triton.__version__, *sorted(_sources(kernel.jit, {}).values()), line])
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _sources(function, found):
    """The statements of a function and of ours that it calls, by name."""
    if function.fn.__qualname__ in found or function.fn.__module__.startswith("triton."):
        return found
    names = sorted({each.id for each in ast.walk(ast.parse(function.src)) if isinstance(each, ast.Name)})
    values = [(name, function.fn.__globals__[name]) for name in names if name in function.fn.__globals__]
    constants = [f"{name} = {getattr(value, 'value', value)!r}" for name, value in values if _is_constant(value)]
    found[function.fn.__qualname__] = "\n".join([ast.unparse(ast.parse(function.src)), *constants])
    for _, value in values:
        if isinstance(value, JITCallable):
            _sources(value, found)
    return found


def _is_constant(value):
    return isinstance(getattr(value, "value", value), int | float | str)


def is_due(key, day):
    return int(key, 16) % SAMPLE == day % SAMPLE


def read(path):
    """The results by hash."""
    if not path.exists():
        return {}
    return {key: result for each in json.loads(path.read_text("utf-8")).values() for key, result in each.items()}


def write(path, results):
    """`results`: hash -> the kernel's name and the result. A line each, so that a change shows only what changed."""
    by_kernel = defaultdict(list)
    for key, (name, result) in sorted(results.items()):
        by_kernel[name].append(f"{json.dumps(key)}: {json.dumps(result)}")
    kernels = [json.dumps(name) + ": {\n" + ",\n".join(lines) + "\n}" for name, lines in sorted(by_kernel.items())]
    new = path.with_suffix(".new")  # an interrupted write leaves the old file
    new.write_text("{" + ",\n".join(kernels) + "}\n", "utf-8")
    new.replace(path)
