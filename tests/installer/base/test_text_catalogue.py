"""The catalogue: every text has its Korean, with the same placeholders, and what ships is what was written."""

import ast
import copy
import errno
import gettext
import importlib
import json
import os
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from installer.base.i18n import DOMAIN, LOCALE_DIR, joined, language_of, plain, reason, retold, speaking, t, told
from offline_bundle.errors import BundleError

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("appliance/cli", "appliance/load", "appliance/service", "installer", "offline_bundle", "tui")
PO = LOCALE_DIR / "ko/LC_MESSAGES/atoll.po"
MARKS = ("t", "foreign")
PASSED_ON = ("offline_bundle/text.py", "installer/base/i18n.py")  # of texts marked elsewhere


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of t(…) and foreign(…), also inside f-strings, and where it is."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MARKS and node.args:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def marked() -> set[str]:
    """The literals of all these calls."""
    found = set()
    for where, node in calls():
        literal = node.args[0]
        if not isinstance(literal, ast.Constant) and where.startswith(PASSED_ON):
            continue
        assert isinstance(literal, ast.Constant), f"{where}: t() needs a literal"
        found.add(literal.value)
    return found


def texts() -> set[str]:
    """All that the catalogue is for: what is marked, the engine's errors, and the paragraphs of `--help`."""
    return marked() | engine_errors() | updater().help_paragraphs()


def engine_errors() -> set[str]:
    return set(updater("engine_texts").engine_texts(ROOT / "engine"))


def updater(name: str = "update") -> Any:
    """installer/locale/update.py; it needs Babel, which a machine without the developer's tools lacks."""
    pytest.importorskip("babel")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(LOCALE_DIR))
        return importlib.import_module(name)


def fields(text: str) -> list[str]:
    return sorted(name for _, name, _, _ in string.Formatter().parse(text) if name is not None)


def korean() -> dict[str, str]:
    catalogue = gettext.GNUTranslations((LOCALE_DIR / "ko/LC_MESSAGES/atoll.mo").open("rb"))
    return {key: value for key, value in catalogue._catalog.items() if key}  # type: ignore[attr-defined]


def test_every_text_has_its_korean() -> None:
    missing = texts() - korean().keys()
    assert not missing, f"run installer/locale/update.py and translate: {sorted(missing)}"


def test_nothing_is_translated_that_nobody_says() -> None:
    assert not korean().keys() - texts(), "run installer/locale/update.py"


def test_placeholders_are_the_same() -> None:
    for source, translation in korean().items():
        assert translation.strip(), source
        assert fields(source) == fields(translation), source


def test_every_sentence_is_given_its_values() -> None:
    """A name that is missing would raise while an error is being told."""
    for where, node in calls():
        literal = node.args[0]
        if isinstance(literal, ast.Constant) and getattr(node.func, "id", "") == "t":
            given = {keyword.arg for keyword in node.keywords}
            if None not in given:  # **values
                assert given == set(fields(literal.value)), where


def test_what_is_compiled_is_what_is_written() -> None:
    written: dict[str, str] = {}
    key, field = "", ""
    for line in [*PO.read_text("utf-8").splitlines(), 'msgid ""']:
        for name in ("msgid", "msgstr"):
            if line.startswith(f"{name} "):
                key = "" if name == "msgid" else key
                field, line = name, line.removeprefix(f"{name} ")
                if name == "msgstr":
                    written[key] = ""
        if line.startswith('"'):
            part = ast.literal_eval(line)
            if field == "msgid":
                key += part
            else:
                written[key] += part
    written.pop("")
    assert written == korean(), "run installer/locale/update.py"


def test_the_developers_tool_finds_the_same_texts() -> None:
    assert {message.id for message in updater().extracted() if message.id} == texts()


# -- texts


def test_a_text_is_english_and_knows_its_korean() -> None:
    seen = t("{number} is in use by {who}", number=8443, who=t("process {pid} ({name})", pid=7, name="x"))
    assert seen == "8443 is in use by process 7 (x)"
    assert told(seen, "ko") == "8443번을 쓰는 쪽: 프로세스 7(x)"
    assert told(joined([t("none"), "plain"]), "ko") == "없음, plain"
    assert told("plain", "ko") == "plain"
    assert json.dumps({"a": seen}) == '{"a": "8443 is in use by process 7 (x)"}'
    assert type(copy.deepcopy(seen)) is str


def test_braces_in_values_stay() -> None:
    assert told(t("'{text}' waives nothing.", text="{x}"), "ko") == "'{x}'(으)로는 아무것도 면제되지 않습니다."


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({"LANG": "ko_KR.UTF-8"}, "ko"),
        ({"LANG": "en_US.UTF-8"}, "en"),
        ({"LANG": "ko_KR.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "C.UTF-8", "LC_MESSAGES": "ko_KR"}, "ko"),
        ({}, "en"),
    ],
)
def test_the_language_of_the_environment(environment: dict[str, str], language: str) -> None:
    assert language_of(environment) == language


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({"LANG": "ko_KR.UTF-8", "TERM": "linux"}, "en"),  # the console of a server room draws no Hangul
        ({"LANG": "ko_KR.UTF-8", "TERM": "linux", "ATOLL_LANG": "ko"}, "ko"),
        ({"LANG": "ko_KR.UTF-8", "ATOLL_LANG": "en"}, "en"),
        ({"LANG": "en_US.UTF-8", "ATOLL_LANG": "ko"}, "ko"),
        ({"LANG": "ko_KR.UTF-8", "ATOLL_LANG": "tlh"}, "ko"),
    ],
)
def test_what_was_asked_for_goes_before_what_the_terminal_is(environment: dict[str, str], language: str) -> None:
    assert language_of(environment) == language


def test_a_choice_lasts_as_long_as_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_LANG", raising=False)
    with speaking("ko"):
        with speaking("en"):
            assert language_of() == "en"
        assert language_of() == "ko"
    assert "ATOLL_LANG" not in os.environ


def test_an_exception_is_told_by_what_it_was_made_with() -> None:
    inner = ValueError(t("true or false"))
    assert told(t("{where}: {wanted}", where="a", wanted=inner), "ko") == "a: true 또는 false"
    assert str(t("{where}: {wanted}", where="a", wanted=inner)) == "a: true or false"
    assert plain(inner) is inner.args[0]
    assert plain(ValueError("as it is")) == "as it is"
    error = BundleError(t("{path} is not a directory.", path="/x"), t("Give the bundle's directory."))
    assert told(t("{where}: {wanted}", where="a", wanted=error), "ko") == (
        "a: /x: 디렉터리가 아닙니다. 번들의 디렉터리를 주십시오."
    )


def test_what_the_system_says_is_known_or_left() -> None:
    assert reason(OSError(errno.ENOENT, os.strerror(errno.ENOENT))) == os.strerror(errno.ENOENT)
    assert told(reason(OSError(errno.EACCES, "Permission denied")), "ko") == "권한이 없습니다"
    assert reason(OSError(errno.EDEADLK, "Resource deadlock avoided")) == "Resource deadlock avoided"
    assert reason(OSError("no number")) == "no number"


@pytest.mark.parametrize(
    ("english", "korean"),
    [
        ("The file model/x is missing.", "파일이 없습니다: model/x."),
        (
            "Could not finish this command (/a/b): the disk is full.",
            "이 명령 실행에 실패했습니다(/a/b): 디스크가 가득 찼습니다.",
        ),
        ("/store has 1,024 bytes free; the bundle needs 2,048.", "/store의 여유는 1,024바이트이며"),
        ("Nobody here ever says this.", "Nobody here ever says this."),
        ("", ""),
    ],
)
def test_what_was_written_down_is_told_again(english: str, korean: str) -> None:
    assert told(retold(english), "ko").startswith(korean)
    assert str(retold(english)) == english


@pytest.mark.parametrize(
    ("value", "spoken"),
    [("8443", "8443이"), ("7442", "7442가"), ("모델", "모델이"), ("'서버'", "'서버'가"), ("qwen", "qwen이(가)")],
)
def test_particles_fit_what_they_follow(value: str, spoken: str) -> None:
    assert told(t("{where} is missing", where=value), "ko") == f"{spoken} 없습니다"


def test_the_domain_is_the_files_name() -> None:
    assert PO.stem == DOMAIN


def test_an_engines_error_is_found_with_what_it_is_put_together_from() -> None:
    source = '''
WAYS = f"Use {FLAG} gpu."
REFUSED_VALUES = {"x": "that is too old."}
def check(path, error, where):
    where = "a CPU" if path else "more than one GPU"
    raise ConfigError(f"Cannot split {path.parent} {{over}} {where}{more}: {error.strerror}.", "--flag", WAYS)
    raise ConfigError(f"--host {path}: {error}.")
    raise ValueError("This is a bug.")
    raise ArgumentTypeError(f"{text!r} is too long")
'''
    assert set(updater("engine_texts").sentences(ast.parse(source))) == {
        "Cannot split {parent} {{over}} {where}: {strerror}.", "Use {flag} gpu.", "that is too old.", "a CPU",
        "more than one GPU", "{flag}: {text} is too long.",
    }  # fmt: skip


def test_of_two_readings_the_one_is_told_that_leaves_less_unread() -> None:
    """The last placeholder of a sentence could swallow the next sentence, and a sum its terms."""
    said = "Cannot listen on 127.0.0.1:80: Permission denied. Choose another with --port, or stop what uses it."
    assert told(retold(said), "ko") == (
        "127.0.0.1:80에서 수신할 수 없습니다: 권한이 없습니다. "
        "--port로 다른 포트를 고르거나, 그 포트를 쓰는 프로그램을 멈추십시오."
    )
    assert told(retold("weights 1.5 GiB + activations 12.0 MiB"), "ko") == "가중치 1.5 GiB + 활성값 12.0 MiB"
    assert retold("Nobody here ever says this. Choose another.") == "Nobody here ever says this. Choose another."
