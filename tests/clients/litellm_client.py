"""`litellm`, as its provider `openai` and as its provider `hosted_vllm`."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the Internet for prices

import litellm
from report import KEY, MODEL, QUESTION, URL, WEATHER, check, main, with_tools

litellm.telemetry = False
litellm.suppress_debug_info = True
COMMON = {"api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
ASKED = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
PROVIDERS = ("openai", "hosted_vllm")


@check
def chat() -> None:
    for provider in PROVIDERS:
        reply = litellm.completion(model=f"{provider}/{MODEL}", **ASKED, **COMMON)
        assert "Paris" in reply.choices[0].message.content
        assert reply.usage.completion_tokens > 0


@check
def stream() -> None:
    for provider in PROVIDERS:
        chunks = litellm.completion(model=f"{provider}/{MODEL}", stream=True, **ASKED, **COMMON)
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@check
def text_completion() -> None:
    reply = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="The capital of France is", temperature=0, max_tokens=4,
        **COMMON)
    assert "Paris" in reply.choices[0].text


@check
def embedding() -> None:
    for provider in PROVIDERS:
        reply = litellm.embedding(model=f"{provider}/{MODEL}", input=["one", "two"], **COMMON)
        assert [len(each["embedding"]) > 100 for each in reply.data] == [True, True]


@check
def errors_are_told_apart() -> None:
    for wrong, kind in (
        ({"model": "openai/other"}, litellm.NotFoundError),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, litellm.ContextWindowExceededError),
        ({"api_key": "wrong"}, litellm.AuthenticationError),
    ):
        try:
            litellm.completion(**{"model": f"openai/{MODEL}", **ASKED, **COMMON, **wrong})
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


@with_tools
def a_forced_tool_call() -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": WEATHER}}
    for provider in PROVIDERS:
        reply = litellm.completion(
            model=f"{provider}/{MODEL}", tools=[tool], tool_choice="required", **{**ASKED, "max_tokens": 100}, **COMMON)
        assert reply.choices[0].message.tool_calls[0].function.name == "weather"


if __name__ == "__main__":
    sys.exit(main())
