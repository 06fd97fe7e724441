"""All limits of the HTTP endpoint. Ranges of sampling parameters are in `engine.core.params`."""

from dataclasses import dataclass
from typing import Any

from engine.setting import setting


def _bytes(default: int, help: str, at_least: int = 1, at_most: int = 1 << 36) -> Any:
    return setting(default, help, size=True, at_least=at_least, at_most=at_most)


def _count(default: int, help: str, at_least: int = 1, at_most: int = 10_000_000) -> Any:
    return setting(default, help, at_least=at_least, at_most=at_most)


def _seconds(default: float, help: str, at_least: float = 0.1, at_most: int = 86_400) -> Any:
    return setting(default, help, at_least=at_least, at_most=at_most)


@dataclass(frozen=True, slots=True)
class Limits:
    """Each field is a key of [serve.limits] and [gateway.limits] (engine.server.settings.limit_settings).

    0 switches off a limit that applies to each key or address.
    """

    # what is read
    max_body_bytes: int = _bytes(  # a 256k-token prompt, JSON-escaped, is about 3 MB
        4 << 20, "of a request body; larger ones get 413", 1 << 10, 1 << 30)
    max_discarded_bytes: int = _bytes(
        64 << 20, "of a body that is too large, read and dropped so that its sender reads the 413")
    body_seconds: float = _seconds(30.0, "from the headers to the last byte of the body")
    header_seconds: float = _seconds(10.0, "from the first byte of a connection to the end of the headers")
    max_header_bytes: int = _bytes(32 << 10, "of the headers of a request", 1 << 10, 1 << 20)
    handshake_seconds: float = _seconds(10.0, "for TLS, from being accepted on")
    idle_seconds: float = _seconds(  # above that of common proxies, so that they close first
        75.0, "between two requests of a connection")
    linger_seconds: float = _seconds(
        2.0, "in which what a client still sends after its last answer is dropped, then the connection is closed")

    # who is let in
    max_connections: int = _count(4096, "in all; fewer where the process may not open as many files; more get 503")
    max_connections_per_address: int = _count(
        1024, "of one address (an IPv6 /64 counts as one), 0 for no bound; more get 429", at_least=0)

    # what a request may ask for
    max_messages: int = _count(4096, "of one chat")
    max_tools: int = _count(128, "of one chat")
    max_tool_characters: int = _count(512 << 10, "of all tool definitions of one chat, as JSON")
    max_call_characters: int = _count(1 << 20, "of one tool call of the model; a longer one is content")
    max_call_depth: int = _count(64, "objects and lists inside one another in the arguments of a call", at_most=200)
    max_prompts: int = _count(1024, "of one completions request")
    max_choices: int = _count(1024, "prompts × `n`")
    max_embedding_inputs: int = _count(2048, "texts of one embeddings request")
    max_stop_characters: int = _count(1024, "of one stop string")
    max_stop_token_ids: int = _count(1024, "of one request")
    max_logit_bias: int = _count(1024, "tokens that `logit_bias` may name")
    max_name_characters: int = _count(256, "of a model's name, of a cache salt", at_most=4096)
    refuse_unknown_fields: bool = setting(True, "false lets fields pass that nobody knows")

    # what the server takes on
    max_in_flight: int = _count(1024, "generating requests of all clients; more get 503")
    max_in_flight_per_key: int = _count(0, "generating requests of one key, 0 for no bound; more get 429", at_least=0)
    max_requests_per_minute_per_key: int = _count(0, "of one key, 0 for no bound; more get 429", at_least=0)
    max_tokens_per_minute_per_key: int = _count(
        0, "of prompts and answers of one key, 0 for no bound; what comes above it gets 429", at_least=0,
        at_most=1_000_000_000)
    max_embeddings_at_a_time: int = _count(
        128, "texts of one embeddings request that the engine has at a time, so that others come between")
    max_waiting: int = _count(2048, "sequences that may wait in one engine; beyond, requests get 503")
    max_waiting_per_key: int = _count(
        0, "sequences of one key that may wait in one engine, 0 for no bound; beyond, its requests get 429", at_least=0)
    max_wait_seconds: float = _seconds(  # as long as OpenAI's clients wait for an answer
        600.0, "that a request may be expected to wait in the queue, 0 for no bound; beyond, it gets 503", 0)
    isolate_prefix_cache: bool = setting(True, "false has all keys share cached prompts")
    text_threads: int = _count(2, "threads that tokenise and render templates", at_most=256)

    # what is written
    send_seconds: float = _seconds(60.0, "for a client to take one piece of a stream, or 8 KiB of another answer")
    keep_alive_seconds: float = _seconds(15.0, "of silence before a comment is sent on a stream")
    first_output_seconds: float = _seconds(
        0.25, "an engine that refuses within this time is an HTTP error, later an error event", 0, 60)
    retry_after_seconds: int = _seconds(5, "the `Retry-After` of 429 and 503", 1)


MAX_ECHO_CHARACTERS = 200  # input that an error message repeats is cut to this length
