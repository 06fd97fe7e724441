"""Proof that the service serves: a real chat completion, streamed token by token over HTTP(S) with a real key."""

import hmac
import http.client
import json
import ssl
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from installer.base.i18n import plain, t
from installer.release.config import Endpoint

PROMPT = "Say hello in one short sentence."
MAX_TOKENS = 24


class SmokeFailure(Exception):
    """Why the answer does not count, in one sentence."""


@dataclass(frozen=True, slots=True)
class SmokeResult:
    """What was measured. `ttft_s`: from sending the request to the first content. The rate counts the tokens after the
    first."""

    text: str
    tokens: int
    ttft_s: float
    tokens_per_s: float
    finish_reason: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class _Pinned(http.client.HTTPSConnection):
    """TLS that accepts exactly the certificate installed here: stricter than any authority, and independent of the
    clock."""

    def __init__(self, host: str, port: int, timeout: float, certificate: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        super().__init__(host, port, timeout=timeout, context=context)
        self._certificate = certificate

    def connect(self) -> None:
        text = self._certificate.read_text()
        first = text[text.index("-----BEGIN") : text.index("-----END CERTIFICATE-----") + 25]
        super().connect()
        served = self.sock.getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(served, ssl.PEM_cert_to_DER_cert(first)):
            self.close()
            raise OSError(t("the endpoint serves another certificate than {certificate}; restart the service",
                            certificate=self._certificate))


def connect(endpoint: Endpoint, timeout: float) -> http.client.HTTPConnection:
    """A connection to the endpoint of this machine; over TLS, only to the holder of the installed certificate."""
    if endpoint.certificate is None:
        return http.client.HTTPConnection(endpoint.connect_host, endpoint.port, timeout=timeout)
    return _Pinned(endpoint.connect_host, endpoint.port, timeout, endpoint.certificate)


def health(endpoint: Endpoint, timeout: float = 5.0) -> tuple[bool, str]:
    """Whether /health says 200 (the engine has produced a token), and its answer."""
    connection = connect(endpoint, timeout)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = response.read(4096).decode(errors="replace").strip()
        return response.status == 200, f"HTTP {response.status} {body[:200]}".strip()
    except ConnectionRefusedError:
        return False, t("not listening yet")
    except (OSError, ValueError, http.client.HTTPException) as error:
        return False, plain(error) or type(error).__name__
    finally:
        connection.close()


def smoke_test(endpoint: Endpoint, model: str, key: str, timeout: float) -> SmokeResult:
    """Ask one question and read the stream to its end. Raises SmokeFailure."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = connect(endpoint, timeout)
    try:
        started = time.monotonic()
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        response = connection.getresponse()
        if response.status != 200:
            said = response.read(2000).decode(errors="replace").strip()
            raise SmokeFailure(t("the endpoint answered HTTP {status}: {said}", status=response.status,
                                 said=said[:500]))
        return _read_stream(response, started, started + timeout)
    except (OSError, ValueError, http.client.HTTPException) as error:
        said = plain(error) or type(error).__name__
        raise SmokeFailure(t("the connection failed: {said}", said=said)) from error
    finally:
        connection.close()


def _read_stream(response: http.client.HTTPResponse, started: float, deadline: float) -> SmokeResult:
    pieces: list[str] = []
    arrivals: list[float] = []
    finish_reason = None
    counted = 0
    for line in response:
        now = time.monotonic()
        if now > deadline:
            raise SmokeFailure(t("the stream did not end in time"))
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        try:
            event = json.loads(data)
            if "error" in event:
                raise SmokeFailure(t("the stream carried an error: {error}", error=str(event["error"])[:500]))
            for choice in event.get("choices") or []:
                piece = (choice.get("delta") or {}).get("content")
                if piece:
                    pieces.append(piece)
                    arrivals.append(now)
                finish_reason = choice.get("finish_reason") or finish_reason
            counted = (event.get("usage") or {}).get("completion_tokens") or counted
        except (ValueError, AttributeError, TypeError):
            raise SmokeFailure(
                t("the stream carried data that is not a chunk: {data!r}", data=data[:200])
            ) from None
    else:
        raise SmokeFailure(t("the stream broke off before [DONE]"))
    if not pieces:
        raise SmokeFailure(t("no content token arrived"))
    if finish_reason is None:
        raise SmokeFailure(t("the stream ended without a finish_reason"))
    tokens = counted or len(pieces)
    spent = arrivals[-1] - arrivals[0]
    rate = (tokens - 1) / spent if spent > 0 and tokens > 1 else 0.0
    return SmokeResult("".join(pieces), tokens, round(arrivals[0] - started, 4), round(rate, 2), finish_reason)
