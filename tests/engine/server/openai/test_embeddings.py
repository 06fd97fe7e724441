"""`/v1/embeddings`: the real `openai` client in front of the real small model, and what the edge refuses."""

import base64
import concurrent.futures
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from gateways import RunningServer
from openai import OpenAI
from questions import ANSWER, QUESTION
from test_openai_errors import check, post

from engine.server.http.limits import Limits
from engine.server.openai.serving import ServedModel

sys.path.insert(0, str(Path(__file__).parents[2]))
import oracle

TEXTS = ["The capital of France is Paris.", "Paris is the capital of France.", "def add(a, b): return a + b"]
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def server(smol_server: RunningServer, smollm2_dir: Path) -> Iterator[RunningServer]:
    """One engine under two names: what `--pooling last` and `--pooling mean` make of it."""
    client = type(smol_server.client)(smol_server.client.path)
    models = {f"smol-{pooling}": ServedModel.load(f"smol-{pooling}", smollm2_dir, client, pooling=pooling)
              for pooling in ("last", "mean")}
    server = RunningServer(models, limits=Limits(max_embedding_inputs=300, max_embeddings_at_a_time=16))
    server.wait_ready()
    yield server
    server.stop()


def client_of(server: RunningServer, **settings: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **settings)


def expected(smollm2_dir: Path, text: str, pooling: str, dimensions: int | None = None) -> np.ndarray:
    from transformers import AutoTokenizer

    return oracle.embedding(smollm2_dir, AutoTokenizer.from_pretrained(smollm2_dir)(text).input_ids, pooling,
                            dimensions).numpy()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_client_gets_the_vectors_of_transformers(server: RunningServer, smollm2_dir: Path, pooling: str) -> None:
    """The client asks for base64 by itself, and strictly checks a reply with numbers. The server computes in bf16."""
    model = f"smol-{pooling}"
    with client_of(server) as client, client_of(server, _strict_response_validation=True) as strict:
        packed = client.embeddings.create(model=model, input=TEXTS)
        plain = strict.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    assert (packed.model, packed.object) == (model, "list")
    assert [d.index for d in packed.data] == [0, 1, 2]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 15
    assert packed.usage == plain.usage
    for text, one, other in zip(TEXTS, packed.data, plain.data, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, atol=2e-3)  # two batches of bf16
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
        assert np.dot(one.embedding, expected(smollm2_dir, text, pooling)) > 0.995


def test_every_form_of_input_gives_the_same_vector(server: RunningServer) -> None:
    ids = httpx.post(f"{server.url}/tokenize", json={"model": "smol-mean", "prompt": TEXTS[0]}).json()["tokens"]
    for given, count in ((TEXTS[0], 1), ([TEXTS[0]], 1), (ids, 1), ([ids, ids], 2)):
        reply = post(server, PATH, {"model": "smol-mean", "input": given})
        assert reply.status_code == 200, reply.text
        data = reply.json()["data"]
        assert len(data) == count
        assert reply.json()["usage"]["prompt_tokens"] == count * len(ids)
        for one in data:
            np.testing.assert_allclose(one["embedding"], data[0]["embedding"], atol=2e-3)


def test_base64_is_little_endian_float32(server: RunningServer) -> None:
    body = {"model": "smol-last", "input": TEXTS[0]}
    plain = post(server, PATH, body).json()["data"][0]["embedding"]
    packed = post(server, PATH, {**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed), "<f4"), plain, atol=2e-3)


def test_dimensions_cut_and_normalise_again(server: RunningServer, smollm2_dir: Path) -> None:
    with client_of(server) as client:
        vector = client.embeddings.create(model="smol-mean", input=TEXTS[0], dimensions=64).data[0].embedding
        assert len(vector) == 64
        assert np.dot(vector, expected(smollm2_dir, TEXTS[0], "mean", 64)) > 0.995
        assert len(client.embeddings.create(model="smol-mean", input="x", dimensions=576).data[0].embedding) == 576
        with pytest.raises(openai.BadRequestError, match="between 1 and 576") as caught:
            client.embeddings.create(model="smol-mean", input=TEXTS[0], dimensions=577)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize("name", ["normalize", "use_activation"])
def test_a_vector_may_keep_its_length(server: RunningServer, name: str) -> None:
    reply = post(server, PATH, {"model": "smol-mean", "input": TEXTS[0], name: False})
    assert np.linalg.norm(reply.json()["data"][0]["embedding"]) > 1.5


def test_many_inputs_beside_a_chat_keep_their_order(server: RunningServer) -> None:
    """More than run at a time, of many lengths; the chat says what it says alone."""
    texts = [f"{i} " * (1 + i % 40) for i in range(80)]
    with client_of(server, timeout=120) as client, concurrent.futures.ThreadPoolExecutor() as pool:
        many = pool.submit(client.embeddings.create, model="smol-mean", input=texts)
        answer = client.chat.completions.create(
            model="smol-last", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=24)
        assert answer.choices[0].message.content == ANSWER
        found = many.result()
        assert [d.index for d in found.data] == list(range(80))
        for i in (0, 57, 79):
            alone = client.embeddings.create(model="smol-mean", input=texts[i]).data[0].embedding
            assert np.dot(found.data[i].embedding, alone) > 0.999
    server.wait_idle()


def test_a_client_that_leaves_frees_the_engine(server: RunningServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{PATH}", json={"model": "smol-mean", "input": ["word " * 1500] * 40}, timeout=1)
    server.wait_idle()


def test_the_context_may_be_filled_to_the_last_token(server: RunningServer) -> None:
    assert post(server, PATH, {"model": "smol-last", "input": [5] * 2048}).status_code == 200
    too_long = post(server, PATH, {"model": "smol-last", "input": [[5], [5] * 2049]})
    check(too_long, 400, "input.1", "context_length_exceeded")
    text = post(server, PATH, {"model": "smol-last", "input": "x" * 100_000})
    assert text.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input.1", "must not be empty"),
        ({"input": [[1], []]}, "input.1", "must not be empty"),
        ({"input": [1, "a"]}, "input.0", "must be a string"),
        ({"input": ["a", None]}, "input.0", "must be a string"),
        ({"input": [True]}, "input.0", "must be a string"),
        ({"input": 5}, "input", "must be a string or a list"),
        ({}, "input", "required"),
        ({"input": [10**9]}, "input", "not a token"),
        ({"input": ["a"] * 301}, "input", "At most 300 inputs"),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1 and 576"),
        ({"input": "a", "dimensions": 1.5}, "dimensions", "must be an integer"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "must be one of"),
        ({"input": "a", "normalize": True, "use_activation": False}, "normalize", "two names"),
        ({"input": "a", "truncate_prompt_tokens": 10}, "truncate_prompt_tokens", "not supported"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "float32"),
        ({"input": "a", "messages": [{"role": "user", "content": "hi"}]}, "messages", "not a field of this endpoint"),
        ({"input": "a", "priority": 3}, "priority", "order of their arrival"),
        ({"input": "a", "cache_salt": "s" * 300}, "cache_salt", "256 characters"),
    ],
)
def test_what_is_wrong_is_named(server: RunningServer, fields: dict, param: str, words: str) -> None:
    reply = post(server, PATH, {"model": "smol-mean", **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert words in reply.json()["error"]["message"]


def test_fields_that_change_nothing_pass(server: RunningServer) -> None:
    reply = post(server, PATH, {"model": "smol-mean", "input": "a", "user": "u", "embed_dtype": "float32",
                                "endianness": "native", "dimensions": None, "stream": False})
    assert reply.status_code == 200, reply.text


def test_an_unknown_model_is_a_404(server: RunningServer) -> None:
    check(post(server, PATH, {"model": "nope", "input": "a"}), 404, "model", "model_not_found")


def test_metrics_count_prompts_and_no_answers(server: RunningServer) -> None:
    def counted(name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    server.wait_idle()
    before = {name: counted(name) for name in ("prompt_tokens_total", "generation_tokens_total")}
    stops = counted("request_success_total")
    used = post(server, PATH, {"model": "smol-mean", "input": TEXTS}).json()["usage"]["prompt_tokens"]
    server.wait_idle()
    assert counted("prompt_tokens_total") - before["prompt_tokens_total"] == used
    assert counted("generation_tokens_total") == before["generation_tokens_total"]
    assert counted("request_success_total") - stops == 3


def test_the_document_describes_the_route(server: RunningServer) -> None:
    schema = json.loads(httpx.get(f"{server.url}/openapi.json").text)["components"]["schemas"]["EmbeddingRequest"]
    assert schema["required"] == ["input"]
    text, items = schema["properties"]["input"]["anyOf"]
    assert text == {"type": "string"}
    assert [kind["type"] for kind in items["items"]["anyOf"]] == ["string", "integer", "array"]
