"""docs/*/settings.md is made from the declarations of the settings; this finds a page that was not made again."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("language", ["en", "ko"])
def test_the_reference_of_settings_is_up_to_date(language: str) -> None:
    page = runpy.run_path(str(ROOT / ".ci/settings_pages.py"))["page"](language)
    said = (ROOT / "docs" / language / "settings.md").read_text("utf-8")
    assert said == page, "run .venv/bin/python .ci/settings_pages.py"
    for flag in ("--max-model-len", "ATOLL_SERVE_PORT", "ATOLL_GATEWAY_PORT", "--trust-remote-code"):
        assert f"`{flag}`" in said
