"""Who sent a request."""

from dataclasses import dataclass, field

from engine.server.access.auth import ApiKey


@dataclass(slots=True)
class Work:
    """The work of one request, over all its choices."""

    model: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_at: float | None = None   # monotonic time
    between: float | None = None          # mean seconds between two tokens of a choice
    cached_tokens: int = 0                # of the prompts
    finish_reasons: tuple[str, ...] = ()  # of the choices that have ended, in the order of their ends


@dataclass(slots=True)
class Caller:
    """Set by the middleware, read by the endpoints."""

    request_id: str
    key: ApiKey | None = None
    work: "Work | None" = None  # the work of a generating request, set when it has ended
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # for the response, whatever its status

    @property
    def key_id(self) -> str:
        return self.key.id if self.key else ""
