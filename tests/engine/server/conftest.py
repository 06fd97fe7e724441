"""Fixtures of the HTTP surface: the real tokenizer, and gateways in front of real engine processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gateways import RunningServer, engine_process

from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel


@pytest.fixture(scope="session")
def tiny_engine(tiny_llama_dir: Callable[..., Path]) -> Iterator[tuple[Path, Path]]:
    """(socket, model directory) of a random tiny Llama: fast, and its text is full of broken characters."""
    directory = tiny_llama_dir("gqa")
    with engine_process(directory, "--served-model-name", "tiny") as socket:
        yield socket, directory


@pytest.fixture(scope="session")
def tiny_server(tiny_engine: tuple[Path, Path]) -> Iterator[RunningServer]:
    socket, directory = tiny_engine
    model = ServedModel.load("tiny", directory, EngineClient(socket))
    server = RunningServer({"tiny": model, "org/tiny": model}, limits=Limits(body_seconds=1.5, header_seconds=1.5))
    server.wait_ready()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def smol_server(smollm2_dir: Path) -> Iterator[RunningServer]:
    """The real small model."""
    with engine_process(smollm2_dir, "--served-model-name", "smollm2", "--max-model-len", "2048") as socket:
        model = ServedModel.load("smollm2", smollm2_dir, EngineClient(socket))
        server = RunningServer({"smollm2": model}, limits=Limits())
        server.wait_ready()
        yield server
        server.stop()
