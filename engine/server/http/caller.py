"""Who sent a request."""

from dataclasses import dataclass, field

from engine.server.http.auth import ApiKey


@dataclass(slots=True)
class Caller:
    """Set by the middleware, read by the endpoints."""

    request_id: str
    key: ApiKey | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # of the answer, whatever it will be

    @property
    def key_id(self) -> str:
        return self.key.id if self.key else ""
