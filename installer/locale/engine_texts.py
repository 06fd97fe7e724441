"""What the engine's errors say, for the catalogue: their literals, found where they are raised.

The engine knows no catalogue, and its errors are plain English sentences that also cross a socket. So they are read out
of its source, an f-string as the sentence that `retold` recognises (installer/base/i18n.py), each value by what it is
called there:

    ConfigError(f"Cannot listen on {host}:{port}: {error.strerror}.", "--port", "Choose another …")
        →  "Cannot listen on {host}:{port}: {strerror}."    "Choose another …"
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ERRORS = {"ConfigError", "OutOfMemoryPlanError", "ModelError", "EngineFailedError", "HostMemoryError"}
OF_A_FLAG = "ArgumentTypeError"  # argparse puts the flag before it, FlagParser a full stop behind it
REASONS = re.compile("REFUSED_|ONLY_ONE")  # tables of flags and why they are refused
NOT_AT_A_START = {"bench", "tuning", "llm.py"}  # programs of their own


def engine_texts(engine: Path) -> dict[str, set[str]]:
    """Every sentence, and every phrase that is put into one, with the files that say it."""
    found: dict[str, set[str]] = {}
    for path in sorted(engine.rglob("*.py")):
        if NOT_AT_A_START.isdisjoint(path.relative_to(engine).parts):
            for text in sentences(ast.parse(path.read_text("utf-8"))):
                found.setdefault(text, set()).add(str(path.relative_to(engine.parent)))
    return found


def sentences(tree: ast.Module) -> Iterator[str]:
    """Those of one module, some more than once."""
    constants = _assigned(ast.iter_child_nodes(tree))
    for name, table in constants.items():
        if REASONS.match(name) and isinstance(table, ast.Dict):
            yield from (text for value in table.values for text in _texts(value, constants))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            known = constants | _assigned(ast.walk(function))
            for call in ast.walk(function):
                if isinstance(call, ast.Call):
                    yield from _raised(call, known)


def _raised(call: ast.Call, known: dict[str, ast.expr]) -> Iterator[str]:
    name = getattr(call.func, "id", "") or getattr(call.func, "attr", "")
    if name not in ERRORS and name != OF_A_FLAG:
        return
    for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
        for text in _texts(value, known):
            if "{" not in text or len(re.findall("[A-Za-z]", re.sub(r"\{\w+\}", "", text))) >= 5:  # what `retold` knows
                yield text if name in ERRORS else f"{{flag}}: {text}."


def _assigned(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """Names, and what they are given."""
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    return {node.targets[0].id: node.value for node in assignments if isinstance(node.targets[0], ast.Name)}


def _texts(node: ast.expr, known: dict[str, ast.expr]) -> Iterator[str]:
    """The sentences that `node` may be, and the phrases that are put into them; what is no words is left out."""
    match node:
        case ast.Constant(value=str(text)) if " " in text:
            yield _escaped(text)
        case ast.JoinedStr():
            yield _template(node)
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    yield from _texts(part.value, known)
        case ast.IfExp():
            yield from (*_texts(node.body, known), *_texts(node.orelse, known))
        case ast.BoolOp():
            yield from (text for value in node.values for text in _texts(value, known))
        case ast.Name(id=name) if name in known:
            yield from _texts(known[name], {other: value for other, value in known.items() if other != name})


def _template(sentence: ast.JoinedStr) -> str:
    """With names in braces; values without words between them are one."""
    said, names = "", set()
    for part in sentence.values:
        if isinstance(part, ast.Constant):
            said += _escaped(str(part.value))
        elif isinstance(part, ast.FormattedValue) and not said.endswith("}"):
            name = base = _name(part.value) or "value"
            for number in range(2, len(names) + 2):
                name = f"{base}_{number}" if name in names else name
            names.add(name)
            said += f"{{{name}}}"
    return said


def _name(node: ast.expr) -> str:
    """What a value is called: its variable, field or key, whatever is done with it; "" if it has no name."""
    match node:
        case ast.Name(id="str"):
            return ""
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name.strip("_").lower()
        case ast.Subscript(value=inner) | ast.BinOp(left=inner) | ast.BoolOp(values=[inner, *_]):
            return _name(inner)
        case ast.Call(func=func, args=args):
            owner = func.value if isinstance(func, ast.Attribute) else func
            return next(filter(None, map(_name, args)), "") or _name(owner)
    return ""


def _escaped(text: str) -> str:
    return re.sub(r"[{}]", r"\g<0>\g<0>", text)
