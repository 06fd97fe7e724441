"""Requests that are almost right, to a real gateway in front of a real engine: by their fields and by their bytes.

Never a 500, never a broken answer, never an error in the log; afterwards no request and no page is left, and it is the
same engine process.
"""

import json
import logging
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from fuzzing import Defect, Target
from gateways import RunningServer, engine_process
from mutations import Chance
from tiny_llama import TINY_LLAMAS, save_tiny_llama

from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}, "b": {"type": "integer", "minimum": 3},
                                     "c": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"enum": ["p", 1, None]}}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
MESSAGES = [
    {"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "call_1", "content": "4"}, {"role": "user", "content": "so?"}]
SAMPLING = {
    "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2, "stop": ["z"],
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1.0},
    "stop_token_ids": [9], "min_tokens": 1, "ignore_eos": True, "cache_salt": "s", "user": "u"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "strict": True,
                                                 "schema": TOOL["function"]["parameters"]}}
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, **SAMPLING, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES[-1:], "tools": [TOOL], "tool_choice": "required", "max_tokens": 5,
                              "parallel_tool_calls": False}),
    ("/v1/chat/completions", {"messages": MESSAGES[-1:], "tools": [TOOL], "max_tokens": 5, "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{
            "type": "function", "function": {"name": TOOL["function"]["name"]}}]}}}),
    ("/v1/chat/completions", {"messages": MESSAGES[-1:], "response_format": SCHEMA, "max_completion_tokens": 4}),
    ("/v1/chat/completions", {"messages": MESSAGES[:2], "chat_template_kwargs": {"enable_thinking": False},
                              "max_tokens": 2, "structured_outputs": {"regex": "[ab]{2}c*"}}),
    ("/v1/completions", {"prompt": ["ab", "c"], **SAMPLING, "echo": True, "logprobs": 1, "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2, "guided_choice": ["yes", "no"]}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3, "structured_outputs": {"grammar": 'start: "a" | /b+/'}}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                                 {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                                 {"type": "function_call_output", "call_id": "c", "output": "4"}],
                       "instructions": "brief", "max_output_tokens": 3, "tools": [{"type": "function", "name": "f",
                       "parameters": TOOL["function"]["parameters"]}], "text": {"format": {"type": "text"}}}),
    ("/v1/embeddings", {"input": ["ab", "c"], "encoding_format": "base64", "dimensions": 8}),
    ("/tokenize", {"messages": MESSAGES, "tools": [TOOL], "add_generation_prompt": True}),
    ("/tokenize", {"prompt": "abc", "return_token_strs": True}), ("/detokenize", {"tokens": [5, 6, 7]}),
]
ALLOWED = {200, 400, 404, 405, 408, 411, 413, 414, 415, 417, 431, 501, 505, 503}
CASES_PER_CHECK = 50
GROWTH_BYTES = 400 << 20


class _Errors(logging.Handler):
    """What the server logs as a defect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


class Edge:
    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._http = httpx.Client(timeout=90)
        assert server.client.info is not None
        self._engine = psutil.Process(server.client.info.pid)
        self._errors, self._tried = _Errors(), 0
        self._memory = 0
        logging.getLogger().addHandler(self._errors)

    def attempt(self, chance: Chance) -> None:
        self._tried += 1
        if chance.often(0.75):
            self._fields(chance)
        else:
            self._bytes(chance)
        if self._tried % CASES_PER_CHECK == 0:
            self.check()

    def _fields(self, chance: Chance) -> None:
        path, body = chance.choice(GOOD)
        body = {**body, "stream": chance.often(0.4)} if "token" not in path and "embed" not in path else body
        for _ in range(chance.choice((1, 1, 2, 4))):
            body = chance.mutated(body)
        content = json.dumps(body).encode()
        reply = self._http.post(f"{self._server.url}{path}", content=content,
                                headers={"Content-Type": "application/json"})
        what = f"{path} {content[:1500]!r}"
        if reply.status_code not in ALLOWED:
            raise Defect(f"{reply.status_code} {reply.text[:300]} for {what}")
        if reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"):
            _check_stream(path, reply.text, what)
        elif reply.status_code == 200:
            json.loads(reply.content)
        else:
            _check_error(reply.content, what)

    def _bytes(self, chance: Chance) -> None:
        path, body = chance.choice(GOOD)
        data = json.dumps({**body, "stream": chance.often(0.3)} if "/v1" in path else body).encode()
        chunked = chance.often(0.3)
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(data)}"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}\r\n\r\n".encode()
        if chunked:
            data = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in chance.pieces(data) if p) + b"0\r\n\r\n"
        sent = b"".join(chance.mutated_bytes(head) + data if chance.often(0.7) else head + chance.mutated_bytes(data)
                        for _ in range(chance.choice((1, 1, 3))))
        with closing(socket.create_connection(("127.0.0.1", self._server.port), timeout=90)) as connection:
            got = b""
            with _closed_by_the_server():
                for piece in chance.pieces(sent):
                    connection.sendall(piece)
                if chance.often(0.9):
                    connection.shutdown(socket.SHUT_WR)
                    while part := connection.recv(1 << 16):
                        got += part
        if got and not got.startswith(b"HTTP/1.1 "):
            raise Defect(f"an answer that is no HTTP: {got[:100]!r} to {sent[:1500]!r}")
        if got and int(got[9:12]) not in ALLOWED:
            raise Defect(f"{got[:300]!r} to {sent[:1500]!r}")

    def check(self) -> None:
        """Nothing is left of what was tried."""
        self._server.wait_idle(60)
        reply = self._http.post(f"{self._server.url}/v1/completions", json={"prompt": "ab", "max_tokens": 2})
        if reply.status_code != 200:
            raise Defect(f"a good request gets {reply.status_code}: {reply.text[:300]}")
        info, stats = self._server.client.info, self._server.client.stats
        if info is None or info.pid != self._engine.pid or stats.step_failures:
            raise Defect("the engine restarted, or a step failed")
        if self._errors.seen:
            raise Defect(f"the log says: {self._errors.seen[0][:2000]}")
        memory = psutil.Process().memory_info().rss + self._engine.memory_info().rss
        self._memory = self._memory or memory
        if memory > self._memory + GROWTH_BYTES or threading.active_count() > 100:
            raise Defect(f"{memory >> 20} MiB, after {self._memory >> 20} at first; {threading.active_count()} threads")


@contextmanager
def _closed_by_the_server() -> Iterator[None]:
    """It may close on what is no HTTP; but it must not fall silent."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError:
        pass


def _check_stream(path: str, text: str, what: str) -> None:
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    lines = [line.removeprefix("data: ") for event in events for line in event.split("\n") if line.startswith("data: ")]
    if "responses" in path:
        last = json.loads(lines[-1])["type"]
        if last not in ("response.completed", "response.incomplete", "response.failed", "error"):
            raise Defect(f"a stream ends with {last} for {what}")
        return
    if not lines or lines[-1] != "[DONE]":
        raise Defect(f"a stream without [DONE] for {what}")
    for data in lines[:-1]:
        found = json.loads(data)
        if "error" in found and found["error"]["type"] == "server_error":
            raise Defect(f"{data[:300]} in a stream for {what}")


def _check_error(content: bytes, what: str) -> None:
    error = json.loads(content)["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"] or len(content) > 2000:
        raise Defect(f"an error of another form, {content[:300]!r}, for {what}")


@contextmanager
def session() -> Iterator[Callable[[Chance], None]]:
    with tempfile.TemporaryDirectory(prefix="atoll-fuzz-") as directory:
        save_tiny_llama(Path(directory), **TINY_LLAMAS["gqa"])
        with engine_process(Path(directory)) as path:
            model = ServedModel.load("tiny", Path(directory), EngineClient(path))
            server = RunningServer({"tiny": model}, limits=Limits(body_seconds=3, header_seconds=3))
            try:
                server.wait_ready()
                edge = Edge(server)
                yield edge.attempt
                edge.check()
            finally:
                server.stop()


TARGET = Target("http", session)
