"""The catalogue: every text has its Korean, with the same placeholders, and what ships is what was written."""

import ast
import copy
import gettext
import json
import string
from pathlib import Path

import pytest

from installer.i18n import DOMAIN, LOCALE_DIR, joined, language_of, t, told

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("appliance/cli", "installer", "tui")
PO = LOCALE_DIR / "ko/LC_MESSAGES/atoll.po"


def texts() -> set[str]:
    """The literals of all calls of t(…), also inside f-strings."""
    found = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "t" and node.args:
                    literal = node.args[0]
                    assert isinstance(literal, ast.Constant), f"{path}:{node.lineno}: t() needs a literal"
                    found.add(literal.value)
    return found


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


def test_babel_finds_the_same_texts() -> None:
    pytest.importorskip("babel")
    import sys

    sys.path.insert(0, str(LOCALE_DIR))
    try:
        from update import extracted  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    assert {message.id for message in extracted() if message.id} == texts()


# -- texts


def test_a_text_is_english_and_knows_its_korean() -> None:
    seen = t("{number} is in use by {who}", number=8443, who=t("process {pid} ({name})", pid=7, name="x"))
    assert seen == "8443 is in use by process 7 (x)"
    assert seen.to("ko") == "8443번을 쓰는 쪽: 프로세스 7(x)"
    assert joined([t("none"), "plain"]).to("ko") == "없음, plain"
    assert told("plain", "ko") == "plain"
    assert json.dumps({"a": seen}) == '{"a": "8443 is in use by process 7 (x)"}'
    assert type(copy.deepcopy(seen)) is str


def test_braces_in_values_stay() -> None:
    assert t("'{text}' waives nothing.", text="{x}").to("ko") == "'{x}'(으)로는 아무것도 면제되지 않습니다."


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


def test_the_domain_is_the_files_name() -> None:
    assert PO.stem == DOMAIN
