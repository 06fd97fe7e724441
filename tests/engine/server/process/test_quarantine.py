"""A request that kills the engine process twice is refused; what merely ran beside it is not. Real processes die."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from gateways import RunningServer, keys_of

from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.errors import QuarantinedError
from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.ipc.quarantine import Quarantine, fingerprint
from engine.server.openai.serving import ServedModel

POISON = 303
SCRIPT = Path(__file__).parents[1] / "poisoned_engine.py"


class Engine:
    """Restarted whenever it dies, as systemd does."""

    def __init__(self, socket: Path, model: Path, how: str, after: int) -> None:
        self.socket, self.deaths = socket, 0
        self._argv = [sys.executable, str(SCRIPT), how, str(POISON), str(after), "--uds", str(socket), "--model",
                      str(model), "--served-model-name", "tiny", "--kv-cache-memory-bytes", "64000000"]
        self._stopped = False
        self._log = (socket.parent / "log").open("w")
        self.process = self._spawn()
        self._thread = threading.Thread(target=self._supervise)
        self._thread.start()

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._argv, stdout=self._log, stderr=self._log)

    def _supervise(self) -> None:
        while not self._stopped:
            if self.process.poll() is not None:
                self.deaths += 1
                self.process = self._spawn()
            time.sleep(0.05)

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture(params=[("abort", 0), ("abort", 12), ("sticky", 0)], ids=lambda param: f"{param[0]}-after-{param[1]}")
def served(
    request: pytest.FixtureRequest, tiny_llama_dir: Callable[..., Path], tmp_path: Path
) -> Iterator[tuple[Engine, RunningServer]]:
    directory = tiny_llama_dir("gqa")
    engine = Engine(tmp_path / "engine.sock", directory, *request.param)
    client = EngineClient(engine.socket)
    server = RunningServer({"tiny": ServedModel.load("tiny", directory, client)}, limits=Limits(),
                           auth=keys_of(tmp_path / "keys", "alice", "bob"))
    try:
        server.wait_ready()
        yield engine, server
    finally:
        server.stop()
        engine.stop()


async def complete(server: RunningServer, key: str, prompt: list[int], tokens: int) -> httpx.Response:
    """Once the engine is ready."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    await asyncio.to_thread(server.wait_ready)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        return await http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer sk-{key}"})


async def test_the_cause_is_refused_and_the_innocent_are_not(served: tuple[Engine, RunningServer]) -> None:
    engine, server = served
    poison = [7, 8, POISON]
    innocents = [[10 + i, 11, 12] for i in range(4)]
    innocent_replies: list[httpx.Response] = []
    for _ in range(12):  # all are sent again at once, as clients do; a sticky error takes a few steps to be believed
        *replies, refused = await asyncio.gather(
            *(complete(server, "bob", prompt, 60) for prompt in innocents), complete(server, "alice", poison, 30))
        innocent_replies += replies
        if refused.status_code == 422:
            break
        assert refused.status_code in (500, 503), refused.text
    await asyncio.to_thread(server.wait_ready)
    deaths = engine.deaths
    assert deaths == 2
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == "request_quarantined"
    assert {reply.status_code for reply in innocent_replies} <= {200, 500, 503}
    replies = await asyncio.gather(
        *(complete(server, "bob", prompt, 60) for prompt in innocents), complete(server, "alice", poison, 30))
    assert [reply.status_code for reply in replies] == [200] * 4 + [422]
    assert (await complete(server, "alice", [7, 8, 9], 30)).status_code == 200, "another request of that key"
    assert engine.deaths == deaths
    assert server.client.quarantine.refused == 1
    assert len(server.client.quarantine._suspects) == 1, "the innocent are cleared"


@pytest.mark.parametrize("served", [("abort", 0)], indirect=True, ids=["stop"])
async def test_an_engine_that_is_told_to_stop_makes_nobody_a_suspect(served: tuple[Engine, RunningServer]) -> None:
    engine, server = served
    work = asyncio.create_task(complete(server, "bob", [5, 6], 400))
    while not server.client.stats.num_running:
        await asyncio.sleep(0.01)
    engine.process.send_signal(signal.SIGTERM)
    await work
    deadline = time.monotonic() + 30
    while not engine.deaths:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    await asyncio.to_thread(server.wait_ready)
    assert not server.client.quarantine


def request(owner: str = "a", token: int = 1, **params: int) -> EngineRequest:
    return EngineRequest(f"{owner}-{token}", [token], SamplingParams(**params), owner=owner)  # type: ignore[arg-type]


async def test_suspects_run_one_by_one_and_are_cleared_by_passing_the_point() -> None:
    quarantine = Quarantine()
    one, two = request(token=1), request(token=2)
    quarantine.crashed([(one, 5), (two, 0)])
    trial = await quarantine.admit(one)
    assert trial is not None
    assert not trial.passed(5)
    second = asyncio.create_task(quarantine.admit(two))
    await asyncio.sleep(0.05)
    assert not second.done()
    assert await quarantine.admit(request(token=3)) is None, "others do not wait"
    same = await quarantine.admit(one)
    assert same is not None, "equal requests of one client run together"
    trial.end(cleared=True)
    await asyncio.sleep(0.05)
    assert not second.done()
    same.end(cleared=True)
    trial = await asyncio.wait_for(second, 10)
    assert trial is not None
    trial.end(cleared=False)
    quarantine.crashed([(two, 0), (request(token=4), 0)])
    with pytest.raises(QuarantinedError):
        await quarantine.admit(two)
    assert await quarantine.admit(one) is None, "cleared"
    assert quarantine.refused == 1


async def test_a_request_is_told_by_key_prompt_and_parameters() -> None:
    marks = {fingerprint(each) for each in (request(), request("b"), request(token=2), request(max_tokens=3))}
    assert len(marks) == 4
    assert fingerprint(request()) == fingerprint(request())
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.crashed([(request(), 0), (request(), 3)])
    with pytest.raises(QuarantinedError):
        await quarantine.admit(request())
    assert await quarantine.admit(request("b")) is None, "nobody can have another key's request refused"


async def test_one_crash_with_equal_requests_counts_once() -> None:
    quarantine = Quarantine()
    quarantine.crashed([(request(), 0), (request(), 3)])
    trial = await quarantine.admit(request())
    assert trial is not None
    assert trial.tokens == 3
