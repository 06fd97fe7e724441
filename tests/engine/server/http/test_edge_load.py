"""Many streams at once through a real gateway: none is lost, none is mixed up with another, and memory stays flat."""

import asyncio
from collections import Counter

import psutil
from edge_load import Edge, answers, edge, prompt_of, stream

STREAMS, TOKENS = 400, 40


def expected(number: int) -> str:
    prompt = prompt_of(number)
    return (prompt * (TOKENS // len(prompt) + 1))[:TOKENS]


async def texts(found: Edge, first: int) -> list[str]:
    return await asyncio.gather(*(stream(found.port, number, TOKENS) for number in range(first, first + STREAMS)))


def test_every_stream_gets_its_own_answer_and_memory_stays_flat() -> None:
    with edge() as found:
        resident: list[int] = []
        for turn in range(4):
            got = asyncio.run(texts(found, turn * STREAMS))
            wrong = Counter(text == expected(turn * STREAMS + i) for i, text in enumerate(got))
            assert wrong == {True: STREAMS}
            asyncio.run(answers(found.port, 16, 320))
            resident.append(psutil.Process(found.gateway.pid).memory_info().rss >> 20)
        assert resident[-1] - resident[1] <= 8, resident
