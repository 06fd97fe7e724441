"""The `openai` package, strictly validating."""

import sys

import openai
from report import KEY, MODEL, QUESTION, URL, WEATHER, check, main, with_tools

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True)
plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": WEATHER}}


@check
def models() -> None:
    [model] = client.models.list().data
    assert model.id == MODEL
    assert model.model_extra["max_model_len"] == 2048
    assert client.models.retrieve(MODEL).id == MODEL


@check
def chat() -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24)
    assert "Paris" in reply.choices[0].message.content
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


@check
def streamed_chat() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24, stream_options={"include_usage": True}
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content
    assert "Paris" in text
    assert final.usage.completion_tokens > 0


@check
def completion() -> None:
    reply = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4)
    assert "Paris" in reply.choices[0].text


@check
def responses() -> None:
    reply = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24, store=False)
    assert "Paris" in reply.output_text
    events = list(client.responses.create(
        model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24, store=False, stream=True))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")


@check
def embeddings() -> None:
    strict = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    packed = plain.embeddings.create(model=MODEL, input=["one", "two"])  # base64, by itself
    assert len(strict.data) == len(packed.data) == 2
    for one, other in zip(strict.data, packed.data, strict=True):
        assert len(one.embedding) == len(other.embedding) > 100
        assert sum(a * b for a, b in zip(one.embedding, other.embedding, strict=True)) > 0.99
    assert len(plain.embeddings.create(model=MODEL, input="one", dimensions=8).data[0].embedding) == 8


@check
def errors() -> None:
    for call, kind in (
        (lambda: client.models.retrieve("other"), openai.NotFoundError),
        (lambda: client.chat.completions.create(model=MODEL, messages=MESSAGES, n=0), openai.BadRequestError),
        (lambda: plain.with_options(api_key="wrong").models.list(), openai.AuthenticationError),
    ):
        try:
            call()
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


@with_tools
def a_forced_tool_call() -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=100)
    [call, *_] = reply.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert reply.choices[0].finish_reason == "tool_calls"


@with_tools
def a_parsed_answer() -> None:
    import pydantic

    class City(pydantic.BaseModel):
        name: str

    reply = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City, max_tokens=100)
    assert isinstance(reply.choices[0].message.parsed, City)


if __name__ == "__main__":
    sys.exit(main())
