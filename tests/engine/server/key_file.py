"""A file of API keys, as tests of who is admitted write it."""

import hashlib
import json
import os
from pathlib import Path

KEY = "sk-" + "a" * 43


def entry(key: str, **fields: object) -> dict:
    return {"id": key[-4:], "name": "team", "sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}


def write(path: Path, *entries: dict) -> None:
    """As `atoll keys` does: a new file renamed over the old one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"keys": list(entries)}))
    os.replace(fresh, path)
