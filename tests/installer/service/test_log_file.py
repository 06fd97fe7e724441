"""The log of a service under a prefix: what programs read in it."""

import json
import logging

import pytest

from engine.errors import ConfigError, ModelError, OutOfMemoryPlanError, log_fields
from engine.server.process.logs import JsonFormatter, TextFormatter
from installer.service.log_file import error_id


def record(error: Exception) -> logging.LogRecord:
    return logging.getLogger("atoll.engine").makeRecord(
        "atoll.engine", logging.ERROR, "", 0, "%s", (error,), None, extra=log_fields(error)
    )


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter(False)])
@pytest.mark.parametrize("error, expected", [
    (OutOfMemoryPlanError("The model does not fit."), "out-of-memory"),
    (MemoryError(), "out-of-memory"),
    (ConfigError("A flag cannot be honoured."), "settings"),
    (ModelError("A file is damaged."), "model"),
    (RuntimeError("out of memory, says somebody else"), ""),
])  # fmt: skip
def test_the_id_of_an_error_is_found_in_the_log(formatter: logging.Formatter, error: Exception, expected: str) -> None:
    line = formatter.format(record(error))
    assert error_id(["before", line, json.dumps({"level": "info", "message": "stopped"}), "{cut off"]) == expected


def test_the_last_error_counts_and_a_message_is_not_a_field() -> None:
    lines = [json.dumps({"message": "a", "error_id": "model"}), json.dumps({"message": "b", "error_id": "settings"})]
    assert error_id(lines) == "settings"
    assert error_id([json.dumps({"message": "the model is called x error_id=model"})]) == ""
    assert error_id([]) == ""
