"""The command tree: everything it lists is there, it lists fast, and errors end in words and an exit code."""

import json
import subprocess
import sys
import time

import pytest
import typer
from forked_commands import forked
from typer.testing import CliRunner

from appliance.cli import app as tree
from appliance.cli.common import told


def atoll(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "appliance.cli", *arguments], capture_output=True, text=True)


NAMES = [*tree.COMMANDS, "version"]


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess]:
    """What each command says when it is asked for help."""
    modules = sorted({module for module, *_ in tree.COMMANDS.values()})
    done = forked([(name, "--help") for name in NAMES], tmp_path_factory.mktemp("helps"), *modules)
    return dict(zip(NAMES, done, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_command_explains_itself(helps: dict[str, subprocess.CompletedProcess], name: str):
    result = helps[name]
    assert result.returncode == 0, result.stderr
    assert "usage" in result.stdout.lower()


def test_help_lists_every_command_quickly():
    began = time.perf_counter()
    result = atoll("--help")
    spent = time.perf_counter() - began
    assert result.returncode == 0
    for name, group in {**tree.GROUP_OF, "version": "Develop"}.items():
        assert (f"\n  {name} " in result.stdout) == bool(group), "what only units start is not listed"
    assert spent < 5  # 0.3 s alone; tests may share the machine. What must hold is below: nothing heavy is imported.


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom appliance.cli.app import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "rooms = {'engine', 'fastapi', 'torch', 'cryptography', 'psutil'}\n"
        "print(sorted(rooms & {name.partition('.')[0] for name in sys.modules}), "
        "sorted(n for n in sys.modules if n.startswith(('installer.', 'offline_bundle.'))))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    words = [f"installer.base{module}" for module in ("", ".errors", ".i18n", ".layout")] + ["offline_bundle.text"]
    assert result.stdout.strip() == f"[] {words}", result.stdout + result.stderr


def test_no_arguments_and_no_terminal_name_the_command_line():
    result = atoll()
    assert result.returncode == 2
    assert "atoll checklist" in result.stderr


def test_an_unknown_command_is_a_usage_error():
    result = atoll("nonsense")
    assert result.returncode == 2
    assert "nonsense" in result.stderr


def test_version():
    assert atoll("--version").stdout.strip()
    facts = json.loads(atoll("version", "--json").stdout)
    assert {"atoll", "python", "torch"} <= facts.keys()


def test_serve_gets_its_arguments_untouched(monkeypatch: pytest.MonkeyPatch):
    """Within the tree too (a test or a completion script), `serve` parses its own flags, --help included."""
    seen: list[list[str]] = []
    from engine.server.cli import serve

    monkeypatch.setattr(serve, "main", lambda argv: seen.append(argv) or 3)
    result = CliRunner().invoke(tree.app, ["serve", "some/model", "--port", "1", "--help"])
    assert (result.exit_code, seen) == (3, [["some/model", "--port", "1", "--help"]])


class Refusal(Exception):
    message, hint, why, exit_code = "It was refused.", "Do this.", "Because.", 12


@pytest.mark.parametrize(("error", "code", "text"), [
    (Refusal(), 12, "error: It was refused.\n  Because.\n  Do this.\n"),
    (KeyboardInterrupt(), 130, "Interrupted."),
])  # fmt: skip
def test_errors_become_words_and_an_exit_code(monkeypatch, error: BaseException, code: int, text: str):
    failing = typer.Typer()

    @failing.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(tree, "load", lambda name: typer.main.get_command(failing))
    result = CliRunner().invoke(tree.app, ["stop"])
    assert result.exit_code == code
    assert text in result.stderr


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    failing = typer.Typer()

    @failing.command()
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(tree, "load", lambda name: typer.main.get_command(failing))
    assert isinstance(CliRunner().invoke(tree.app, ["stop"]).exception, ZeroDivisionError)


def test_a_reader_that_leaves_is_no_error():
    """`atoll status | head -1`: click ends such a command quietly, as long as no code of ours treats it as an error."""
    with pytest.raises(BrokenPipeError), told(False):
        raise BrokenPipeError
