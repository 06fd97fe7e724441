"""Errors in the form that OpenAI's clients read: ``{"error": {"message", "type", "param", "code"}}``, and their
status."""

import re
from typing import Any

import msgspec
from starlette.responses import Response

from engine.errors import AtollError, EngineDeadError, InvalidRequestError, QuarantinedError
from engine.server.http.limits import MAX_ECHO_CHARACTERS


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """An error reply. `param` is the dotted path of the field; `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.refusal = ""  # a label of `vllm:admission_rejections`
        self.detail = ErrorDetail(shortened(message, 4 * MAX_ECHO_CHARACTERS), type, param and shortened(param), code)

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorReply(self.detail))

    def response(self) -> Response:
        return Response(self.body(), self.status, headers=self.headers, media_type="application/json")


def shortened(text: str, limit: int = MAX_ECHO_CHARACTERS) -> str:
    """At most `limit` characters, without control characters (they could forge lines of a log or a terminal)."""
    text = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after: int, *, status: int = 503, code: str = "overloaded",
               refusal: str = "") -> ApiError:
    kind = "rate_limit_error" if status == 429 else "server_error"
    error = ApiError(status, message, type=kind, code=code, headers={"Retry-After": str(retry_after)})
    error.refusal = refusal
    return error


def internal(message: str = "The server met an internal error; its log has the details.") -> ApiError:
    return ApiError(500, message, type="server_error", code="internal_error")


def from_exception(error: Exception) -> ApiError:
    """The reply for any exception from the layers below."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return invalid(str(error), error.param, error.code)
    if isinstance(error, QuarantinedError):  # clients do not retry a 422 on their own
        return ApiError(422, str(error), code="request_quarantined")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), type="server_error", code="engine_unavailable", headers={"Retry-After": "5"})
    if isinstance(error, AtollError):
        return ApiError(500, str(error), type="server_error", code="internal_error")
    return internal()


_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?P<where>.*))?$", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>[^`]+)`(?P<bound>[^,]*)(?:, got `(?P<got>[^`]+)`)?$")
_NOUNS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string", "array": "a list",
          "object": "an object"}


def from_validation(error: msgspec.ValidationError, kind: type | None = None) -> ApiError:
    """``Expected `int`, got `str` - at `$.messages[0].role` `` → a 400 with param ``messages.0.role``.

    `kind`: what the request was converted to; it knows the values that a field may have.
    """
    match = _PATH.match(str(error))
    what, where = (match["what"], match["where"]) if match else (str(error), None)
    param = None
    if where:
        path = where.replace("`key` in", "").strip().strip("`").removeprefix("$")
        param = re.sub(r"\[(\d+)\]", r".\1", path).replace("[...]", ".*").strip(".") or None
    if missing := re.match(r"Object missing required field `(\w+)`", what):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return invalid(f"{param} is required.", param)
    if param and (wrong := _WRONG_TYPE.match(what)):
        return invalid(f"{param} {_demand(wrong, param)}.", param)
    if param and kind is not None and what.startswith("Invalid enum value"):
        values = _values(msgspec.inspect.type_info(kind), param.split("."))
        given = shortened(what.removeprefix("Invalid enum value").strip().strip("'"), 64)
        one_of = "one of " if len(values) > 1 else ""
        return invalid(f"{param} must be {one_of}{', '.join(map(_quoted, values))}, got {given!r}.", param)
    what = shortened(what.replace("`", "'"))
    return invalid(f"{param}: {what}" if param else f"The request body is not valid: {what}", param)


def _demand(wrong: re.Match[str], param: str) -> str:
    """What a field of the wrong type must be. Clients read JSON's names of types, not Python's."""
    got, bound = wrong["got"], wrong["bound"].strip()
    if got == "null" and not param.rpartition(".")[2].isdigit():
        return "is required"
    if bound == "of length >= 1":
        return "must not be empty"
    expected = " or ".join(_NOUNS.get(name, name) for name in wrong["expected"].split(" | ") if name != "null")
    given = "a number with decimals" if got == "float" else _NOUNS.get(got, got) if got else None
    return f"must be {expected}{f' {bound}' if bound else ''}{f', got {given}' if given else ''}"


def _values(info: msgspec.inspect.Type, path: list[str]) -> tuple[Any, ...]:
    """The values that the field at `path` may have."""
    kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    for kind in kinds:
        if not path and isinstance(kind, msgspec.inspect.LiteralType):
            return kind.values
        if path and isinstance(kind, msgspec.inspect.ListType):
            return _values(kind.item_type, path[1:])
        if path and isinstance(kind, msgspec.inspect.StructType):
            return next((_values(field.type, path[1:]) for field in kind.fields if field.encode_name == path[0]), ())
    return ()


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
