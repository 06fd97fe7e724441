"""Words of libraries: still in their source, and Korean where an operator meets them."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from appliance.cli.language import library_words


@pytest.mark.parametrize(("words", "sources"), [
    (library_words.TYPER, Path(typer.__file__).parent.glob("*.py")),
    (library_words.TYPER_PLAIN, Path(typer.__file__).parent.rglob("*.py")),
    (library_words.ARGPARSE, [Path(argparse.__file__)]),
])  # fmt: skip
def test_what_is_listed_by_hand_stands_in_the_library(words: tuple[str, ...], sources: list[Path]) -> None:
    text = "\n".join(path.read_text("utf-8") for path in sources)
    assert [word for word in words if word not in text] == []


KOREAN = {
    "status a b": "쓸 수 없는 인자가 더 있습니다(a b)",
    "statuz": "'statuz' 명령은 없습니다. 혹시 'status',",
    "bundle bild": "'bild' 명령은 없습니다. 혹시 'build'입니까?",
    "bundle xyzzy": "'xyzzy' 명령은 없습니다.",
    "logs --unit": "'--unit' 옵션에는 값이 필요합니다.",
    "logs --nope": "--nope 옵션은 없습니다",
    "doctor --json=3": "'--json' 옵션에는 값을 주지 않습니다.",
    "doctor --time-limit 0": "'--time-limit'의 값이 잘못되었습니다: 1보다 작습니다",
    "doctor --time-limit x": "'--time-limit'의 값이 잘못되었습니다: 숫자가 아닙니다",
    "keys words": "인자 'HEX'이(가) 필요합니다.",
}


@pytest.mark.parametrize("line", KOREAN)
def test_a_wrong_command_line_is_refused_in_korean(line: str) -> None:
    environment = {**os.environ, "ATOLL_LANG": "ko", "COLUMNS": "120", "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "appliance.cli", *line.split()]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 2
    assert KOREAN[line] in done.stderr
