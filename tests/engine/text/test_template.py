"""Chat templates: Hugging Face's text for friendly messages, a sandbox for hostile ones."""

import json
import time
from pathlib import Path

import pytest

from engine.errors import InvalidRequestError, ModelError
from engine.text.template import ChatTemplate, checked_kwargs

DATA = Path(__file__).parent / "data"
GOLDENS = json.loads((DATA / "goldens.json").read_text(encoding="utf-8"))
FILES = {"gemma4-31b": "gemma-4-31b.jinja", "gemma4-e2b": "gemma-4-e2b.jinja", "qwen3.6": "qwen3.6.jinja"}
USER = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("name", sorted(GOLDENS["rendered"]))
def test_published_templates_render_as_in_transformers(name: str) -> None:
    family, case = name.split("/")
    template = ChatTemplate((DATA / FILES[family]).read_text(encoding="utf-8"), {"bos_token": "<bos>"})
    given = dict(GOLDENS["cases"][case])
    messages, tools = given.pop("messages"), given.pop("tools", None)
    assert template.render(messages, tools=tools, kwargs=given) == GOLDENS["rendered"][name]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}  {{ m.content }}\n  {% endfor %}end",  # trim_blocks, lstrip_blocks
        "{{ {'b': '<é한>', 'a': [1, none]} | tojson }}",  # no HTML escapes, no ASCII escapes
        "{{ tools | tojson(indent=2) }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
        "{{ strftime_now('%Y') }}",
        "{{ bos_token }}{{ nothing is defined }}{{ messages[0]['missing'] is defined }}",
        "{% if add_generation_prompt %}go{% endif %}",
    ],
)
def test_small_templates_render_as_in_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*USER, {"role": "assistant", "content": " b "}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": "한"}}}]
    expected, _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages, tools=tools) == expected[0]


@pytest.mark.parametrize("content", ["", "The answer is", "The answer is ", " x\n\n"])
@pytest.mark.parametrize("filtered", ["m.content", "m.content | trim"])
def test_continue_final_message_as_in_transformers(content: str, filtered: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ {filtered} }}}}<end>\n{{% endfor %}}"
    messages = [*USER, {"role": "assistant", "content": content}]
    expected, _ = render_jinja_template([messages], chat_template=source, continue_final_message=True)
    rendered = ChatTemplate(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected[0]


def test_continue_final_message_excludes_a_generation_prompt() -> None:
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        ChatTemplate("{{ messages[0].content }}").render(USER, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{% include '/etc/passwd' %}",
        "{{ 'x' * 999999999 }}",
        "{{ 9 ** 9999999 }}",
        "{{ raise_exception('Roles must alternate') }}",
        "{{ undefined_function() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_must_not_do_is_the_senders_error(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source).render(USER)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 400


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(InvalidRequestError, match="Roles must alternate"):
        ChatTemplate("{{ raise_exception('Roles must alternate') }}").render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = messages[0] %}{% endfor %}{% endfor %}",
    ],
)
def test_time_is_bounded(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"too long"):
        ChatTemplate(source).render(USER, seconds=0.3)
    assert time.monotonic() - started < 10


def test_output_is_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="too long"):
        ChatTemplate("{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}").render(USER, characters=1000)


def test_a_broken_template_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": []},
        {"chat_template": "x"},
        {"bos_token": "x"},
        {"enable_thinking": "yes"},
        {"enable_thinking": 1},
        {"reasoning_effort": ["high"]},
        {"reasoning_effort": "x" * 65},
        {"__class__": True},
        {"x" * 1000: 1},
    ],
)
def test_only_listed_kwargs_reach_a_template(kwargs: dict) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checked_kwargs(kwargs)
    assert caught.value.param is not None
    assert caught.value.param.startswith("chat_template_kwargs.")
    assert len(str(caught.value)) < 400


def test_listed_kwargs_pass() -> None:
    given = {"enable_thinking": False, "reasoning_effort": "high", "preserve_thinking": None}
    assert checked_kwargs(given) == {"enable_thinking": False, "reasoning_effort": "high"}
