"""The request of a checklist run."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class RunRequest(BaseModel):
    """`steps`: run exactly these, even if they are done; empty: run all from the first that is not done. The run writes
    its decisions back into `answers_file`."""

    model_config = ConfigDict(frozen=True)

    answers: dict[str, Any]
    steps: tuple[str, ...] = ()
    answers_file: str | None = None
    by: str | None = None
    interactive: bool = False
