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

from engine.message import msg
from installer.base.i18n import DOMAIN, LOCALE_DIR, joined, language_of, plain, reason, speaking, t, told
from installer.base.messages import with_ids, without_ids
from offline_bundle.errors import BundleError

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("appliance", "engine", "installer", "offline_bundle", "tui")
PO = LOCALE_DIR / "ko/LC_MESSAGES/atoll.po"
MARKS = ("t", "msg", "foreign")
PASSED_ON = ("offline_bundle/text.py", "installer/base/messages.py", "engine/message.py")  # of texts marked elsewhere


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of t(…), msg(…) and foreign(…), also inside f-strings, and where it is."""
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
    """Everything in the catalogue: marked texts, and the paragraphs of `--help`."""
    return marked() | updater().help_paragraphs()


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
    """A missing name would raise while an error is being shown."""
    for where, node in calls():
        literal = node.args[0]
        if isinstance(literal, ast.Constant) and getattr(node.func, "id", "") in ("t", "msg"):
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
    assert told(t("'{text}' is not a waiver.", text="{x}"), "ko") == "'{x}'(으)로는 아무것도 면제되지 않습니다."


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


def test_what_is_written_down_keeps_its_ids() -> None:
    """In a journal: English for any reader, the id and its values beside it. An older release wrote English alone."""
    error = t("Could not {action}: {why}.", action=t("finish this command"), why=joined([t("the disk is full"), "/a"]))
    for message in (error, msg("The file {path} cannot be read: {why}.", path=Path("/x"), why=msg("yes"))):
        written = json.loads(json.dumps(with_ids({"n": 1, "error": message})))
        assert (written["n"], written["error"]) == (1, str(message))
        read = without_ids(written)
        assert read == {"n": 1, "error": message}
        assert told(read["error"], "ko") == told(message, "ko")
    old = without_ids({"n": 1, "error": str(error)})
    assert told(old["error"], "ko") == error


@pytest.mark.parametrize(
    ("value", "spoken"),
    [("8443", "8443이"), ("7442", "7442가"), ("모델", "모델이"), ("'서버'", "'서버'가"), ("qwen", "qwen이(가)")],
)
def test_particles_fit_what_they_follow(value: str, spoken: str) -> None:
    assert told(t("{where} is missing", where=value), "ko") == f"{spoken} 없습니다"


def test_the_domain_is_the_files_name() -> None:
    assert PO.stem == DOMAIN
