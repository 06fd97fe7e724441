"""Structured output over HTTP. The model's weights are random: unguided it never writes JSON, so what is valid here is
valid because of the grammar."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest
from gateways import RunningServer, engine_process
from openai import OpenAI
from schemas import SCHEMAS, read, record

from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.openai.serving import ServedModel

HI = [{"role": "user", "content": "Hi"}]
PERSON = SCHEMAS["person"]


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    directory = tiny_llama_dir("gqa", max_position_embeddings=4096)
    with engine_process(directory, "--served-model-name", "tiny") as socket:
        model = ServedModel.load("tiny", directory, EngineClient(socket))
        server = RunningServer({"tiny": model}, limits=Limits())
        server.wait_ready()
        yield server
        server.stop()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0,
                _strict_response_validation=True) as client:
        yield client


def chat(client: OpenAI, seed: int = 0, *, max_tokens: int = 3000, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=HI, temperature=1.0, seed=seed, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def json_schema(schema: Any, *, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_is_an_instance_of_its_schema(client: OpenAI, name: str) -> None:
    schema = SCHEMAS[name]
    answer = chat(client, n=3, response_format=json_schema(schema))
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema_rs.validate(schema, read(choice.message.content))
    free = chat(client, max_tokens=50)
    with pytest.raises(ValueError, match=r"JSON|Expecting|Extra|Invalid"):
        json.loads(free.choices[0].message.content)


@pytest.mark.parametrize("fields", [
    {"structured_outputs": {"json": PERSON}}, {"structured_outputs": {"json": json.dumps(PERSON)}},
    {"guided_json": PERSON}, {"guided_json": json.dumps(PERSON), "guided_decoding_backend": "xgrammar"},
])  # fmt: skip
def test_vllms_spellings_of_a_schema(client: OpenAI, fields: dict[str, Any]) -> None:
    jsonschema_rs.validate(PERSON, json.loads(chat(client, extra_body=fields).choices[0].message.content))
    text = client.completions.create(model="tiny", prompt="x", max_tokens=500, seed=3, extra_body=fields)
    jsonschema_rs.validate(PERSON, json.loads(text.choices[0].text))


@pytest.mark.parametrize("fields", [
    {"structured_outputs": {"regex": "[a-c]{3,5}/\\d{2}"}}, {"guided_regex": "[a-c]{3,5}/\\d{2}"},
    {"guided_regex": "[a-c]{3,5}\\/\\d{2}"},
])  # fmt: skip
def test_regular_expressions(client: OpenAI, fields: dict[str, Any]) -> None:
    for seed in range(3):
        assert re.fullmatch("[a-c]{3,5}/[0-9]{2}", chat(client, seed, extra_body=fields).choices[0].message.content)


@pytest.mark.parametrize("spelling", ["structured_outputs", "guided_choice"])
def test_choices(client: OpenAI, spelling: str) -> None:
    choices = ["yes", "no", 'a "quoted" one\n', "예", "\\d"]
    fields = {spelling: {"choice": choices} if spelling == "structured_outputs" else choices}
    said = {choice.message.content for choice in chat(client, n=12, extra_body=fields).choices}
    assert said <= set(choices)
    assert len(said) > 1


@pytest.mark.parametrize("grammar", [
    'start: "SELECT " column " FROM " table\ncolumn: "a" | "b"\ntable: /t[0-9]/',
    'root ::= "SELECT " column " FROM " table\ncolumn ::= "a" | "b"\ntable ::= "t" [0-9]',
])  # fmt: skip
def test_grammars(client: OpenAI, grammar: str) -> None:
    for fields in ({"structured_outputs": {"grammar": grammar}}, {"guided_grammar": grammar}):
        assert re.fullmatch("SELECT [ab] FROM t[0-9]", chat(client, extra_body=fields).choices[0].message.content)


def test_any_object(client: OpenAI) -> None:
    """A model without sense hardly ends an object that may hold anything; cut short, it still is one so far."""
    ways: list[dict[str, Any]] = [{"response_format": {"type": "json_object"}},
                                  {"extra_body": {"structured_outputs": {"json_object": True}}}]
    for fields in ways:
        choice = chat(client, max_tokens=40, **fields).choices[0]
        assert choice.message.content.startswith("{")
        assert choice.finish_reason in ("length", "stop")


def test_a_stream_says_the_same_as_a_whole_answer(client: OpenAI) -> None:
    for name in ("invoice", "Korean", "steps"):
        asked = json_schema(SCHEMAS[name])
        whole = chat(client, 7, response_format=asked)
        chunks = list(chat(client, 7, response_format=asked, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_grammar_ends_the_answer_and_its_last_token_is_counted_and_shown(client: OpenAI) -> None:
    answer = chat(client, response_format=json_schema({"const": "abc"}), logprobs=True, top_logprobs=2,
                  extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert choice.message.content == '"abc"'
    assert "".join(entry.token for entry in choice.logprobs.content) == '"abc"'
    assert len(choice.token_ids) == answer.usage.completion_tokens == len(choice.logprobs.content)
    # The log-probabilities are the model's own, of before the mask: a forced token is not certain.
    assert any(entry.logprob < -0.5 for entry in choice.logprobs.content)


def test_end_tokens_wait_for_the_grammar_and_other_fields_for_nobody(client: OpenAI) -> None:
    asked = json_schema({"type": "array", "items": {"enum": [1, 2]}, "minItems": 30, "maxItems": 30})
    for fields in ({"min_tokens": 200}, {"ignore_eos": True}, {"logit_bias": {str(i): 100 for i in (0, 1, 2)}}):
        choice = chat(client, response_format=asked, extra_body=fields).choices[0]
        assert len(json.loads(choice.message.content)) == 30, fields
        assert choice.finish_reason == "stop"
    cut = chat(client, response_format=asked, max_tokens=9).choices[0]
    assert cut.finish_reason == "length"
    stopped = chat(client, response_format=asked, stop=[", "]).choices[0]
    assert re.fullmatch(r"\[[12]", stopped.message.content)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": json_schema({"type": "nonsense"})}, "response_format.json_schema.schema"),
    ({"response_format": json_schema({"type": "string", "format": "phone"})}, "response_format.json_schema.schema"),
    ({"response_format": json_schema({"$ref": "#/nowhere"})}, "response_format.json_schema.schema"),
    ({"response_format": json_schema({"$ref": "http://127.0.0.1/schema.json"})}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(5)}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(False)}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"guided_json": "{"}, "guided_json"), ({"guided_json": "5"}, "guided_json"),
    ({"guided_regex": "(("}, "guided_regex"), ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_regex": "(a)\\1"}, "guided_regex"), ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"), ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"), ({"guided_grammar": "root ::= ("}, "guided_grammar"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_a_grammar_that_cannot_be_used_is_a_400_that_names_the_field(
    server: RunningServer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    for path, body in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "x"})):
        asked = {"model": "tiny", "max_tokens": 5, "stream": stream, **body, **fields}
        reply = httpx.post(server.url + path, json=asked, timeout=30)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert (error["param"] or "").startswith(param), error
        assert error["message"]
    server.wait_idle()


def test_without_strict_what_cannot_be_enforced_is_ignored(client: OpenAI) -> None:
    schema = {"type": "string", "format": "phone", "maxLength": 3}
    with pytest.raises(openai.BadRequestError, match="phone"):
        chat(client, response_format=json_schema(schema))
    assert chat(client, response_format=json_schema(schema, strict=False)).choices[0].message.content.startswith('"')


def test_requests_beside_a_guided_one_say_what_they_say_alone(server: RunningServer, client: OpenAI) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(seed: int) -> str:
        guided = {"response_format": json_schema(SCHEMAS["invoice"])} if seed % 2 else {}
        return chat(client, seed, max_tokens=120, **guided).choices[0].message.content

    alone = [ask(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == alone
    server.wait_idle()


def test_a_client_that_leaves_takes_its_request_along(server: RunningServer, client: OpenAI) -> None:
    endless = json_schema({"type": "array", "items": {"enum": [1]}})
    stream = chat(client, response_format=endless, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    server.wait_idle()
    assert json.loads(chat(client, response_format=json_schema(record())).choices[0].message.content) == {}
