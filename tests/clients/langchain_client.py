"""`langchain-openai`: chat, streams, embeddings, and an agent with a tool."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from report import KEY, MODEL, QUESTION, URL, check, main, with_tools

COMMON = {"base_url": f"{URL}/v1", "api_key": KEY, "model": MODEL, "max_retries": 0}
chat_model = ChatOpenAI(**COMMON, temperature=0, max_tokens=48)


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    return f"It is sunny in {city}."


@check
def invoke() -> None:
    answer = chat_model.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0


@check
def stream() -> None:
    pieces = list(chat_model.stream(QUESTION, stream_usage=True))
    assert len(pieces) > 3
    assert "Paris" in "".join(piece.content for piece in pieces)
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) > 0


@check
def batch() -> None:
    assert all("Paris" in answer.content for answer in chat_model.batch([QUESTION] * 4))


@check
def completion() -> None:
    assert "Paris" in OpenAI(**COMMON, temperature=0, max_tokens=4).invoke("The capital of France is")


@check
def responses_api() -> None:
    answer = ChatOpenAI(**COMMON, temperature=0, max_tokens=24, use_responses_api=True, store=False).invoke(QUESTION)
    assert "Paris" in answer.text


@check
def embeddings() -> None:
    made = OpenAIEmbeddings(**COMMON, check_embedding_ctx_length=False)  # its own check asks the Internet
    near, far = made.embed_documents(["The capital of France is Paris.", "def add(a, b): return a + b"])
    asked = made.embed_query("Paris is the capital of France.")
    assert len(near) == len(far) == len(asked) > 100


@check
def a_prompt_that_is_too_long_is_told_as_such() -> None:
    said = ""
    try:
        chat_model.invoke("word " * 5000)
    except Exception as error:
        said = str(error)
    assert "context_length_exceeded" in said


@check
def tools_are_offered_and_an_answer_without_a_call_is_one() -> None:
    assert chat_model.bind_tools([weather]).invoke(QUESTION).content


@with_tools
def an_agent_calls_a_tool_and_answers() -> None:
    messages = [HumanMessage("What is the weather in Paris? Use the tool.")]
    called = chat_model.bind_tools([weather], tool_choice="any").invoke(messages)
    [call, *_] = called.tool_calls
    assert call["name"] == "weather"
    messages += [called, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert chat_model.invoke(messages).content


@with_tools
def the_agent_of_langchain_itself() -> None:
    from langchain.agents import create_agent

    result = create_agent(chat_model, [weather]).invoke({"messages": [HumanMessage(QUESTION)]})
    assert result["messages"][-1].content


@with_tools
def structured_output() -> None:
    import pydantic

    class City(pydantic.BaseModel):
        name: str

    assert isinstance(chat_model.with_structured_output(City).invoke(QUESTION), City)


if __name__ == "__main__":
    sys.exit(main())
