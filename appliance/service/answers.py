"""The answers of a checklist: those of an install, and one table for each step that asks for more.

What a run has decided is written back, so that the next machine, or the next run, needs nobody at the keyboard.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import BaseModel, ValidationError, create_model

from appliance.service.steps import STEPS
from installer.base import fs
from installer.base.errors import ExitCode, InstallError, usage_error
from installer.base.i18n import joined, t
from installer.decide.answers import Answers, problems, read_answers

_TABLES: dict[str, Any] = {
    name: (model, model()) for step in STEPS for name, model in step.tables().items()
}
ChecklistAnswers: type[Answers] = create_model("ChecklistAnswers", __base__=Answers, **_TABLES)


def read(path: Path) -> Answers:
    """Read and check a checklist's answers. Raises InstallError (usage) that names what is wrong."""
    return read_answers(path, ChecklistAnswers)


def empty() -> Answers:
    return ChecklistAnswers(schema_version=1)


def from_json(values: dict[str, Any]) -> Answers:
    try:
        return ChecklistAnswers.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise InstallError(
            t("The checklist's recorded answers cannot be read."),
            exit_code=ExitCode.IO,
            why=str(error),
            hint=t("Give them again: atoll checklist run --answers FILE"),
        ) from error


def checked(values: dict[str, Any]) -> Answers:
    """Answers that a person has just given. Raises InstallError (usage) that names what is wrong."""
    try:
        return ChecklistAnswers.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise usage_error(joined(problems(error, ChecklistAnswers), "; ")) from None


def merged(answers: Answers, learned: dict[str, Any]) -> Answers:
    """The answers with what a run has learned on top; tables and lists are extended."""
    return from_json(_over(to_json(answers), learned))


def _over(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{name: _over(below.get(name), value) for name, value in above.items()}}
    if isinstance(below, list) and isinstance(above, list):
        return [*below, *(entry for entry in above if entry not in below)]
    return above


def to_json(answers: BaseModel) -> dict[str, Any]:
    """Only what was set: no defaults, no nulls."""
    return _said(answers.model_dump(mode="json", exclude_defaults=True)) | {"schema_version": 1}


def _said(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _said(entry) for name, entry in value.items() if entry is not None}
    return [_said(entry) for entry in value] if isinstance(value, list) else value


def text_of(answers: BaseModel) -> str:
    """The answers as a TOML file."""
    return tomlkit.dumps(to_json(answers))


def write_back(path: Path, answers: BaseModel) -> None:
    """Add to the operator's file what it does not contain yet; comments and order stay. Raises OSError."""
    values = to_json(answers)
    if path.suffix == ".json":
        fs.write_atomic(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n", _mode(path))
        return
    document = tomlkit.document()
    with contextlib.suppress(FileNotFoundError):
        document = tomlkit.parse(path.read_text("utf-8"))
    before = tomlkit.dumps(document)
    _put(document, values)
    after = tomlkit.dumps(document)
    if after != before:
        fs.write_atomic(path, after, _mode(path))


def _put(table: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(table.get(name), dict):
            _put(table[name], value)
        elif table.get(name) != value:
            table[name] = value


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return 0o600
