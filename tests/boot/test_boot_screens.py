"""The screens as root on a machine that boots, on its console: from a verified code tree to a service that answers.

The terminal is lost in every step. `install.sh` is stopped where it asks for the licence, so only the code is there.
"""

from collections.abc import Callable

import pytest
import tomlkit
from desk import Desk
from machine import Machine
from terminals import Pty
from test_boot_checklist import REVIEW
from vendor import MODEL, ensure_vendor
from wizard_walk import Walk

pytestmark = pytest.mark.boot


def test_the_screens_install_as_root(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine("bookworm")
    machine.boot()
    desk = Desk(machine, ensure_vendor())
    desk.prepare()
    desk.plug(desk.vendor.first)
    answers = tomlkit.parse(machine.path("/root/answers.toml").read_text()).unwrap()
    answers |= {"medium": ["/media/atoll"], "review": {MODEL: REVIEW}}
    for name in ("accept_licenses", "confirm_plan"):  # a person does that
        del answers[name]
    machine.path("/root/answers.toml").write_text(tomlkit.dumps(answers))
    refused = desk.install()
    assert refused.code != 0, "nobody has accepted the licence"
    (code,) = machine.path("/opt/atoll/code").glob("*/bin/atoll")
    command = f"/{code.relative_to(machine.root)}"
    assert not machine.path("/opt/atoll/current").is_symlink()

    with Pty(machine.session(command, {"TERM": "linux"}), {}, enter=machine.enter_session) as terminal:

        def kill() -> None:
            machine.kill_sessions(jobs=False)
            terminal.hang_up()

        walk = Walk(terminal, lose=[terminal.hang_up, kill])
        walk.start("/root/answers.toml")
        walk.gpu()
        walk.model()
        walk.install()
        terminal.press("f12")
        terminal.until("SERVING", seconds=120)
        assert bytes(terminal.raw).isascii()
        terminal.press("escape", "f10")
        assert terminal.wait() == 0
    desk.key, status = walk.key, desk.status()
    assert status["state"] == "serving", desk.trouble()
    answer = desk.ask(model=status["models"][0]["instance"])
    assert "Paris" in answer.get("text", ""), (answer, desk.trouble())
    steps = machine.run("atoll checklist show --json").check().json["steps"]
    assert [step["status"] for step in steps[:3]] == ["green"] * 3, steps
    assert machine.run("systemctl --failed --no-legend").out == ""
    assert machine.run("systemctl list-units --no-legend 'atoll-job-*'").out == ""
    assert desk.outbound() == []
