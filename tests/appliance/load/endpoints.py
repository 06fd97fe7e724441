"""OpenAI endpoints that misbehave on purpose: raw sockets, so that they can break every promise of HTTP and the API."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

Answer = Callable[["Conversation"], None]


def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    body = {"id": "x", "object": "chat.completion.chunk", "model": "fake",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}  # fmt: skip
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return b"data: " + json.dumps({"id": "x", "choices": [], "usage": counts}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Conversation:
    """One request and the socket to answer it on."""

    def __init__(self, connection: socket.socket, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.connection, self.method, self.path, self.headers, self.raw = connection, method, path, headers, body

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw or b"{}")

    @property
    def words_in(self) -> int:
        messages = self.body.get("messages") or [{"content": self.body.get("prompt", "")}]
        return sum(len(str(message["content"]).split()) for message in messages)

    @property
    def tokens_wanted(self) -> int:
        return self.body.get("max_completion_tokens") or self.body.get("max_tokens") or 16

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def begin_stream(self, status: str = "200 OK") -> None:
        head = "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.send(f"HTTP/1.1 {status}\r\n{head}".encode())

    def piece(self, data: bytes) -> None:
        self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def hang_up(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)

    def end_stream(self) -> None:
        self.send(b"0\r\n\r\n")

    def json(self, value: Any, status: str = "200 OK") -> None:
        data = json.dumps(value).encode()
        self.send(f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
                  + data)  # fmt: skip


class Endpoint:
    """Answers /v1/models and plain requests well, and streams with `answer`."""

    def __init__(
        self, answer: Answer, *, tls: ssl.SSLContext | None = None, context: int = 4096, key: str | None = None
    ) -> None:
        self.answer, self.tls, self.context, self.key = answer, tls, context, key
        self.requests: list[Conversation] = []
        self.open = self.most_open = 0
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._socket.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if self.tls:
                connection = self.tls.wrap_socket(connection, server_side=True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            file = connection.makefile("rb")
            while (line := file.readline()) and line.strip():
                method, path, _ = line.decode().split()
                headers = {}
                while (line := file.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                body = file.read(int(headers.get("content-length", 0)))
                self._respond(Conversation(connection, method, path, headers, body))
        except OSError:
            pass
        finally:
            self.open -= 1
            connection.close()

    def _respond(self, conversation: Conversation) -> None:
        self.requests.append(conversation)
        if self.key is not None and conversation.headers.get("authorization") != f"Bearer {self.key}":
            conversation.json({"error": {"message": "no such key"}}, "401 Unauthorized")
        elif conversation.method == "GET":
            conversation.json({"data": [{"id": "fake", "max_model_len": self.context}]})
        elif not conversation.body.get("stream"):
            words = conversation.words_in
            conversation.json({"choices": [{"message": {"content": "a"}}],
                               "usage": {"prompt_tokens": words * 2 + 10, "completion_tokens": 1}})  # fmt: skip
        else:
            self.answer(conversation)


def good(first: float = 0.0, gap: float = 0.0) -> Answer:
    """Waits `first` seconds, then sends the wanted number of tokens with `gap` seconds between them."""

    def answer(conversation: Conversation) -> None:
        conversation.begin_stream()
        time.sleep(first)
        count = conversation.tokens_wanted
        conversation.piece(chunk(""))  # the role alone, as most servers begin
        for number in range(count):
            if number and gap:
                time.sleep(gap)
            conversation.piece(chunk("a ", "length" if number == count - 1 else None))
        conversation.piece(usage(conversation.words_in * 2 + 10, count) + DONE)
        conversation.end_stream()

    return answer
