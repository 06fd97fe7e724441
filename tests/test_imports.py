"""What a machine can check of docs/architecture.md: who imports whom, what nobody may call, what stays light."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
ROOMS = ("appliance", "engine", "installer", "offline_bundle", "tui")
SOURCES = sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))

# Below its server the engine must start fast and run wherever PyTorch runs.
ENGINE_LIBRARIES = {"engine", "numpy", "safetensors", "torch", "triton"}
TEXT_LIBRARIES = ENGINE_LIBRARIES | {"jinja2", "llguidance", "tokenizers"}
CORE_LIBRARIES = {"engine"}
LAZY_LIBRARIES = {"engine/llm.py": {"tqdm"}}  # inside functions, and for type checkers
OWN_RULES = ("engine/server/", "engine/bench/")

FORBIDDEN_MODULES = {"cloudpickle", "dill", "huggingface_hub", "jsonpickle", "marshal", "pickle", "shelve"}
FORBIDDEN_NAMES = {"eval", "exec", "__import__"}  # as bare calls: model.eval() is torch's, and harmless
FORBIDDEN_CALLS = {
    "torch.load", "torch.hub.load", "os.system", "os.popen", "tempfile.mktemp", "jinja2.Environment",
    "hf_hub_download", "snapshot_download", "marshal.load", "marshal.loads",
}  # fmt: skip
FORBIDDEN_ARGUMENTS = {("trust_remote_code", True), ("allow_pickle", True), ("shell", True), ("weights_only", False)}
WRITES_MARSHAL = {"offline_bundle/medium/code_tree/bytecode.py"}  # makes bytecode, and reads none
READS_WITH_TRANSFORMERS = {  # and engine/bench, whose baseline it is
    "appliance/demo/convert.py", "appliance/load/transformers_baseline.py",
}  # fmt: skip


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Every top-level package that `tree` imports, with whether importing the module imports it."""
    inner = {id(node) for scope in ast.walk(tree) if _runs_later(scope) for node in ast.walk(scope)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in names:
            yield name.split(".")[0], id(node) not in inner


def _runs_later(node: ast.AST) -> bool:
    """A function's body, or what only a type checker sees."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def outside_libraries(where: str, source: str) -> list[str]:
    """Packages that the engine's file `where` may not import."""
    if where.startswith("engine/core/"):
        allowed = CORE_LIBRARIES
    elif where.startswith("engine/text/"):
        allowed = TEXT_LIBRARIES
    else:
        allowed = ENGINE_LIBRARIES
    found = []
    for package, at_module_level in imports(ast.parse(source)):
        if package in allowed or package in sys.stdlib_module_names:
            continue
        if not at_module_level and package in LAZY_LIBRARIES.get(where, ()):
            continue
        found.append(package)
    return found


def dangers(where: str, source: str) -> list[str]:
    """What `source` does that nothing in this project may do."""
    tree = ast.parse(source)
    forbidden = FORBIDDEN_MODULES - {"marshal"} if where in WRITES_MARSHAL else FORBIDDEN_MODULES
    found = [f"imports {package}" for package, _ in imports(tree) if package in forbidden]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "jinja2":
            found += ["imports the unsandboxed jinja2.Environment"] * any(a.name == "Environment" for a in node.names)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if isinstance(node.func, ast.Name) and called in FORBIDDEN_NAMES:
            found.append(f"calls {called}() in line {node.lineno}")
        if called in FORBIDDEN_CALLS or called.split(".")[-1] in FORBIDDEN_CALLS:
            found.append(f"calls {called} in line {node.lineno}")
        if called.endswith(".from_pretrained") and not (
            where in READS_WITH_TRANSFORMERS or where.startswith("engine/bench/")
        ):
            found.append(f"calls {called} in line {node.lineno}")
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if (keyword.arg, value) in FORBIDDEN_ARGUMENTS and isinstance(value, bool):
                found.append(f"passes {keyword.arg}={value} in line {node.lineno}")
    return found


def test_rooms_import_only_downwards():
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-logo", "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_engine_below_its_server_needs_few_libraries():
    wrong = {}
    for path in SOURCES:
        where = path.relative_to(REPOSITORY).as_posix()
        if where.startswith("engine/") and not where.startswith(OWN_RULES):
            found = outside_libraries(where, path.read_text("utf-8"))
            if found:
                wrong[where] = found
    assert not wrong


def test_no_two_test_files_have_the_same_name():
    """Else pytest cannot load both in one run."""
    names = Counter(path.name for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_dangerous_is_called():
    wrong = {}
    for path in SOURCES:
        where = path.relative_to(REPOSITORY).as_posix()
        found = dangers(where, path.read_text("utf-8"))
        if found:
            wrong[where] = found
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "exec('1')",
        "AutoModel.from_pretrained('x')",
        "f(trust_remote_code=True)",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "from jinja2 import Environment",
        "from huggingface_hub import snapshot_download",
        "hub.snapshot_download('x')",
    ],
)
def test_the_check_for_dangers_sees_them(source: str):
    assert dangers("engine/example.py", source)


def test_the_check_for_dangers_lets_harmless_code_pass():
    source = "model.eval()\nevaluate('x')\nf(trust_remote_code=False)\nre.compile('x')\nfrom jinja2.sandbox import X"
    assert dangers("engine/example.py", source) == []


@pytest.mark.parametrize(
    ("where", "source", "found"),
    [
        ("engine/core/loop.py", "import torch", ["torch"]),
        ("engine/core/loop.py", "import heapq\nfrom engine.errors import AtollError", []),
        ("engine/worker/runner.py", "import torch, numpy\nfrom msgspec import Struct", ["msgspec"]),
        ("engine/layers/norm.py", "def f():\n    import transformers", ["transformers"]),
        ("engine/text/template.py", "import jinja2, tokenizers", []),
        ("engine/worker/runner.py", "import tokenizers", ["tokenizers"]),
        ("engine/llm.py", "def f():\n    import tqdm", []),
        ("engine/llm.py", "if TYPE_CHECKING:\n    import tqdm", []),
        ("engine/llm.py", "import tqdm", ["tqdm"]),
    ],
)
def test_the_check_for_libraries_sees_them(where: str, source: str, found: list[str]):
    assert outside_libraries(where, source) == found


LIGHT = ["appliance.cli", "appliance.cli.app", "appliance.cli.publish.bundle", "appliance.cli.publish.keys",
         "appliance.cli.install.install", "appliance.demo.run", "engine.core.loop", "engine.server.gateway.app",
         "engine.server.cli.serve", "installer", "offline_bundle"]  # fmt: skip


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_loads_no_tensor_library(module: str):
    """The gateway, the command line and the installer start in an instant and hold no gigabyte of libraries."""
    code = f"import sys, {module}\nprint([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["appliance.cli.install.install", "appliance.cli.install.preflight"])
def test_a_dry_run_needs_no_large_package(module: str):
    """From a medium it runs before packages of over 16 MiB are unpacked."""
    code = f"import sys, {module}\nprint([m for m in ('numpy', 'torch', 'triton') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
