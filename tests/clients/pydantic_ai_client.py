"""`pydantic-ai`: runs, streams, a tool, and an answer with a type."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import KEY, MODEL, QUESTION, URL, check, main, with_tools

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
SETTINGS = {"temperature": 0, "max_tokens": 48}
agent = Agent(OpenAIChatModel(MODEL, provider=provider), model_settings=SETTINGS)


@check
def run() -> None:
    result = agent.run_sync(QUESTION)
    assert "Paris" in result.output


@check
def run_with_history() -> None:
    first = agent.run_sync(QUESTION)
    assert agent.run_sync("Repeat that.", message_history=first.all_messages()).output


@check
def stream() -> None:
    async def ask() -> str:
        async with agent.run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert "Paris" in asyncio.run(ask())


@check
def responses_api() -> None:
    other = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=SETTINGS)
    assert "Paris" in other.run_sync(QUESTION).output


@with_tools
def an_answer_with_a_type() -> None:
    import pydantic

    class City(pydantic.BaseModel):
        name: str

    typed = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=City, model_settings=SETTINGS)
    assert isinstance(typed.run_sync(QUESTION).output, City)


if __name__ == "__main__":
    sys.exit(main())
