"""The messages between gateway and engine: typed msgspec structs, tagged unions, msgpack on the wire.

There is one union per direction, so a peer can only decode what the other side may send. Token ids, numbers, request
ids and grammars cross this border; the text of prompts and answers never does. `PROTOCOL` changes when a field changes
its meaning.

    client -> engine   Hello, Submit, Abort, Ping
    engine -> client   Welcome, Progress, Ready, Moved, Outputs, Rejected, Pong, Goodbye
"""

from typing import Any

import msgspec

from engine.core.request import EngineRequest, EngineStats, StepOutput
from engine.errors import InvalidRequestError

PROTOCOL = 1

# Frames larger than these close the connection. A command holds at most a prompt of ~1M token ids (5 bytes each) and
# its sampling parameters; an event may carry prompt_logprobs (20 alternatives a position of a long prompt).
MAX_COMMAND_BYTES = 16 << 20
MAX_EVENT_BYTES = 128 << 20


class EngineInfo(msgspec.Struct, omit_defaults=True):
    """What the gateway must know about a loaded engine. `max_model_len` is the limit of prompt plus answer, in
    tokens."""

    model_names: list[str]
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    device: str
    num_pages: int
    page_size: int
    max_num_seqs: int
    hidden_size: int = 0       # the size of embeddings
    scheduling_policy: str = "fcfs"
    grammars: bool = False     # whether answers can be made to follow a grammar
    memory_plan: str = ""      # a table for people
    load_seconds: float = 0.0  # process start to the first real token
    kernels: dict[str, int] = {}  # where its GPU kernels came from: kernels.runtime.origins.counts
    pid: int = 0


class Command(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of the messages that a client may send."""


class Hello(Command):
    protocol: int
    client: str = ""      # a word for the engine's log: "gateway", "status"
    follows: bool = False  # the client wants `Moved`, which clients of older releases do not know


class Submit(Command):
    request: EngineRequest


class Abort(Command):
    request_ids: list[str]


class Ping(Command):
    """Answered by the scheduler loop itself, between two steps: a Pong proves that the loop runs."""

    nonce: int = 0


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of the messages that the engine may send."""


class Welcome(Event):
    protocol: int
    version: str
    pid: int


class Progress(Event):
    """Loading: `stage` in words, `done` of `total` (bytes or items; 0: not countable)."""

    stage: str
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        if not self.total:
            return self.stage
        if self.total >= 10_000_000:  # bytes
            return f"{self.stage} {self.done / 1e9:.2f}/{self.total / 1e9:.2f} GB"
        return f"{self.stage} {self.done}/{self.total}"


class Ready(Event):
    info: EngineInfo
    stats: EngineStats


class Moved(Event):
    """Requests that went back to the queue, and requests that left it. Sent before the step that computes them starts,
    so that a client knows what ran even if that step crashes the process."""

    waiting: list[str]
    running: list[str]


class Outputs(Event):
    """Everything one step produced for this client, and the state after it."""

    outputs: list[StepOutput]
    stats: EngineStats


class Rejected(Event):
    """The request was never admitted: `InvalidRequestError` of the engine, as data."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None


class Pong(Event):
    nonce: int
    stats: EngineStats


class Goodbye(Event):
    """The engine is about to leave: it drains (SIGTERM) or met an error it cannot survive."""

    reason: str
    hint: str = ""
    fatal: bool = False
    message: Any = None  # reason and hint with their ids (engine.message.to_json), for another language


AnyCommand = Hello | Submit | Abort | Ping
AnyEvent = Welcome | Progress | Ready | Moved | Outputs | Rejected | Pong | Goodbye

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(AnyCommand)
_events = msgspec.msgpack.Decoder(AnyEvent)


class MessageError(ValueError):
    """Bytes that are not a message of this protocol."""


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes | bytearray | memoryview) -> AnyCommand:
    """Raises MessageError."""
    return _decode(_commands, data)


def decode_event(data: bytes | bytearray | memoryview) -> AnyEvent:
    """Raises MessageError."""
    return _decode(_events, data)


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes | bytearray | memoryview) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, InvalidRequestError, ValueError, TypeError, RecursionError) as error:
        # InvalidRequestError: SamplingParams checks its ranges on construction, so an honest client never gets here.
        raise MessageError(str(error)) from None
