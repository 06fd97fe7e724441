"""install.sh speaks Korean to a Korean operator, from its first line on, and English where Hangul cannot be shown."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest
from runtime_kit import Installed, install

from installer.base.i18n import LOCALE_DIR
from offline_bundle.medium import korean
from offline_bundle.medium.language import speaks_korean
from offline_bundle.medium.scripts import install_script, part_paths
from offline_bundle.signing.keys import KeyPair

ENGLISH = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z]{2,}){2,}")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "install.sh"
    path.write_bytes(install_script())
    return path


def run(script: Path, *words: str, **environment: str) -> str:
    done = subprocess.run(
        ["/bin/sh", str(script), *words], env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"LANG": "ko_KR.UTF-8"}, []),
        ({"LANG": "C", "ATOLL_LANG": "ko"}, []),
        ({"LANG": "C.UTF-8"}, ["--lang", "ko"]),
        ({"LANG": "ko_KR.UTF-8", "TERM": "linux"}, ["--lang=ko"]),
    ],
)
def test_errors_and_help_are_korean(environment: dict[str, str], words: list[str], script: Path) -> None:
    said = run(script, "--verify-only", *words, **environment)
    assert "runtime이 없습니다" in said
    assert "디스크가 마운트되어 있습니까?" in said
    assert not ENGLISH.search(said.replace(str(script.parent), ""))
    assert "이 매체에서 Atoll을 설치합니다." in run(script, "--help", *words, **environment)
    assert "지문은 16진수 64자리 또는" in run(script, "--verify-only", "--fingerprint", "abc", *words, **environment)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"LANG": "en_US.UTF-8"}, []),
        ({"LANG": "ko_KR.UTF-8", "LC_ALL": "C.UTF-8"}, []),
        ({"LANG": "ko_KR.UTF-8", "TERM": "linux"}, []),
        ({"LANG": "ko_KR.UTF-8"}, ["--lang", "en"]),
    ],
)
def test_else_they_are_english(environment: dict[str, str], words: list[str], script: Path) -> None:
    said = run(script, "--verify-only", *words, **environment)
    assert said.isascii()
    assert "error: There is no" in said


def test_the_shell_part_too(script: Path) -> None:
    assert "동작하는 Python 3.11 이상이 없습니다" in run(script, "--python", "/nowhere", LANG="ko_KR.UTF-8")
    assert "There is no working Python 3.11" in run(script, "--python", "/nowhere", LANG="ko_KR.UTF-8", TERM="linux")


def test_a_stream_that_cannot_carry_hangul_decides() -> None:
    system = {"LANG": "ko_KR.UTF-8"}
    assert speaks_korean(system, [], ["utf-8", "utf-8"])
    assert speaks_korean(system, [], [None])
    assert not speaks_korean(system, [], ["utf-8", "ascii"])
    assert speaks_korean({"LANG": "C"}, ["install.sh", "--lang", "ko"], ["ascii"])


def test_a_medium_is_checked_in_korean(medium: Path, bare: Path, vendor: KeyPair) -> None:
    checked = install(medium, bare, "--verify-only", "--trust-key", vendor.public_path, language="ko_KR.UTF-8")
    assert checked.returncode == 0, checked.stderr
    assert "모두 서명된 그대로입니다" in checked.stderr


def test_a_medium_is_unpacked_in_korean(installation: Installed) -> None:
    assert "코드를 설치했습니다" in installation.said
    for line in installation.said.splitlines():
        assert not ENGLISH.search(re.sub(r"(atoll [\w ./\[\]=-]+|[\w.-]*/[\w./-]+)", "", line)), line


def test_what_it_says_is_what_the_catalogue_says() -> None:
    pytest.importorskip("babel")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(LOCALE_DIR))
        update = importlib.import_module("update")
    catalogue = update.current(LOCALE_DIR / "ko/LC_MESSAGES/atoll.po", "ko")
    assert Path(korean.__file__).read_text("utf-8") == update.words_of_install_sh(catalogue, "ko")
    said = set().union(*(update.literals(path) for path in part_paths()))
    assert said <= korean.KOREAN.keys(), "run installer/locale/update.py"
