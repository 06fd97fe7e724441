"""Chat templates: the model's own Jinja template, in a sandbox with a time limit, with Hugging Face's conventions.

Only the template in the model directory is ever compiled; a request supplies data, never a template. The sandbox is
Jinja's immutable one (no access to Python's internals, no change of arguments), with two more limits: the time of a
rendering, checked at every attribute, subscript and call, and the size of its output.
"""

import contextvars
import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequestError, ModelError
from engine.message import msg
from engine.text.marks import TAIL, unmarked

RENDER_SECONDS = 5.0
RENDER_CHARACTERS = 32 << 20  # also the limit of any string or list that the template builds with `*`

# The variables that a request may set in a template, and their types. The names are those of the model families.
TEMPLATE_KWARGS: dict[str, type] = {
    "enable_thinking": bool,
    "thinking": bool,
    "preserve_thinking": bool,
    "reasoning_effort": str,
    "add_vision_id": bool,
    "date_string": str,
}
MAX_KWARG_CHARACTERS = 64

_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("render_deadline")


class ChatTemplate:
    """One compiled template. `render` is thread-safe."""

    def __init__(self, source: str, named_tokens: Mapping[str, str] | None = None) -> None:
        """Raises ModelError if the template does not compile. Sets `variables`: the names that the template reads."""
        self.source = source
        self._named_tokens = dict(named_tokens or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise ModelError(msg("The chat template does not compile: {error}", error=str(error)[:200])) from None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        seconds: float = RENDER_SECONDS,
        characters: int = RENDER_CHARACTERS,
    ) -> str:
        """The prompt text of normalised `messages` (see `engine.text.conversation`).

        With `continue_final_message` the prompt ends inside the last message instead of opening a new turn.
        Raises InvalidRequestError when the template refuses the messages or a bound is passed.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message cannot be combined with add_generation_prompt; set the latter to false.",
                    "continue_final_message",
                )
            # The template may trim the content: the space after TAIL shows whether it does.
            last = messages[-1]
            messages = [*messages[:-1], last | {"content": f"{last.get('content') or ''}{TAIL} "}]
        context = {
            **self._named_tokens,
            **(kwargs or {}),
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        rendered = self._render(context, seconds, characters)
        return _cut_at_tail(rendered) if continue_final_message else rendered

    def _render(self, context: dict[str, Any], seconds: float, characters: int) -> str:
        token = _deadline.set(time.monotonic() + seconds)
        try:
            pieces, size = [], 0
            for piece in self._template.generate(context):
                _check_clock()
                size += len(piece)
                if size > characters:
                    raise InvalidRequestError("The chat template's output is too long for these messages.", "messages")
                pieces.append(piece)
            return "".join(pieces)
        except InvalidRequestError:
            raise
        except RecursionError:
            raise InvalidRequestError("The messages are nested too deeply for the chat template.", "messages") from None
        except Exception as error:  # whatever made the template fail, the sender must change the data
            reason = unmarked(str(error))[:200]
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {reason}", "messages"
            ) from None
        finally:
            _deadline.reset(token)


def checked_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `chat_template_kwargs` of a request, if all are allowed. Raises InvalidRequestError naming the first that
    is not."""
    checked: dict[str, Any] = {}
    for name, value in (kwargs or {}).items():
        param = f"chat_template_kwargs.{name[:MAX_KWARG_CHARACTERS]}"
        kind = TEMPLATE_KWARGS.get(name)
        if kind is None:
            raise InvalidRequestError(
                f"{param} is not supported; this server accepts {', '.join(TEMPLATE_KWARGS)}.", param
            )
        if value is None:
            continue
        if not isinstance(value, kind) or (isinstance(value, str) and len(value) > MAX_KWARG_CHARACTERS):
            raise InvalidRequestError(
                f"{param} must be {'true or false' if kind is bool else 'a short string'}.", param
            )
        checked[name] = value
    return checked


def _cut_at_tail(rendered: str) -> str:
    at = rendered.rfind(TAIL)
    if at < 0:
        raise InvalidRequestError(
            "The chat template does not show the final message, so it cannot be continued.", "continue_final_message"
        )
    kept = rendered.startswith(f"{TAIL} ", at)
    return rendered[:at] if kept else rendered[:at].rstrip()


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, which checks the time limit whenever a template touches data or calls something."""

    intercepted_binops = frozenset({"*", "**"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_clock()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        _check_clock()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
        counts = [abs(x) for x in (left, right) if isinstance(x, int)]
        if operator == "**" and counts and max(counts) > 1024:
            raise jinja2.TemplateRuntimeError("exponent too large")
        if operator == "*" and sizes and counts and sizes[0] * counts[0] > RENDER_CHARACTERS:
            raise jinja2.TemplateRuntimeError("repetition too long")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """JSON without HTML escapes: models were trained on the plain form."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)


def _check_clock() -> None:
    if time.monotonic() > _deadline.get(float("inf")):
        raise InvalidRequestError("The chat template took too long for these messages.", "messages")
