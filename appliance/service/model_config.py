"""A model's config.json."""

import json
from pathlib import Path
from typing import Any


def read_config(directory: Path) -> Any:
    """The JSON of a model's directory. Raises OSError, ValueError."""
    return json.loads((directory / "config.json").read_text("utf-8"))
