"""The request of a checklist run."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class RunRequest(BaseModel):
    """`steps`: run exactly these, even if they are done; empty: run all from the first that is not done. The run writes
    its decisions back into `answers_file`. `waived`: the waivers that a person has given just now; the others come from
    earlier answers."""

    model_config = ConfigDict(frozen=True)

    answers: dict[str, Any]
    steps: tuple[str, ...] = ()
    answers_file: str | None = None
    by: str | None = None
    waived: tuple[str, ...] = ()
    interactive: bool = False
