"""No field is dropped in silence: each that a client may send has an effect, is known to need none, or is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from gateways import RunningServer
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion

from engine.server.http.errors import ApiError
from engine.server.openai.request.body import parse
from engine.server.openai.request.refused_fields import _ALSO_NOTHING, _SWITCHES, HARMLESS, NOT_IN_MESSAGES, REFUSED
from engine.server.openai.request.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from engine.text.template import TEMPLATE_KWARGS

REPOSITORY = Path(__file__).resolve().parents[4]
CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
HI = [{"role": "user", "content": "hi"}]

# vLLM 0.33: ChatCompletionRequest and CompletionRequest
VLLM_BOTH = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval
"""
VLLM_CHAT = """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
    parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs return_prompt_text
"""
VLLM_TEXT = "prompt suffix prompt_embeds"
VLLM_BEFORE = "best_of guided_json guided_regex guided_choice guided_grammar guided_decoding_backend"


def declared(kind: type) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def post(server: RunningServer, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


# -- the lists


@pytest.mark.parametrize("kind, names", [
    (ChatRequest, {*OpenAIChat.__annotations__, *f"{VLLM_BOTH} {VLLM_CHAT} {VLLM_BEFORE}".split()}),
    (CompletionRequest, {*OpenAICompletion.__annotations__, *f"{VLLM_BOTH} {VLLM_TEXT} {VLLM_BEFORE}".split()}),
], ids=["chat", "completions"])  # fmt: skip
def test_every_field_of_openai_and_vllm_is_decided(kind: type, names: set[str]) -> None:
    """`echo` and the like are fields of the other endpoint only."""
    known = declared(ChatRequest) | declared(CompletionRequest) | HARMLESS.keys() | REFUSED.keys()
    assert names - known == set()
    assert not declared(kind) & HARMLESS.keys(), "declared, so it has an effect"
    assert not declared(kind) & REFUSED.keys()
    assert not HARMLESS.keys() & REFUSED.keys()


@pytest.mark.parametrize("language", ["en", "ko"])
def test_the_documents_list_what_is_accepted_without_effect_and_what_is_refused(language: str) -> None:
    text = (REPOSITORY / f"docs/{language}/api.md").read_text("utf-8")
    missing = [name for name in (*HARMLESS, *REFUSED, *declared(ChatRequest), *declared(CompletionRequest))
               if f"`{name}`" not in text]
    assert missing == []


# -- declared fields have an effect

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
RANDOM = {"temperature": 1.5, "seed": 11, "max_tokens": 12, "ignore_eos": True}
SALTED = {**GREEDY, "prompt": list(range(100, 164))}

# Field -> (what is sent beside it, its value), for which the answer differs or the field is refused by name.
BOTH: dict[str, tuple[dict, Any]] = {
    "model": (GREEDY, "org/tiny"),
    "n": (GREEDY, 2),
    "temperature": ({**RANDOM, "temperature": 0.1}, 3.0),
    "top_p": (RANDOM, 0.01),
    "top_k": (RANDOM, 1),
    "min_p": (RANDOM, 1.0),
    "presence_penalty": ({**GREEDY, "max_tokens": 60}, 2.0),
    "frequency_penalty": ({**GREEDY, "max_tokens": 60}, 2.0),
    "repetition_penalty": ({**GREEDY, "max_tokens": 60}, 50.0),
    "seed": (RANDOM, 12),
    "stop": (GREEDY, None),             # the value comes from the answer without it
    "stop_token_ids": (GREEDY, None),
    "ignore_eos": ({"temperature": 0, "max_tokens": 5, "logit_bias": {"2": 100}}, True),
    "max_tokens": (GREEDY, 5),
    "min_tokens": ({"temperature": 0, "max_tokens": 5, "logit_bias": {"2": 100}}, 4),
    "logit_bias": (GREEDY, {"77": 100}),
    "logprobs": (GREEDY, None),         # a switch for chat, a number for completions
    "prompt_logprobs": (GREEDY, 1),
    "skip_special_tokens": ({**GREEDY, "logit_bias": {"1": 100}}, False),
    "spaces_between_special_tokens": ({**GREEDY, "skip_special_tokens": False}, False),
    "include_stop_str_in_output": (GREEDY, None),
    "stream": (GREEDY, True),
    "stream_options": ({**GREEDY, "stream": True}, {"include_usage": True}),
    "response_format": (GREEDY, {"type": "json_object"}),
    "structured_outputs": (GREEDY, {"choice": ["yes", "no"]}),
    "guided_json": (GREEDY, {"type": "integer"}),
    "guided_regex": (GREEDY, "[a-c]{3}"),
    "guided_choice": (GREEDY, ["yes", "no"]),
    "guided_grammar": (GREEDY, 'start: "yes"'),
    "return_token_ids": (GREEDY, True),
    "priority": (GREEDY, 5),
    "cache_salt": (SALTED, "mine"),     # the same prompt was sent before, without it
}
CHAT_ONLY: dict[str, tuple[dict, Any]] = {
    "messages": (GREEDY, [{"role": "user", "content": "bye"}]),
    "max_completion_tokens": (GREEDY, 5),
    "top_logprobs": ({**GREEDY, "logprobs": True}, 2),
    "tools": ({**GREEDY, "tool_choice": "none"}, [{"type": "function", "function": {"name": "f"}}]),
    "tool_choice": (GREEDY, "required"),
    "reasoning_effort": (GREEDY, "high"),
    "chat_template_kwargs": (GREEDY, {"enable_thinking": True}),
    "thinking_token_budget": (GREEDY, 5),
    "add_generation_prompt": (GREEDY, False),
    "continue_final_message": ({**GREEDY, "add_generation_prompt": False}, True),
}
ELSEWHERE = {"parallel_tool_calls", "include_reasoning"}  # in test_tool_calls.py: this model makes no calls
TEXT_ONLY: dict[str, tuple[dict, Any]] = {
    "prompt": (GREEDY, "bye"),
    "echo": (GREEDY, True),
    "add_special_tokens": (GREEDY, False),
}


def outcome(reply: httpx.Response) -> Any:
    """What a client sees, without what no two answers share."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        lines = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        return [{k: v for k, v in line.items() if k not in ("id", "created")} for line in lines]
    return reply.status_code, {k: v for k, v in reply.json().items() if k not in ("id", "created")}


@pytest.mark.parametrize("path, only", [(CHAT, CHAT_ONLY), (TEXT, TEXT_ONLY)], ids=["chat", "completions"])
def test_the_tables_name_every_declared_field(path: str, only: dict) -> None:
    assert BOTH.keys() | only.keys() | (ELSEWHERE if path == CHAT else set()) == declared(
        ChatRequest if path == CHAT else CompletionRequest)
    assert declared(SamplingFields) == BOTH.keys() - {"logprobs"}


@pytest.mark.parametrize("path, name", [
    *((CHAT, name) for name in {**BOTH, **CHAT_ONLY}),
    *((TEXT, name) for name in {**BOTH, **TEXT_ONLY} if name != "add_special_tokens"),  # this tokenizer adds none
])
def test_every_declared_field_has_an_effect(tiny_server: RunningServer, path: str, name: str) -> None:
    table = {**BOTH, **(CHAT_ONLY if path == CHAT else TEXT_ONLY)}
    beside, value = table[name]
    prompt = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    if path == CHAT and "prompt" in beside:
        prompt, beside = {"messages": [{"role": "user", "content": "a b c " * 30}]}, GREEDY
    base = {**prompt, **beside}
    if name in ("stop", "include_stop_str_in_output"):
        text = text_of(post(tiny_server, path, base))
        value = text[len(text) // 2]
        if name != "stop":
            base, value = {**base, "stop": value}, True
    elif name == "stop_token_ids":
        tokens = post(tiny_server, path, {**base, "return_token_ids": True}).json()["choices"][0]["token_ids"]
        value = [tokens[4]]
    elif name == "logprobs":
        value = True if path == CHAT else 1
    post(tiny_server, path, base)  # once for the prefix cache
    without = post(tiny_server, path, base)
    assert without.status_code == 200, without.text
    assert outcome(without) == outcome(post(tiny_server, path, base)), "two alike requests differ already"
    reply = post(tiny_server, path, {**base, name: value})
    if reply.status_code != 200:
        assert reply.json()["error"]["param"].startswith((name, f"{name}.")), reply.text
    assert outcome(reply) != outcome(without)


@pytest.mark.parametrize("value, special", [(None, True), (True, True), (False, False)])
def test_add_special_tokens_reaches_the_tokenizer(
    tiny_server: RunningServer, value: bool | None, special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_server.gateway.models["tiny"].tokenizer
    asked, encode = [], tokenizer.encode_text
    monkeypatch.setattr(tokenizer, "encode_text", lambda text, special: asked.append(special) or encode(text, special))
    assert post(tiny_server, TEXT, {"prompt": "hi", "max_tokens": 1, "add_special_tokens": value}).is_success
    assert asked == [special]


def text_of(reply: httpx.Response) -> str:
    choice = reply.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


# -- refused fields


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind, rest", [(ChatRequest, {"messages": HI}), (CompletionRequest, {"prompt": "a"})],
                         ids=["chat", "completions"])
def test_refused_by_name_unless_it_asks_for_nothing(kind: type, rest: dict, name: str) -> None:
    for refuse_unknown in (True, False):
        for value in ({"budget_tokens": 5}, [7], 3, "x", True):
            if name == "separate_reasoning" and value is True:
                value = False
            with pytest.raises(ApiError) as caught:
                parse(json.dumps({**rest, name: value}).encode(), kind, refuse_unknown=refuse_unknown)
            assert caught.value.status == 400
            assert caught.value.detail.param == name
            assert caught.value.detail.message.startswith(f"{name} is not supported by this server: ")
        nothing = _SWITCHES.get(name, (False, "", [], {}, *_ALSO_NOTHING.get(name, ())))
        for value in (None, *nothing):
            parse(json.dumps({**rest, name: value}).encode(), kind, refuse_unknown=refuse_unknown)


@pytest.mark.parametrize("fields, param", [
    ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"thinking_token_budget": 100}, "thinking_token_budget"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking"),
    ({"chat_template_kwargs": {"thinking_budget": 100}}, "chat_template_kwargs.thinking_budget"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"enable_thinking": False}, "enable_thinking"),
    ({"store": True}, "store"),
    ({"extra_body": {"top_k": 5}}, "extra_body"),
    ({"echo": True}, "echo"),
    ({"prompt": "x"}, "prompt"),
    ({"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, *HI]},
     "messages.0.function_call"),
    ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
])  # fmt: skip
def test_what_used_to_be_dropped_is_refused(tiny_server: RunningServer, fields: dict, param: str) -> None:
    reply = post(tiny_server, CHAT, {"messages": HI, "max_tokens": 2, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_unknown_fields_are_refused_with_the_nearest_name(tiny_server: RunningServer) -> None:
    reply = post(tiny_server, CHAT, {"messages": HI, "max_tokens": 2, "temprature": 0.5})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "temprature", "unknown_parameter")
    assert "did you mean temperature?" in error["message"]
    reply = post(tiny_server, TEXT, {"prompt": "a", "max_completion_tokens": 5})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_completion_tokens")
    assert reply.json()["error"]["message"].endswith("; did you mean max_tokens?")
    reply = post(tiny_server, CHAT, {"messages": HI, "prompt": "x"})
    assert reply.json()["error"]["message"].endswith("; did you mean messages?")
    reply = post(tiny_server, CHAT, {"messages": HI, "x" * 100_000: 1})
    assert reply.status_code == 400
    assert len(reply.content) < 700


def test_whole_numbers_may_be_written_with_decimals(tiny_server: RunningServer) -> None:
    """Languages with one type of number write all of them so."""
    reply = post(tiny_server, CHAT, {"messages": HI, "max_tokens": 2.0, "seed": 1.0, "top_k": 5.0, "n": 1.0})
    assert reply.status_code == 200, reply.text
    assert post(tiny_server, CHAT, {"messages": HI, "max_tokens": 2.5}).status_code == 400


def test_structured_outputs_as_vllm_writes_them_out() -> None:
    """With every field of its own, most of them null or false."""
    asked = {"json": None, "regex": "a", "choice": None, "grammar": None, "json_object": None, "structural_tag": None,
             "disable_any_whitespace": False, "disable_additional_properties": False, "whitespace_pattern": None,
             "disable_fallback": False, "_backend": None, "_backend_was_auto": False}
    assert parse(json.dumps({"messages": HI, "structured_outputs": asked}).encode(), ChatRequest).structured_outputs
    for name, value in (("structural_tag", "{}"), ("whitespace_pattern", " "), ("regexp", "a"),
                        ("disable_additional_properties", True)):
        with pytest.raises(ApiError, match=rf"structured_outputs\.{name} ") as caught:
            parse(json.dumps({"messages": HI, "structured_outputs": {"regex": "a", name: value}}).encode(), ChatRequest)
        assert caught.value.detail.param == f"structured_outputs.{name}"


@pytest.mark.parametrize("given", [
    {"type": "json_object", "schema": {"type": "array"}}, {"type": "json_schema", "name": "x", "schema": {}},
    {"type": "json_schema", "json_schema": {"schema": {}}, "strict": True},
])  # fmt: skip
def test_a_schema_beside_json_schema_is_refused_not_dropped(given: dict) -> None:
    with pytest.raises(ApiError, match=r"belongs into .*json_schema"):
        parse(json.dumps({"messages": HI, "response_format": given}).encode(), ChatRequest, refuse_unknown=False)


def test_a_setting_lets_unknown_fields_pass_but_never_those_that_matter() -> None:
    body = {"messages": HI, "something_new": 1, "stream_options": {"new": 1}}
    with pytest.raises(ApiError):
        parse(json.dumps(body).encode(), ChatRequest)
    assert parse(json.dumps(body).encode(), ChatRequest, refuse_unknown=False).messages
    for name in ("echo", "bad_words"):
        with pytest.raises(ApiError):
            parse(json.dumps({**body, name: ["x"]}).encode(), ChatRequest, refuse_unknown=False)


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_fields_change_nothing(tiny_server: RunningServer, name: str) -> None:
    body = {"messages": HI, **GREEDY}
    for value in (True, "x", {"x": 1}):
        assert outcome(post(tiny_server, CHAT, {**body, name: value})) == outcome(post(tiny_server, CHAT, body))


# -- tokenize


def test_tokenize_takes_a_whole_chat_request_and_no_field_of_the_other_form(tiny_server: RunningServer) -> None:
    chat = {"messages": HI, "temperature": 0.5, "stream": True, "user": "u"}
    assert post(tiny_server, TOKENIZE, chat).json() == post(tiny_server, TOKENIZE, {"messages": HI}).json()
    for body, param in [
        ({**chat, "bad_words": ["x"]}, "bad_words"), ({**chat, "reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"prompt": "a", "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"prompt": "a", "nothing_known": 1}, "nothing_known"),
    ]:
        reply = post(tiny_server, TOKENIZE, body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.parametrize("kind, rest", [(TokenizeRequest, {"prompt": "a"}), (DetokenizeRequest, {"tokens": [1]})])
def test_unknown_fields_of_the_tokenizer_are_refused(kind: type, rest: dict) -> None:
    with pytest.raises(ApiError, match="something_new"):
        parse(json.dumps({**rest, "something_new": 1}).encode(), kind)


@pytest.mark.parametrize("field", NOT_IN_MESSAGES)
def test_fields_of_messages_that_would_change_the_prompt(field: str) -> None:
    body: Callable[[Any], bytes] = lambda value: json.dumps({"messages": [{**HI[0], field: value}]}).encode()  # noqa: E731
    with pytest.raises(ApiError, match=field):
        parse(body({"x": 1}), ChatRequest)
    assert parse(body(None), ChatRequest).messages


# -- what goes into the template


def test_template_settings_reach_the_prompt_or_are_refused(smol_server: RunningServer) -> None:
    """This model's template reads none of them: to switch off what it does not do is fine, all else is not."""
    for name, kind in TEMPLATE_KWARGS.items():
        value = "x" if kind is str else True
        reply = post(smol_server, TOKENIZE, {"messages": HI, "chat_template_kwargs": {name: value}})
        assert reply.json()["error"]["param"] == f"chat_template_kwargs.{name}"
        if kind is bool:
            assert post(smol_server, TOKENIZE, {"messages": HI, "chat_template_kwargs": {name: False}}).is_success
    assert post(smol_server, TOKENIZE, {"messages": HI, "reasoning_effort": "none"}).is_success
