"""Reads a request body, limited in size and time, and parses its JSON directly into a typed request."""

import asyncio
import codecs
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from engine.server.http.errors import ApiError, from_validation, invalid, shortened
from engine.server.http.limits import Limits
from engine.server.openai.request.refused_fields import check_fields

T = TypeVar("T")
_SURROGATE = re.compile(  # an escaped surrogate without its other half
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


async def read_request(request: Request, kind: type[T], limits: Limits) -> T:
    """The body as `kind`. Raises ApiError 400, 408, 413 or 415, and ClientDisconnect."""
    _check_content_type(request)
    try:
        async with asyncio.timeout(limits.body_seconds):
            body = await _read(request, limits)
    except TimeoutError:
        raise ApiError(
            408, f"The request body did not arrive within {limits.body_seconds:g} seconds.", code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    return parse(body, kind, refuse_unknown=limits.refuse_unknown_fields)


def parse(body: bytes | bytearray, kind: type[T], *, refuse_unknown: bool = True) -> T:
    """JSON text as `kind`. Raises ApiError 400."""
    body = body.removeprefix(codecs.BOM_UTF8)  # some editors and shells on Windows write one into every file
    try:
        raw = msgspec.json.decode(body)
    except msgspec.ValidationError:  # the only one that untyped JSON can cause
        raise invalid("A number in the request body is out of range.") from None
    except msgspec.DecodeError as error:
        if not body.strip():
            raise invalid("The request body is empty; send a JSON object.") from None
        if _SURROGATE.search(body):
            raise invalid("The request body is not valid Unicode: it holds half of a surrogate pair.") from None
        raise invalid(f"The request body is not valid JSON: {shortened(str(error))}.") from None
    except UnicodeDecodeError:
        raise invalid(f"The request body is not valid UTF-8{_first_bad_byte(body)}; send it in UTF-8.") from None
    except RecursionError:
        raise invalid("The request body is nested too deeply.") from None
    if not isinstance(raw, dict):
        raise invalid("The request body must be a JSON object.")
    check_fields(raw, kind, refuse_unknown=refuse_unknown)
    try:
        return msgspec.convert({name: _whole(value) for name, value in raw.items()}, kind)
    except msgspec.ValidationError as error:
        raise from_validation(error, kind) from None


def _whole(value: Any) -> Any:
    """100.0 as 100: some languages have one type of number, and write every one with decimals."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _first_bad_byte(body: bytes | bytearray) -> str:
    """Where in the body UTF-8 ends; the JSON parser counts from the start of a string."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f" (byte {error.start})"
    return ""


def _check_content_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(415, "Send JSON: set the header Content-Type: application/json.", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "Send the body uncompressed: Content-Encoding is not supported.",
                       code="unsupported_media_type")


async def _read(request: Request, limits: Limits) -> bytearray:
    """The body's bytes. Never holds more than the limit: further bytes are read and dropped, so that the sender gets to
    read our answer."""
    too_large = ApiError(
        413, f"The request body is larger than {limits.max_body_bytes} bytes.", code="request_too_large",
        headers={"Connection": "close"},
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.max_discarded_bytes:
        raise too_large
    body = bytearray()
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size > limits.max_body_bytes:
            body.clear()
            if size > limits.max_discarded_bytes:
                raise too_large
        else:
            body += chunk
    if size > limits.max_body_bytes:
        raise too_large
    return body
