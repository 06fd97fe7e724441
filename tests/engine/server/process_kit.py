"""What the tests of the engine process share: a real process, a client that is connected, requests, waiting."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, StepOutput
from engine.server.ipc.client import EngineClient

READY_SECONDS = 60


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


async def tokens_of(client: EngineClient, request: EngineRequest) -> tuple[list[int], StepOutput]:
    tokens, last = [], StepOutput("none")
    async for last in client.generate(request):
        tokens += last.new_token_ids
    return tokens, last


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def connected(path: Path, **kwargs) -> AsyncIterator[EngineClient]:
    client = EngineClient(path, **kwargs)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


class Engine:
    """A real engine process on the socket `uds`, with its log beside it."""

    def __init__(self, model: Path, uds: Path, *flags: str, **environment: str) -> None:
        self.uds = uds
        self.log = uds.with_suffix(".log")
        self._argv = [sys.executable, "-m", "engine.server.process.engine_process", f"--uds={uds}", f"--model={model}",
                      "--log-format=json", *flags]
        self._environment = os.environ | environment
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=log, env=self._environment)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(20)
