"""The real `atoll` in real terminals, from an empty prefix to a signed pilot, by keyboard alone: in tmux, where the
terminal is lost in every step, and as a Linux console and a VT220 would be driven. `make test-terminal`.
"""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from checklist_kit import REVIEW
from ports import free_port
from real_service import SMALL_LOAD, SMALL_MODEL, signed
from terminals import ATOLL, Pty, Tmux, missing_tmux
from wizard_walk import Walk

from appliance.service.jobs import spool
from appliance.service.steps import STEPS
from installer.base.errors import InstallError
from installer.base.layout import Layout
from installer.operate.lifecycle import stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
GREEN = {step.id: "green" for step in STEPS}
COLOURS_OF_16 = r"(?:\d|2[1-9]|3[0-79]|4[0-79]|9[0-7]|10[0-7])?"


@dataclass
class Site:
    """An empty prefix and an answers file that says all but what a person decides."""

    root: Path

    @property
    def layout(self) -> Layout:
        return Layout.at(self.root / "prefix")

    @property
    def answers(self) -> Path:
        return self.root / "answers.toml"

    @property
    def environment(self) -> dict[str, str]:
        return {"ATOLL_PREFIX": str(self.layout.prefix), "ATOLL_LANG": "en", "TZ": "UTC"}

    def steps(self) -> dict[str, str]:
        done = subprocess.run([ATOLL, "checklist", "show", "--json"], env={**os.environ, **self.environment}, text=True,
                              capture_output=True, check=True)  # fmt: skip
        return {step["id"]: step["status"] for step in json.loads(done.stdout)["steps"]}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path, signer: Any) -> Path:
    return signed(smollm2_dir, tmp_path_factory.mktemp("medium"), signer)


@pytest.fixture
def site(tmp_path: Path, bundle: Path, signer: Any) -> Iterator[Site]:
    site = Site(tmp_path)
    spool.remove(site.layout)  # of an earlier run whose folder had this name
    profile = tmp_path / "tiny.toml"
    profile.write_text(SMALL_LOAD)
    answers = {
        "schema_version": 1, "bundle": str(bundle), "trust_keys": [str(signer.public_path)], "device": "cpu",
        "port": free_port(), "waivers": SMALL_MODEL, "review": {"smollm2-135m-instruct": REVIEW},
        "tune": {"profile": str(profile), "budget": "60s", "load_seconds": 2.0, "only": ["max-num-seqs"]},
        "verify": {"profile": str(profile), "requests": 6, "soak_seconds": 4.0},
        "pilot": {"interval": 0.5, "stages": [
            {"name": "everybody", "users": ["*"], "duration": 6.0, "stop": {"window": 2.0}, "goal": {"requests": 0}}]},
    }  # fmt: skip
    site.answers.write_text(tomlkit.dumps(answers))
    yield site
    with contextlib.suppress(InstallError):  # it came to no install
        stop(site.layout)


def whole_path(walk: Walk, site: Site) -> None:
    walk.start(str(site.answers))
    walk.gpu()
    walk.model()
    walk.install()
    walk.tune("ttft=20s")
    walk.verify("20000")
    walk.pilot("Kim")


@pytest.mark.skipif(bool(missing_tmux()), reason=missing_tmux())
def test_in_tmux_the_terminal_is_lost_in_every_step(site: Site) -> None:
    """By turns the pane is closed, and the program killed. Work goes on; a fresh `atoll` shows it, and asks again."""
    with Tmux([ATOLL], site.environment) as terminal:
        walk = Walk(terminal, lose=[terminal.hang_up, terminal.kill])
        whole_path(walk, site)
        assert walk.lost == 7  # once in each step, and at the plan
        terminal.press("f10")
    assert site.steps() == GREEN
    jobs = json.loads(subprocess.run([ATOLL, "jobs", "list", "--json"], env={**os.environ, **site.environment},
                                     text=True, capture_output=True, check=True).stdout)["jobs"]  # fmt: skip
    assert len(jobs) == 7, "each step ran once, and the pilot once more when it was signed"


@pytest.mark.parametrize("term", ["linux", "vt220"])
def test_on_a_console_and_a_serial_line(site: Site, term: str) -> None:
    """Nothing but ASCII is drawn, in colours that the terminal has."""
    with Pty([ATOLL], {**site.environment, "TERM": term, "ATOLL_LANG": "ko"}) as terminal:

        def look() -> None:
            drawn = bytes(terminal.raw).decode("utf-8")
            assert drawn.isascii(), sorted({sign for sign in drawn if not sign.isascii()})
            numbers = {part for codes in re.findall(r"\x1b\[([0-9;]*)m", drawn) for part in codes.split(";")}
            assert all(re.fullmatch(COLOURS_OF_16, number) for number in numbers), numbers
            if term == "vt220":
                assert not [number for number in numbers if re.fullmatch("[349][0-7]|10[0-7]", number)], numbers
            assert max(len(row) for row in terminal.rows()) <= 80

        walk = Walk(terminal, look=look)
        whole_path(walk, site)
        terminal.press("f12")
        terminal.until("SERVING", "smollm2-135m")
        look()
        terminal.press("escape", "f10")
        assert terminal.wait() == 0
        assert b"\x1b[?1049l\x1b[?25h" in bytes(terminal.raw)[-120:], "the screen and the cursor of before"
    assert site.steps() == GREEN
