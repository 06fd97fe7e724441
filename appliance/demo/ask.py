"""Ask the endpoint one question with the real `openai` client, and measure the answer."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_TOKENS = 160


class AskError(Exception):
    """The endpoint did not answer; the message says how it failed."""


@dataclass
class Answer:
    """An answer and how fast it came. Times in seconds; the rate counts the tokens after the first."""

    question: str
    model: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: int = 0
    ttft_s: float = 0.0
    tokens_per_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def stream(url: str, key: str, answer: Answer) -> Iterator[str]:
    """Yield the pieces of the answer to `answer.question` as they arrive; at the end `answer` holds the measurements.

    Raises AskError.
    """
    import openai

    # Ignore proxies of the environment: the endpoint is on this machine.
    http = openai.DefaultHttpxClient(trust_env=False)
    try:
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120, http_client=http) as client:
            answer.model = client.models.list().data[0].id
            began = time.monotonic()
            first = last = 0.0
            chunks = client.chat.completions.create(
                model=answer.model,
                messages=[{"role": "user", "content": answer.question}],
                max_tokens=MAX_TOKENS,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in chunks:
                if chunk.usage is not None:
                    answer.tokens = chunk.usage.completion_tokens
                piece = chunk.choices[0].delta.content if chunk.choices else None
                if piece:
                    last = time.monotonic()
                    first = first or last
                    answer.pieces.append(piece)
                    yield piece
            if not answer.pieces:
                raise AskError("The model's answer was empty.")
            answer.ttft_s = first - began
            answer.tokens_per_s = (answer.tokens - 1) / (last - first) if last > first else 0.0
    except openai.OpenAIError as error:
        raise AskError(f"The endpoint {url} did not answer: {error}") from error
