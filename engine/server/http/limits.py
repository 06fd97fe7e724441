"""Every bound of the HTTP edge, in one place. Ranges of sampling parameters are in `engine.core.params`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes are bytes or counts, times are seconds. 0 switches a per-key bound off.

    Every field is a setting (`engine.server.cli.limit_settings`); docs/en/serve.md says what each does.
    """

    # what is read
    max_body_bytes: int = 4 << 20        # a 256k-token prompt, JSON-escaped, is about 3 MB
    max_discarded_bytes: int = 64 << 20  # of a body that is too large, read and dropped so that its sender sees the 413
    body_seconds: float = 30.0           # from the headers to the body's last byte
    header_seconds: float = 10.0         # from the first byte of a connection to the end of the headers
    max_header_bytes: int = 32 << 10
    handshake_seconds: float = 10.0      # for TLS, from being accepted on
    idle_seconds: float = 75.0           # between two requests: above that of common proxies, so that they close first
    linger_seconds: float = 2.0          # in which what comes after the last answer is dropped, then closed

    # who is let in
    max_connections: int = 4096          # fewer where the process may not open as many files
    max_connections_per_address: int = 1024  # an IPv6 /64 counts as one address; 0: no bound

    # what a request may ask for
    max_messages: int = 4096
    max_tools: int = 128
    max_prompts: int = 1024              # of one completions request
    max_choices: int = 1024              # prompts × n
    max_stop_characters: int = 1024      # of one stop string
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 1024
    max_name_characters: int = 256       # model names, cache salts
    refuse_unknown_fields: bool = True   # false: fields that nobody knows are dropped

    # what the server takes on
    max_in_flight: int = 1024            # generating requests of all clients
    max_in_flight_per_key: int = 0
    max_waiting: int = 2048              # sequences waiting in one engine
    isolate_prefix_cache: bool = True    # prefix-cache hits only between keys of one group
    text_threads: int = 2                # that tokenise and render templates

    # what is written
    send_seconds: float = 60.0           # for a client to take one piece of a stream, or 8 KiB of another answer
    keep_alive_seconds: float = 15.0     # of silence before a comment is sent on a stream
    first_output_seconds: float = 0.25   # an engine's refusal within that time is an HTTP error, later an error event
    retry_after_seconds: int = 5


MAX_ECHO_CHARACTERS = 200  # of any error message: never a mirror of the input
