"""`make pictures`: every screen of the program in both languages, drawn from the real program at work.

A signed bundle of the demonstration's model is installed, tuned, verified and piloted below a prefix by keyboard, and
each screen is kept on the way: as SVG and PNG in docs/pictures, and in a larger terminal too where ATOLL_PICTURES names
a folder.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tomlkit
from album import keep
from cells import cells, plain
from checklist_kit import REVIEW
from screens import seen, until
from test_trouble_screens import designed

from appliance.service.trouble import gather
from installer.access import api_keys
from installer.base.errors import InstallError
from installer.base.layout import Layout
from installer.operate.lifecycle import start, stop
from installer.release import config
from offline_bundle.model.build import build_bundle
from tui.app import Wizard
from tui.dialogs.ask import Read
from tui.dialogs.form import Form, Pick
from tui.parts.trials import Trials
from tui.trouble import TroubleScreen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ALBUM = Path(__file__).resolve().parents[3] / "docs/pictures"
SIZE, LARGE = (80, 24), (120, 40)
ROOTS = {"en": Path("/tmp/E"), "ko": Path("/tmp/K")}   # short, and shown as /srv, /media and /home: see cells.py
PORTS = {"en": 8443, "ko": 8444}                        # so that both may be drawn side by side
MODEL = "smollm2-135m-instruct"
PROFILE = """\
endpoint = "completions"
input = [8, 16]
output = [4, 6]
requests = 8
warmup = 1
[arrival]
clients = 2
"""
GROUPS = ["health", "performance", "stability", "security"]   # the others take minutes on a small machine
REASON = {"en": "a small model, only to see the screens", "ko": "화면을 보기 위한 작은 모델"}
OPERATOR = {"en": "Kim", "ko": "김민수"}
_access = os.access


@pytest.fixture(autouse=True)
def _jobs_of_this_test(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are processes of their own here, and find each other through the environment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    monkeypatch.setattr(os, "access", lambda path, mode: False if str(path) == "/run" else _access(path, mode))


@pytest.fixture(autouse=True)
def _forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "operator")


@pytest.fixture
def layout(smollm2_dir: Path, signer: Any, language: str) -> Iterator[Layout]:
    root, port = ROOTS[language], PORTS[language]
    assert not root.exists(), f"{root} is in the way: another `make pictures` runs, or was killed. Remove it."
    usb, home = root / "usb", root / "kim"
    home.mkdir(parents=True)
    licence = next(path for path in smollm2_dir.iterdir() if path.name.upper().startswith("LICENSE"))
    build_bundle(
        smollm2_dir, usb, name=MODEL, version="1.0.0", sequence=1, license_id="Apache-2.0", license_file=licence,
        source_repo="HuggingFaceTB/SmolLM2-135M-Instruct", private_key=signer.private_path,
        source_revision="7e27bd9f95328f0f3b08261d1252705110c806f8",
    )  # fmt: skip
    shutil.copy(signer.public_path, home / "vendor.pub")
    (home / "load.toml").write_text(PROFILE)
    stage = {"duration": 4.0, "stop": {"window": 2.0}, "goal": {"requests": 0}}
    answers = {
        "schema_version": 1, "device": "cpu", "port": port, "medium": [str(usb)],
        "trust_keys": [str(home / "vendor.pub")],
        "waivers": dict.fromkeys(("golden", "repetition", "quality-answers"), REASON[language]),
        "review": {MODEL: {**REVIEW, "lineage": "trained by its maker", "acceptable_use": "internal"}},
        "tune": {"profile": str(home / "load.toml"), "budget": "30s", "load_seconds": 2.0, "only": ["max-num-seqs"]},
        "verify": {"profile": str(home / "load.toml"), "requests": 8, "soak_seconds": 4.0, "groups": GROUPS},
        "pilot": {"interval": 0.5, "stages": [{"name": "it-team", "users": ["group:it-team"], **stage},
                                              {"name": "everybody", "users": ["*"], **stage}]},
    }  # fmt: skip
    (home / "answers.toml").write_text(tomlkit.dumps(answers))
    found = Layout.at(root / "srv")
    yield found
    with contextlib.suppress(InstallError):
        stop(found)
    shutil.rmtree(root)


class Camera:
    def __init__(self, app: Wizard, pilot: Any, language: str) -> None:
        self.app, self.pilot, self.language = app, pilot, language
        self.large = Path(os.environ["ATOLL_PICTURES"]) if os.environ.get("ATOLL_PICTURES") else None

    async def keep(self, name: str, settle: float = 0.4) -> None:
        if self.large is not None:
            await self.pilot.resize_terminal(*LARGE)
            await self.pilot.pause(settle)
            keep(self.large / self.language, f"{name}.large", name, cells(self.app))
            await self.pilot.resize_terminal(*SIZE)
        await self.pilot.pause(settle)
        rows = cells(self.app)
        keep(ALBUM / self.language, name, f"atoll: {name}", rows)
        if self.large is not None:
            (self.large / self.language / f"{name}.txt").write_text(plain(rows))


@pytest.mark.parametrize("language", ["en", "ko"])
async def test_every_screen(layout: Layout, language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root, port = ROOTS[language], PORTS[language]
    monkeypatch.setenv("ATOLL_LANG", language)
    app = Wizard(layout, language)
    async with app.run_test(size=SIZE) as pilot:
        camera = Camera(app, pilot, language)

        def status(step: str) -> str:
            return app.standing.step(step).status if app.standing else "open"

        async def done(step: str, expected: str = "green", seconds: float = 400.0) -> None:
            await until(pilot, lambda: app.following is None and status(step) == expected, seconds)

        async def question(kind: type = Read) -> None:
            await until(pilot, lambda: isinstance(app.screen, kind), 300)
            await pilot.pause(0.3)

        async def read_to_the_end() -> None:
            text = app.screen
            assert isinstance(text, Read)
            while not text.at_end():
                await pilot.press("pagedown")
                await pilot.pause(0.05)
            await pilot.press("enter")
            await until(pilot, lambda: app.screen is not text)

        async def trouble(name: str) -> None:
            await app.run_action("trouble")
            await question(TroubleScreen)
            await camera.keep(name)
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is app.checklist)

        await until(pilot, lambda: app.standing is not None and app.machine is not None)
        await trouble("trouble-nothing-installed")
        await pilot.press("f1")
        await question()
        await camera.keep("help")
        await pilot.press("escape", "f3")
        await pilot.pause(1)
        await camera.keep("menu")
        await pilot.press("escape")
        await pilot.press("tab", "tab", "tab", *str(root / "kim/answers.toml"), "enter")
        await until(pilot, lambda: app.position == 1)
        await pilot.press("0")
        await camera.keep("start")
        await pilot.press("enter", "enter", "enter", "enter")
        await until(pilot, lambda: app.position == 1)

        with socket.create_server(("127.0.0.1", port)):  # somebody else listens there
            await pilot.press("enter")
            await done("gpu", "failed")
            await camera.keep("gpu-red")
        await pilot.press("f5")
        await until(pilot, lambda: app.following is not None)
        await done("gpu")
        await camera.keep("gpu")

        await pilot.press("enter")
        await until(pilot, lambda: app.body is not None and getattr(app.body, "looked", False), 120)
        await camera.keep("model")
        await pilot.press("enter")
        await question()
        await camera.keep("licence")
        await read_to_the_end()
        await question()
        await read_to_the_end()
        await done("model")
        await camera.keep("model-done")

        await pilot.press("enter", "enter")
        await question()
        await camera.keep("plan")
        await read_to_the_end()
        await until(pilot, lambda: app.following is not None and app.body.query_one("Work").size.height > 0)
        await pilot.pause(1.5)
        await camera.keep("install-work", 0.3)
        await question()
        await camera.keep("key")
        await read_to_the_end()
        await done("install")
        await camera.keep("install")

        await pilot.press("enter")
        await until(pilot, lambda: app.body is not None and getattr(app.body, "board", None) is not None, 120)
        await camera.keep("tune")
        await pilot.press("m")
        await question(Form)
        await camera.keep("tune-form")
        await pilot.press("enter", "enter", "enter", "enter")
        await until(pilot, lambda: app.body.query_one(Trials).display, 120)
        await pilot.pause(6)
        await camera.keep("tune-work", 0.3)
        await done("tune")
        await camera.keep("tune-done")

        await pilot.press("enter", "g")
        await question(Form)
        await pilot.press(*"20000", "enter", "enter", "enter", "enter", "enter")
        await until(pilot, lambda: app.screen is app.checklist)
        await camera.keep("verify-open")
        await pilot.press("enter")
        await until(pilot, lambda: "20,000 ms" in seen(app) and app.following is not None, 300)
        await pilot.pause(6)
        await camera.keep("verify-work", 0.3)
        await done("verify")
        await camera.keep("verify")

        api_keys.add(layout.api_keys, "it-desk", group="it-team")
        await pilot.press("enter")
        await until(pilot, lambda: "everybody" in seen(app))
        await camera.keep("pilot")
        await pilot.press("enter")
        await until(pilot, lambda: app.following is not None and "everybody" in seen(app))
        await pilot.pause(2.5)
        await camera.keep("pilot-work", 0.3)
        for _ in range(40):  # each stage waits for the operator's word
            if app.following is None and status("pilot") in ("failed", "green"):
                break
            await pilot.press("n")
            await pilot.pause(2)
        await done("pilot", "failed")
        await camera.keep("pilot-sign")
        await pilot.press("enter")
        await question(Form)
        await camera.keep("pilot-form")
        await pilot.press("enter", *OPERATOR[language], "enter", "enter")
        await done("pilot")
        await camera.keep("pilot-done")

        with busy(layout):
            await pilot.press("f12")
            await until(pilot, lambda: MODEL in seen(app))
            await pilot.pause(16)
            await camera.keep("dashboard")
            await pilot.press("3")
            await question()
            await camera.keep("dashboard-details")
            await pilot.press("escape")
        await pilot.press("f9")
        await question(Pick)
        await camera.keep("dashboard-service")
        await pilot.press("escape")

        stop(layout)
        await pilot.press("f5")
        await until(pilot, lambda: "atoll start" in seen(app), 60)
        await camera.keep("dashboard-stopped")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.checklist)
        await trouble("trouble-stopped")
        loads = threading.Thread(target=start, args=(layout, Silent()))
        loads.start()
        await until(pilot, lambda: (gather(layout).status or {})["state"] == "starting", 30)
        await trouble("trouble-loading")
        await asyncio.to_thread(loads.join)
        (root / "usb").rename(root / "out")
        await trouble("trouble-medium")
        (root / "out").rename(root / "usb")
        kill_service(layout)
        await until(pilot, lambda: (gather(layout).status or {})["state"] == "failed", 30)
        await trouble("trouble-failed")
        for kind in ("certificate-expiring", "disk-full"):  # these need a server that is about to fail
            await app.push_screen(TroubleScreen([next(each for each in designed() if each.id == kind)]))
            await camera.keep(f"trouble-{kind.partition('-')[0]}")
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is app.checklist)


def kill_service(layout: Layout) -> None:
    """As a lack of memory does: nothing of the service has time to say why it ends."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(word.startswith(str(layout.prefix)) for word in words):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Silent:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextlib.contextmanager
def busy(layout: Layout) -> Iterator[None]:
    """Three clients that ask one thing after another."""
    key, over = api_keys.add(layout.api_keys, "hr-portal").text, threading.Event()

    def ask() -> None:
        body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 48, "ignore_eos": True}
        while not over.is_set():
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{config.standing(layout).url}/v1/completions", json=body, timeout=60,
                           headers={"Authorization": f"Bearer {key}"})  # fmt: skip

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        over.set()
        for client in clients:
            client.join()
