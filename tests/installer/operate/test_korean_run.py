"""An installation's life as a Korean operator sees it: every screen is Korean; none is where Hangul cannot be shown.

Commands, paths, names and what the service itself logs stay as they are; anything else that reads like an English
sentence is a text that nobody marked.
"""

import functools
import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from installer_kit import FAKE_SERVE, Site
from rich.cells import cell_len
from rich.console import Console
from server_kit import Server
from typer.testing import CliRunner

from appliance.cli.app import app
from appliance.cli.common import print_error, say_rows
from appliance.cli.install import install as install_command
from appliance.cli.view.install_view import Terminal, print_plan, print_result
from engine.server.settings.help_parser import wrapped
from installer.base.errors import InstallError
from installer.base.i18n import language_of, t
from installer.decide.plan import Plan
from installer.operate.install import Installer
from offline_bundle.signing.hash_words import EVEN_WORDS, ODD_WORDS
from offline_bundle.signing.keys import KeyPair

Bundles = Callable[..., Path]

KOREAN = {"LANG": "ko_KR.UTF-8", "LC_ALL": "", "LC_MESSAGES": "", "TERM": "xterm", "ATOLL_LANG": "", "COLUMNS": "200"}
KEPT = re.compile(
    r"""
    `[^`]*`                                        # quoted commands
    | \b(?:sudo\ )?atoll(?:\ [\w./\[\]=|-]+)*      # commands of ours, and their arguments in Latin
    | (?:https?:|/)[^\s가-힣()]*                    # addresses and paths
    | '[^']*'                                      # values as they were given
    | --[\w-]+(?:[ =][A-Z@\[\]\w]+)?               # flags
    | \b[\w.-]*[\d_][\w.-]*                        # names with digits
    | \b(?:df|tar|chmod|mv|ls|dmesg|systemctl|journalctl|openssl)\b(?:\ [-\w./]+)*
    | ("[^"]*")                                    # answers of the scripted server
    | \b(?:PEM|FILE|MEDIUM|DIR)\b
    """,
    re.VERBOSE,
)
SENTENCE = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z]{2,}){2,}")


HASH_WORDS = {*EVEN_WORDS, *ODD_WORDS}  # a hash that is read aloud is the same in every language


def english(screen: str) -> list[str]:
    """What reads like English on it."""
    lines = [line for line in screen.splitlines() if not set(line.split()) <= HASH_WORDS]
    return [line for line in lines if SENTENCE.search(KEPT.sub("@", line))]


def test_english_is_found() -> None:
    assert english("설치했습니다\nThe service was not running.\n") == ["The service was not running."]
    assert not english("다음: atoll status --prefix /tmp/a · atoll logs\n서명된 `atoll install MEDIUM`\n")


@pytest.fixture
def atoll(site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The `atoll` command as its own program would run it, with the scripted server as what it installs."""
    serve = (sys.executable, "-S", "-E", str(FAKE_SERVE), "good")
    monkeypatch.setattr(install_command, "Installer", functools.partial(Installer, release_command=serve))

    def run(*words: str, code: int = 0, **environment: str) -> str:
        result = CliRunner().invoke(app, list(words), env={**KOREAN, "ATOLL_PREFIX": str(site.prefix), **environment})
        assert result.exit_code == code, result.output
        return result.output

    return run


def life(atoll: Callable[..., str], site: Site, bundle: Bundles, signer: KeyPair, room: Path) -> Iterator[str]:
    """Every screen from the first look to the last word."""
    given = ["--trust-key", str(signer.public_path), "--port", str(site.port), "--yes-nothing-else",
             "--accept-license", _licence(bundle()), "--device", "cpu"]  # fmt: skip
    yield atoll("status", code=2)
    yield atoll("upgrade", str(bundle()), code=2)
    yield atoll("install", code=2)
    yield atoll("install", str(room / "nothing"), *given, code=13)
    yield atoll("install", str(bundle()), *given[:-4], "--device", "cpu", "--yes-nothing-else", code=20)
    yield atoll("install", str(bundle()), *given, "--dry-run")
    yield atoll("install", str(bundle()), *given)
    yield atoll("install", str(bundle()), *given)
    yield atoll("status")
    yield atoll("install", str(bundle(2)), *given, "--accept-license", _licence(bundle(2)))
    yield atoll("install", str(bundle(1)), *given, code=12)
    yield atoll("rollback", "--dry-run")
    yield atoll("rollback", "--yes")
    yield atoll("verify")
    yield atoll("status")
    yield atoll("apikey", "new", "--name", "team")
    yield atoll("apikey", "list")
    yield atoll("apikey", "revoke", "team")
    yield atoll("apikey", "revoke", "nobody", code=2)
    yield atoll("apikey", "new", "--name", "x", "--expires", "soon", code=2)
    yield atoll("apikey", "new", "--name", "x", "--scope", "everything", code=2)
    yield atoll("tls", "show", code=2)
    yield atoll("tls", "import", "--cert", str(signer.public_path), "--key", str(signer.private_path), code=2)
    yield atoll("support-bundle", "--list")
    yield atoll("support-bundle", "--out", str(room / "support.tar.gz"))
    yield atoll("support-bundle", "--out", str(room / "support.tar.gz"), code=2)
    yield atoll("logs", "--unit", "nothing", code=2)
    yield atoll("stop")
    yield atoll("stop")
    yield atoll("status", code=40)
    yield atoll("start")
    yield atoll("restart")
    yield atoll("journal", "check")
    yield atoll("journal", "repair")
    yield atoll("uninstall", code=2)
    yield atoll("uninstall", "--purge", code=2)
    yield atoll("uninstall", "--yes")
    yield atoll("uninstall", "--purge", "--yes-purge", "another", code=2)


def _licence(bundle: Path) -> str:
    from offline_bundle import inspect_bundle

    terms = inspect_bundle(bundle).manifest.license
    return f"{terms.spdx}@{terms.sha256[:12]}"


def test_a_whole_life_in_korean(
    atoll: Callable[..., str], site: Site, bundle: Bundles, signer: KeyPair, tmp_path: Path
) -> None:
    seen = ""
    for screen in life(atoll, site, bundle, signer, tmp_path):
        assert english(screen) == [], screen
        assert re.search("[가-힣]", screen), screen
        seen += screen
    for word in ("설치했습니다", "서비스 중", "되돌렸습니다", "모두 서명된 그대로입니다", "제거했습니다", "사전 점검"):
        assert word in seen, word


def test_the_vendors_side_in_korean(
    atoll: Callable[..., str], bundle: Bundles, signer: KeyPair, tmp_path: Path
) -> None:
    public = str(signer.public_path)
    other = tmp_path / "keys"
    screens = [
        atoll("keys", "new", "--dir", str(other), "--name", "a"),
        atoll("keys", "new", "--dir", str(other), "--name", "a", code=2),
        atoll("keys", "fingerprint", str(signer.private_path), code=10),
        atoll("bundle", "inspect", str(bundle())),
        atoll("bundle", "inspect", str(tmp_path), code=13),
        atoll("bundle", "verify", str(bundle()), "--key", public),
        atoll("bundle", "verify", str(bundle()), "--key", str(other / "a.pub"), code=10),
        atoll("bundle", "build", "--key", str(signer.private_path), "--sequence", "1", code=2),
        atoll("bundle", "build", str(tmp_path), "--key", str(signer.private_path), "--sequence", "1", "--version", "1",
              "--license", "MIT", "--source-repo", "a", "--source-revision", "b", "--license-file", public, code=2),
    ]  # fmt: skip
    for screen in screens:
        assert english(screen) == [], screen


def test_wrong_words_are_told_in_korean(atoll: Callable[..., str], tmp_path: Path) -> None:
    answers = tmp_path / "answers.toml"
    answers.write_text('schema_version = 1\nprot = 8443\nport = "x"\nstrict = 3\n[[models]]\ngpus = [99]\n')
    screens = [
        atoll("answers", "validate", str(answers), code=2),
        atoll("answers", "validate", str(tmp_path / "none.toml"), code=2),
        atoll("install", "--gpus", "0", "--bundle", "a", "--bundle", "b", code=2),
        atoll("install", "--port", "99999", code=2),
        atoll("install", "--bogus", code=2),
        atoll("bogus", code=2),
        atoll("apikey", "revoke", code=2),
        atoll("preflight", "--waive", "x", code=2),
    ]
    for screen in screens:
        assert [line for line in english(screen) if "사용법: " not in line] == [], screen


@pytest.mark.parametrize("name", ["install", "rollback", "status", "tls", "apikey", "keys", "bundle", "verify", "logs",
                                  "settle"])
def test_help_is_korean(atoll: Callable[..., str], name: str) -> None:
    screen = atoll(name, "--help")
    assert len(re.findall("[가-힣]", screen)) > 60
    assert english(re.sub(r"^사용법: .*$|\[[^\]]*\]", " ", screen, flags=re.MULTILINE)) == [], screen


@pytest.mark.parametrize("name", ["serve", "engine", "gateway", "gpu-ready"])
@pytest.mark.parametrize("asked", [["--help"], ["-h", "--lang", "ko"]])
def test_help_of_a_command_with_its_own_parser_is_korean(name: str, asked: list[str]) -> None:
    """As its own program: `serve` begins before the command tree is imported."""
    environment = {**os.environ, **KOREAN, "LANG": "ko_KR.UTF-8" if asked == ["--help"] else "C.UTF-8", "COLUMNS": "80"}
    command = [sys.executable, "-m", "appliance.cli", name, *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert len(re.findall("[가-힣]", done.stdout)) > 60
    to_type = re.compile(r"^(?: {2,}\S+ = .*| {2}(?:atoll|-).*?(?= {2}|$))|\[[^\]]*\]|MODEL_DIR.*", re.MULTILINE)
    assert english(to_type.sub(" ", done.stdout)) == [], done.stdout
    assert done.stdout.startswith("사용법: ")
    assert "\n  --lang [ko|en]" in done.stdout
    assert [line for line in done.stdout.splitlines() if cell_len(line) > 80] == []


def test_their_help_is_english_elsewhere(atoll: Callable[..., str]) -> None:
    done = subprocess.run([sys.executable, "-m", "appliance.cli", "serve", "--help", "--lang=en"],
                          env={**os.environ, **KOREAN}, capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.startswith("usage: atoll serve MODEL_DIR [flags]")
    assert not re.search("[가-힣]", done.stdout)


@pytest.mark.parametrize("text, lines", [
    ("one two three", ["one two", "three"]), ("가나 다라 마바", ["가나", "다라", "마바"]), ("", []),
    ("extraordinary it is", ["extraordinary", "it is"]),
])  # fmt: skip
def test_lines_are_broken_by_cells(text: str, lines: list[str]) -> None:
    assert wrapped(text, 8).splitlines() == lines


def test_the_system_form_in_korean(
    server: Server, bundle: Bundles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in KOREAN.items():
        monkeypatch.setenv(name, value)

    def told(*bundles: Path, **options: Any) -> str:
        try:
            with Terminal(server.layout.prefix, to_stderr=False) as terminal:
                words = {"systemd": "부팅하지 않은 루트"}
                result = server.install(*bundles, witness=terminal, confirmed=True, waivers=words, **options)
            print_result(result, server.layout, False)
        except InstallError as error:
            print_error(error)
        shown = capsys.readouterr()
        return shown.out + shown.err

    licences = [_licence(bundle()), _licence(bundle(2))]
    screens = [
        told(bundle(), accept_licenses=licences),
        told(bundle(2), accept_licenses=licences, mode="bad"),
        told(bundle(2), accept_licenses=licences, mode="mute"),
        told(bundle(2), accept_licenses=licences),
    ]
    for screen in screens:
        kept = [line for line in screen.splitlines() if not line.startswith("    ")]  # the end of the service's log
        assert english("\n".join(kept)) == [], screen


def test_columns_stay_aligned(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_LANG", "ko")
    say_rows([(t("endpoint"), "@1"), ("GPU", "@2"), (t("key"), "@3")], width=8)
    plan = Plan("1-a", None)
    plan.add("directory", "/p/@1", "create")
    plan.add("symlink", "/p/@2", "restart", 4096)
    plan.add("user", "@3", "keep")
    print_plan(plan, Console(soft_wrap=True), Path("/p"))
    rows, listed = capsys.readouterr().out.split("계획")
    for screen in (rows, listed):
        places = {cell_len(line.partition("@")[0]) for line in screen.splitlines() if "@" in line}
        assert len(places) == 1, screen


def test_questions_are_korean(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "appliance.cli", "rollback", "--prefix", str(tmp_path), "--lang", "ko"]
    asked = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    os.write(ours, b"n\n")
    said, _ = asked.communicate(timeout=120)
    os.close(theirs)
    os.close(ours)
    assert "직전 릴리스로 되돌리시겠습니까? [y/N]" in said
    assert "'아니요'라고 답했습니다." in said
    assert asked.returncode == 2


# -- where Hangul cannot be shown -------------------------------------------------------------------------------------


def test_the_linux_console_gets_english_unless_korean_is_asked_for(atoll: Callable[..., str]) -> None:
    assert not re.search("[가-힣]", atoll("status", code=2, TERM="linux"))
    assert re.search("[가-힣]", atoll("status", "--lang", "ko", code=2, TERM="linux"))
    assert re.search("[가-힣]", atoll("--lang=ko", "status", code=2, LANG="C"))
    assert not re.search("[가-힣]", atoll("status", "--lang", "en", code=2))
    assert "--lang" in atoll("status", "--lang", "tlh", code=2)


@pytest.mark.parametrize("words", [["status"], ["--lang", "ko", "status"], ["--help"]])
def test_an_ascii_terminal_gets_no_mojibake_and_no_traceback(words: list[str], tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LANG": "ko_KR.UTF-8", "PYTHONIOENCODING": "ascii",
                   "ATOLL_PREFIX": str(tmp_path / "none")}  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "appliance.cli", *words], env=environment, capture_output=True)
    assert done.returncode in (0, 2)
    assert b"Traceback" not in done.stderr
    assert (done.stdout + done.stderr).isascii()
    if "--lang" not in words:
        assert b"?" not in done.stderr + done.stdout


def test_a_unit_writes_english_into_the_journal(tmp_path: Path) -> None:
    """systemd gives units the system's LANG; logs stay English whatever that is."""
    with (tmp_path / "journal").open("wb") as journal:
        info = os.fstat(journal.fileno())
        environment = {"PATH": "/usr/bin:/bin", "LANG": "ko_KR.UTF-8", "ATOLL_PREFIX": str(tmp_path / "none")}
        for stream in (f"{info.st_dev}:{info.st_ino}", "1:2"):
            given = {**environment, "JOURNAL_STREAM": stream}
            subprocess.run([sys.executable, "-m", "appliance.cli", "verify"], env=given, stdout=journal, stderr=journal)
    said = (tmp_path / "journal").read_text()
    assert said.startswith("error: There is no Atoll installation")
    assert "Atoll이 설치되어 있지 않습니다" in said  # inherited by a shell, it says nothing of this terminal


def test_a_stream_that_cannot_carry_hangul_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KOREAN.items():
        monkeypatch.setenv(name, value)
    assert language_of() == "ko"
    for encoding, language in (("utf-8", "ko"), ("euc-kr", "ko"), ("cp949", "ko"), ("ascii", "en"), ("latin-1", "en")):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert language_of() == language, encoding
