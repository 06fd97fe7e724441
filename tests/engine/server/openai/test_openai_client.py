"""The real `openai` client, with strict validation of every reply, against the real small model."""

import math
from collections.abc import Iterator

import openai
import pytest
from gateways import RunningServer
from openai import OpenAI
from questions import ANSWER, BEGINNING
from questions import QUESTION as SURE_QUESTION

QUESTION = [{"role": "user", "content": SURE_QUESTION}]


@pytest.fixture(scope="module")
def client(smol_server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{smol_server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def reference(smollm2_dir):
    """transformers on the same weights, in fp32: what greedy decoding must say."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    return tokenizer, model


def test_models(client: OpenAI) -> None:
    models = client.models.list().data
    assert [m.id for m in models] == ["smollm2"]
    assert models[0].model_extra == {"root": "smollm2", "parent": None, "max_model_len": 2048, "context_length": 2048}
    assert client.models.retrieve("smollm2").owned_by == "atoll"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_chat_answers_like_transformers(client: OpenAI, reference) -> None:
    tokenizer, model = reference
    reply = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_completion_tokens=24)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    choice = reply.choices[0]
    assert choice.message.content == tokenizer.decode(expected, skip_special_tokens=True)
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == prompt["input_ids"].shape[1]
    assert reply.usage.completion_tokens == len(expected)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole(client: OpenAI) -> None:
    asked = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1


def test_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(model="smollm2", messages=QUESTION, temperature=0, max_tokens=24) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER


def test_n_choices_differ_and_repeat_with_the_seed(client: OpenAI) -> None:
    asked = {"model": "smollm2", "messages": QUESTION, "max_tokens": 12, "n": 3, "seed": 7, "temperature": 1.5}
    first = [c.message.content for c in client.chat.completions.create(**asked).choices]  # type: ignore[call-overload]
    again = [c.message.content for c in client.chat.completions.create(**asked).choices]  # type: ignore[call-overload]
    assert first == again
    assert len(set(first)) > 1
    streamed = ["", "", ""]
    reasons: list[str | None] = [None] * 3
    for chunk in client.chat.completions.create(**asked, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "nothing may follow the finish reason"
            streamed[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert streamed == first
    assert all(reasons)


def test_logprobs(client: OpenAI, reference) -> None:
    import torch

    tokenizer, model = reference
    reply = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert len(content) == 5
    assert "".join(t.token for t in content) == reply.choices[0].message.content
    assert bytes(b for t in content for b in t.bytes or []).decode() == reply.choices[0].message.content
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        expected = torch.log_softmax(model(**prompt).logits[0, -1], -1)
    best = expected.topk(3)
    assert [t.token for t in content[0].top_logprobs] == [tokenizer.decode([i]) for i in best.indices.tolist()]
    for got, want in zip(content[0].top_logprobs, best.values.tolist(), strict=True):
        assert math.isclose(got.logprob, want, abs_tol=0.15)  # the server computes in bf16


def test_completions_echo_and_score_a_prompt_as_lm_eval_does(smol_server: RunningServer, reference) -> None:
    """`max_tokens` 1 (and 0), `echo`, `logprobs` over token ids: the loglikelihood request of evaluation harnesses.

    Without strict validation: its types forbid the null before the first token that OpenAI itself sends.
    """
    import torch

    tokenizer, model = reference
    client = OpenAI(base_url=f"{smol_server.url}/v1", api_key="none", max_retries=0)
    ids = tokenizer("The capital of France is Paris")["input_ids"]
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    for max_tokens in (1, 0):
        reply = client.completions.create(
            model="smollm2", prompt=ids, max_tokens=max_tokens, echo=True, logprobs=2, temperature=0
        )
        choice = reply.choices[0]
        assert choice.text.startswith("The capital of France is Paris")
        assert choice.logprobs is not None
        values = choice.logprobs.token_logprobs or []
        assert len(values) == len(ids) + max_tokens
        assert values[0] is None
        for position in range(1, len(ids)):
            assert math.isclose(values[position] or 0, expected[position - 1, ids[position]].item(), abs_tol=0.3)
        assert choice.logprobs.text_offset == [len(tokenizer.decode(ids[:i])) for i in range(len(ids) + max_tokens)]
        for token, value, top in zip(
            choice.logprobs.tokens or [], values, choice.logprobs.top_logprobs or [], strict=True
        ):
            assert value is None or top[token] == value
        assert reply.usage is not None
        assert reply.usage.completion_tokens == max_tokens


def test_completions_take_all_forms_of_prompt(client: OpenAI, reference) -> None:
    tokenizer, _ = reference
    texts = ["One two three", "The sky is"]
    ids = [tokenizer(t)["input_ids"] for t in texts]

    def ask(prompt: object, **kwargs: object) -> list[str]:
        reply = client.completions.create(
            model="smollm2",
            prompt=prompt,
            max_tokens=6,
            temperature=0,
            **kwargs,  # type: ignore[call-overload]
        )
        assert [c.index for c in reply.choices] == list(range(len(reply.choices)))
        return [c.text for c in reply.choices]

    one = ask(texts[0])
    both = ask(texts)
    assert both[:1] == one
    assert ask(ids[0]) == one
    assert ask(ids) == both
    assert ask(texts, n=2) == [both[0], both[0], both[1], both[1]]
    assert ask(texts[0], echo=True) == [texts[0] + one[0]]


def test_completions_stream(smol_server: RunningServer, client: OpenAI) -> None:
    """Without strict validation: its type of `finish_reason` forbids the null that OpenAI itself streams."""
    lenient = OpenAI(base_url=f"{smol_server.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "smollm2", "prompt": ["One two three", "The sky is"], "max_tokens": 8, "temperature": 0}
    whole = [c.text for c in client.completions.create(**asked).choices]  # type: ignore[call-overload]
    streamed, ended = ["", ""], set()
    for chunk in lenient.completions.create(**asked, stream=True, stream_options={"include_usage": True}):  # type: ignore[call-overload]
        for choice in chunk.choices:
            assert choice.index not in ended
            streamed[choice.index] += choice.text
            if choice.finish_reason:
                assert choice.text == ""
                ended.add(choice.index)
    assert streamed == whole
    assert ended == {0, 1}
    assert chunk.usage.completion_tokens == 16


def test_stop_strings(client: OpenAI) -> None:
    asked = {"model": "smollm2", "prompt": "1 2 3 4", "temperature": 0, "max_tokens": 30}
    free = client.completions.create(**asked).choices[0].text  # type: ignore[call-overload]
    stop = free[6:9]
    choice = client.completions.create(**asked, stop=stop).choices[0]  # type: ignore[call-overload]
    assert choice.text == free[: free.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == stop
    shown = client.completions.create(**asked, stop=[stop], extra_body={"include_stop_str_in_output": True})  # type: ignore[call-overload]
    assert shown.choices[0].text == free[: free.index(stop) + len(stop)]


def test_vllms_extensions(client: OpenAI, reference) -> None:
    tokenizer, _ = reference
    ids = tokenizer("One two")["input_ids"]
    reply = client.completions.create(
        model="smollm2",
        prompt="One two",
        max_tokens=5,
        temperature=0,
        extra_body={
            "return_token_ids": True,
            "prompt_logprobs": 1,
            "min_tokens": 5,
            "ignore_eos": True,
            "top_k": 1,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "priority": 0,
            "cache_salt": "tenant",
        },
    )
    extra = reply.choices[0].model_extra or {}
    assert extra["prompt_token_ids"] == ids
    assert len(extra["token_ids"]) == 5
    assert extra["prompt_logprobs"][0] is None
    assert extra["prompt_logprobs"][1][str(ids[1])]["decoded_token"] == " two"
    chat = client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=3, temperature=0, extra_body={"return_token_ids": True}
    )
    assert tokenizer.decode((chat.choices[0].model_extra or {})["token_ids"]) == chat.choices[0].message.content
    assert (chat.model_extra or {})["prompt_token_ids"][0] == 1


def test_logit_bias_decides(client: OpenAI, reference) -> None:
    tokenizer, _ = reference
    token = tokenizer(" banana")["input_ids"][0]
    reply = client.completions.create(
        model="smollm2", prompt="I like", max_tokens=3, temperature=0, logit_bias={str(token): 100}
    )
    assert reply.choices[0].text == tokenizer.decode([token] * 3)


def test_continue_final_message(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2",
        temperature=0,
        max_tokens=3,
        messages=[*QUESTION, {"role": "assistant", "content": BEGINNING}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert (reply.choices[0].message.content or "").startswith(" Paris")


def test_errors_reach_the_client_whole(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "word " * 4000}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert caught.value.type == "invalid_request_error"
    assert "maximum context length is 2048 tokens" in str(caught.value)
    assert "context_length_exceeded" in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)


def test_the_rest_of_the_context_bounds_the_answer(tiny_server: RunningServer) -> None:
    client = OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0)
    reply = client.completions.create(model="tiny", prompt=[5] * 505, extra_body={"ignore_eos": True})
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.total_tokens == 512
    tiny_server.wait_idle()
