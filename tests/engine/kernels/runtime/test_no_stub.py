"""No C stub of Triton is shipped or built: whoever would ask for one is found in the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[4] / "engine"
SOURCES = sorted(path for path in ENGINE.rglob("*.py") if "triton" in path.read_text())
LAUNCHER = "kernels/runtime/launcher.py"

# triton.runtime.driver (and what starts kernels by it: autotuning, benchmarks, `kernel[grid]`) builds C at run time.
MODULES = {
    "triton", "triton.language", "triton.language.extra.cuda", "triton.backends.compiler", "triton.compiler",
    "triton.compiler.compiler",
    "triton.runtime.jit", "triton.runtime.cache", "triton.experimental", "triton.experimental.gluon",
    "triton.experimental.gluon._runtime", "triton.experimental.gluon.language.nvidia.hopper",
}  # fmt: skip
NAMES = {"jit", "cdiv", "next_power_of_2", "compile", "knobs", "language", "__version__", "__file__"}


def trespasses(where: str, source: str) -> Iterator[str]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("triton") and a.name not in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton"):
            if node.module not in MODULES or node.module == "triton":
                yield str(node.module)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "triton":
            if node.attr not in NAMES:
                yield f"triton.{node.attr}"
        elif isinstance(node, ast.Call) and _starts_a_kernel(node.func) and where != LAUNCHER:
            yield ast.unparse(node.func)


def _starts_a_kernel(function: ast.expr) -> bool:
    """`add_kernel[grid]`, which goes by way of Triton's driver."""
    return isinstance(function, ast.Subscript) and "kernel" in ast.unparse(function.value)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ENGINE).as_posix())
def test_nothing_asks_triton_for_its_driver(path: Path) -> None:
    assert list(trespasses(path.relative_to(ENGINE).as_posix(), path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "from triton.runtime import driver", "import triton.testing", "triton.runtime.driver.active",
        "triton.autotune()", "from triton.backends.nvidia import driver", "add_kernel[grid](x)",
    ],
)  # fmt: skip
def test_the_rule_sees_it(source: str) -> None:
    assert list(trespasses("worker/x.py", source))


def test_the_launcher_starts_kernels_by_triton_in_its_interpreter_only() -> None:
    tree = ast.parse((ENGINE / LAUNCHER).read_text())
    started = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
    guarded = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "_INTERPRET"
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Subscript)
    ]
    assert len(started) == len(guarded) == 1
