"""What a broken peer may send: to the decoders, and to a real engine process, which serves the next client as ever."""

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from fuzzing import Defect, Target
from gateways import engine_process
from mutations import Chance
from tiny_llama import TINY_LLAMAS, save_tiny_llama

from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, EngineStats, FinishReason, RequestTimes, StepOutput, TokenLogprobs
from engine.server.ipc import messages as m
from engine.server.ipc.framing import FrameError, FrameReader, frame

PARAMS = SamplingParams(
    temperature=0.5, top_p=0.9, top_k=5, stop_token_ids=[3], logit_bias={7: -1.5}, seed=5, logprobs=2, max_tokens=4,
    prompt_logprobs=1, min_tokens=1, presence_penalty=0.5, repetition_penalty=1.2, bad_token_ids=[9])
COMMANDS: list[m.Command] = [
    m.Hello(m.PROTOCOL, "fuzz", True), m.Ping(3), m.Abort(["a", "b"]), m.Submit(EngineRequest("a", [5, 6, 7], PARAMS)),
    m.Submit(EngineRequest("b", [5] * 40, SamplingParams(max_tokens=3), cache_salt="x", owner="k", priority=2)),
    m.Submit(EngineRequest("c", [5, 6], SamplingParams(max_tokens=1), pooling="mean")),
    m.Submit(EngineRequest("d", [8, 9], SamplingParams(max_tokens=5, grammar='{"grammars": [{"lark_grammar": "x"}]}'))),
]
EVENTS: list[m.Event] = [
    m.Welcome(m.PROTOCOL, "1", 7), m.Progress("load", 1, 2), m.Moved(["a"], ["b"]), m.Rejected("a", "no", "n", "c"),
    m.Pong(3, EngineStats()), m.Goodbye("bye", "hint", True, {"a": [1]}),
    m.Outputs([StepOutput("a", [5], [TokenLogprobs(5, -0.5, 1, [(5, -0.5)])], [None, TokenLogprobs(1, -9.0, 2)],
                          FinishReason.STOP, 3, 16, None, RequestTimes(1, 2, 3, 4))], EngineStats(num_running=1)),
    m.Ready(m.EngineInfo(["x"], 512, 320, [2], "float32", "cpu", 9, 16, 4), EngineStats()),
]  # fmt: skip


def payload(chance: Chance, messages: list[Any]) -> bytes:
    """A message with a few values that it should not have, or bytes that are none."""
    data = m.encode(chance.choice(messages))
    if chance.often(0.7):
        value = msgspec.msgpack.decode(data)
        for _ in range(chance.choice((1, 1, 2, 3))):
            value = chance.mutated(value)
        with suppress(OverflowError, UnicodeEncodeError, RecursionError):  # msgpack has no word for it
            made = msgspec.msgpack.encode(value)
            data = made if len(made) < 1 << 20 else data  # larger ones test the patience
    return chance.mutated_bytes(data) if chance.often(0.4) else data


def decoded(chance: Chance, messages: list[Any], decode: Callable[[bytes], Any]) -> None:
    try:
        found = decode(payload(chance, messages))
    except m.MessageError:
        return
    sent = m.encode(decode(m.encode(found)))
    if m.encode(decode(sent)) != sent:
        raise Defect(f"{found!r} is another message when it is sent on")


def framed(chance: Chance) -> None:
    """A stream is cut into the same frames however it arrives, and ends in the same way."""
    data = b"".join(frame(chance.randbytes(chance.randint(1, 60))) for _ in range(chance.randint(0, 4)))
    data = chance.mutated_bytes(data) if chance.often(0.7) else data

    def read(pieces: list[bytes]) -> tuple[list[bytes], bool]:
        reader, got = FrameReader(500), list[bytes]()
        try:
            for piece in pieces:
                for found in reader.feed(piece):
                    got.append(found)
        except FrameError:
            return got, True
        return got, False

    if read([data]) != read(chance.pieces(data)):
        raise Defect(f"the frames of {data!r} depend on how they arrive")


class Engine:
    """A real engine process, a good client of it, and connections for bad ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._good = self._connected()
        self._pid, self._nonce = self._welcome(), 0

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        connection.connect(str(self._path))
        self._reader = FrameReader(m.MAX_EVENT_BYTES)
        return connection

    def _welcome(self) -> int:
        pid = 0
        self._send(m.Hello(m.PROTOCOL, "good"))
        for event in self._events():
            if isinstance(event, m.Welcome):
                pid = event.pid
            if isinstance(event, m.Ready):
                return pid
        raise Defect("the engine did not load")

    def _send(self, command: m.Command) -> None:
        self._good.sendall(frame(m.encode(command)))

    def _events(self) -> Iterator[m.AnyEvent]:
        while data := self._good.recv(1 << 16):
            yield from map(m.decode_event, self._reader.feed(data))
        raise Defect("the engine closed the connection of a good client")

    def attacked(self, chance: Chance) -> None:
        with socket.socket(socket.AF_UNIX) as bad, suppress(OSError):
            bad.settimeout(5)
            bad.connect(str(self._path))
            if chance.often(0.9):
                bad.sendall(frame(m.encode(COMMANDS[0])))
            for _ in range(chance.randint(1, 5)):
                data = payload(chance, COMMANDS)
                data = frame(data) if data and chance.often(0.95) else data
                for piece in chance.pieces(data, 2):
                    bad.sendall(piece)
            if chance.often(0.5):
                bad.recv(1 << 16)

    def check(self) -> None:
        """The engine answers a good client, and no step has failed."""
        self._nonce += 1
        name = f"good-{self._nonce}"
        self._send(m.Submit(EngineRequest(name, [5, 6, 7], SamplingParams(temperature=0, max_tokens=2))))
        for event in self._events():
            if isinstance(event, m.Goodbye):
                raise Defect(f"the engine leaves: {event.reason}")
            if isinstance(event, m.Outputs):
                if event.stats.step_failures:
                    raise Defect("a step failed")
                if any(output.request_id == name and output.finish_reason for output in event.outputs):
                    return


@contextmanager
def session() -> Iterator[Callable[[Chance], None]]:
    with tempfile.TemporaryDirectory(prefix="atoll-fuzz-") as directory:
        save_tiny_llama(Path(directory), **TINY_LLAMAS["gqa"])
        with engine_process(Path(directory)) as path:
            while not path.exists():
                pass
            engine, tried = Engine(path), 0

            def attempt(chance: Chance) -> None:
                nonlocal tried
                tried += 1
                for _ in range(20):
                    decoded(chance, COMMANDS, m.decode_command)
                    decoded(chance, EVENTS, m.decode_event)
                    framed(chance)
                engine.attacked(chance)
                if tried % 20 == 0:
                    engine.check()

            yield attempt
            engine.check()


TARGET = Target("ipc", session)
