"""Texts for people are marked: a literal in these rooms that reads like a sentence is passed to t(…), or is of a kind
that is never translated, listed here with the reason."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("appliance/cli", "appliance/load", "appliance/service", "installer", "offline_bundle")

NOT_FOR_THE_SCREEN = {
    "installer/gpu/": "what the driver says, as it says it",
    "installer/operate/boot_recovery.py": "a unit's words, for the journal",
    "installer/support/items.py": "what is in the archive, for support",
    "installer/support/redact.py": "patterns",
    "installer/release/release.py": "scripts",
    "installer/locale/": "for developers",
    "offline_bundle/runtime/licenses.py": "files of a medium",
    "offline_bundle/medium/": "has words of its own (language.py), tested in tests/offline_bundle",
    "offline_bundle/signing/hash_words.py": "a list of words",
    "appliance/service/jobs/guard.py": "a unit's words, for the journal",
    "appliance/service/verification/conformance.py": "what the endpoint is asked",
    "appliance/service/verification/quality.py": "what the model is asked",
    "appliance/service/verification/report/": "HTML and SVG; their texts are marked",
    "appliance/service/report_page.py": "HTML and CSS",
    "appliance/cli/language/library_words.py": "what libraries say, marked by foreign()",
}
# Calls whose arguments are no messages: patterns, commands, records, types; and typer's, which the help is made from.
NO_MESSAGES = {
    "t", "foreign", "Option", "Argument", "Typer", "command", "examples", "_about", "Field", "StringConstraints",
    "compile", "sub", "match", "fullmatch", "Popen", "startswith", "check", "gpu_check", "_text", "InstallLock",
    "Events",
}  # fmt: skip
RECORDS = {"audit", "journal", "history"}  # what is written down stays English
KEPT = {
    "install.sh (SHA-256)",                    # a label of two names
    "refusing to remove …: not below …",       # a bug's
    "It is not a regular file",                # in an OSError that is told by its number
    "ECC, remapped rows, kernel log",          # evidence
    "… -q -d PCIE  # seat the card anew, or use another slot",  # a command and its comment
    "User-Agent: atoll-bench", "Content-Type: application/json\r\nContent-Length: …\r\n",  # headers
    "Accept-Encoding: identity\r\n",
    "it is too short to measure",              # caught again in the same module
    "tune reset", "pilot stop", "pilot sign",  # a job's command
    "not required",                            # as approvals.json has it
    "HTTP … with a body that is not JSON.", "No answer within … seconds.",  # in a file that programs read
    "3 days ago",                              # as journalctl reads it
    r"satisfies the requirement torch[^ ]* \(from versions: ([^)]*)\)",  # a pattern
}
CONSTANTS = re.compile(r"_?(HELP|EXIT_CODES|EPILOG|INSTALL|UPGRADE|DRAIN|ROLLBACK|UNINSTALL|LANGUAGE_FLAG|TEMPLATE|"
                       r"COMMANDS|GROUPS|FORMAT|HEADER|SERVER_HEADER|PROMPT|START|FIRST|SAID|REASON|ENGINE_SAYS)\Z")
SHOWN = {  # call → positions and keywords of what it tells a person
    "InstallError": ((0,), ("why", "changed", "hint")), "BundleError": ((0, 1), ("message", "hint")),
    "say": ((0,), ()), "note": ((0,), ()), "agrees": ((0,), ()), "_usage": ((0, 1), ()), "_refused": ((0, 1, 2), ()),
    "io_error": ((0,), ()), "prompt": ((0,), ()), "confirm": ((0,), ()), "warn": ((0,), ()), "error": ((0,), ()),
}  # fmt: skip
SENTENCE = re.compile(r"[A-Za-z]{2,}[,;:']? [a-z(]")
COMMAND = re.compile(r"\s*(atoll|sudo|systemctl|journalctl|nvidia-smi|ls|mv|rm|df|du|dd|ip|kill|docker|dmesg|reboot|"
                     r"modprobe|timedatectl|hostnamectl|openssl|apt-get|apt-mark|mount|tune2fs|restorecon|echo|ps|"
                     r"fapolicyd-cli|nvidia|bold|import|tls|journal)\b|\s*(--|\[|#|curl,|Debian,|Red |/)")


def literals() -> Iterator[tuple[str, str]]:
    """Where a literal is that should have been marked, and what it says."""
    for path in sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not name.startswith(tuple(NOT_FOR_THE_SCREEN)):
            for line, text in unmarked(path.read_text("utf-8")):
                yield f"{name}:{line}", text


def unmarked(source: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    above = {below: node for node in ast.walk(tree) for below in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        text = _text(node)
        if text is None or isinstance(above.get(node), ast.JoinedStr | ast.Expr) or COMMAND.match(text):
            continue
        if not re.search(r"[A-Za-z]{2}", text) or text in KEPT or _harmless(node, above):
            continue
        if _shown(node, above) or SENTENCE.search(text):
            yield node.lineno, text  # type: ignore[attr-defined]


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def _name(call: ast.Call) -> str:
    return getattr(call.func, "id", "") or getattr(call.func, "attr", "")


def _harmless(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    while node in above:
        below, node = node, above[node]
        match node:
            case ast.Call() if _name(node) in NO_MESSAGES:
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner))) if owner in RECORDS:
                return True
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=owner))) if owner in RECORDS:
                return True
            case ast.keyword(arg="help" | "epilog" | "metavar" | "show_default" | "command" | "description" | "prog"):
                return True
            case ast.Assign(targets=[ast.Name(id=name)]) if CONSTANTS.match(name):
                return True
            case ast.AnnAssign(target=ast.Name(id=name)) if CONSTANTS.match(name):
                return True
            case ast.Compare() | ast.Assert() | ast.Subscript():
                return True
            case ast.Dict() if below in node.keys:
                return True
            case ast.FunctionDef(returns=given) if given is below:
                return True
            case ast.Raise(exc=ast.Call(func=ast.Name(id="TypeError" | "RuntimeError" | "AttributeError"))):
                return True
    return False


def _shown(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """Passed to a call that shows it, directly or through a conditional."""
    below = node
    while isinstance(above.get(below), ast.IfExp | ast.BinOp):
        below = above[below]
    at = above.get(below)
    if isinstance(at, ast.keyword):
        call = above.get(at)
        return isinstance(call, ast.Call) and at.arg in SHOWN.get(_name(call), ((), ()))[1]
    if isinstance(at, ast.Call) and at is not below:
        return any(i < len(at.args) and at.args[i] is below for i in SHOWN.get(_name(at), ((), ()))[0])
    return False


def test_every_sentence_is_marked() -> None:
    found = [f"{where}: {text}" for where, text in literals()]
    assert not found, "give these to t(…):\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        'raise InstallError("Gone.")',
        'raise InstallError(f"{path}", hint="Look there.")',
        'say("Stopped." if changed else t("The service was not running."))',
        'return f"{name} is not there"',
        'problem = "it is too large"',
    ],
)
def test_what_is_not_marked_is_found(source: str) -> None:
    assert list(unmarked(source))


@pytest.mark.parametrize(
    "source",
    ['say(t("It stopped here."))', 'run("systemctl stop it now")', '"""A docstring about this."""', 'x == "a b c"'],
)
def test_what_needs_no_mark_is_left(source: str) -> None:
    assert not list(unmarked(source))
