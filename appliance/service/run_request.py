"""What a checklist run is asked to do."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class RunRequest(BaseModel):
    """`steps`: exactly these, even if they are done; none: all from the first that is not. `answers_file` is written
    back to after the run."""

    model_config = ConfigDict(frozen=True)

    answers: dict[str, Any]
    steps: tuple[str, ...] = ()
    answers_file: str | None = None
    by: str | None = None
    interactive: bool = False
