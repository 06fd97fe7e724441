"""Which of a model's engines gets a request: the least busy one, unless another knows the prompt's beginning."""

from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.server.ipc import replicas as r
from engine.server.ipc.client import EngineClient
from engine.server.ipc.messages import EngineInfo
from engine.server.ipc.replicas import Replicas

LONG = list(range(10 * r.CHUNK_TOKENS))


def engines(count: int) -> Replicas:
    """Engines that are ready, as far as their clients know."""
    found = Replicas(EngineClient("/nowhere/0"), "m")
    for number in range(1, count):
        found.add(EngineClient(f"/nowhere/{number}"), f"m-{number + 1}")
    for replica in found:
        be_ready(replica.client, pid=100 + replica.number)
    return found


def be_ready(client: EngineClient, pid: int, max_model_len: int = 4096) -> None:
    client.info = EngineInfo(
        model_names=["m"], max_model_len=max_model_len, vocab_size=320, eos_token_ids=[2], dtype="float32",
        device="none", num_pages=1, page_size=16, max_num_seqs=4096, pid=pid)
    client.state = "ready"


def send(client: EngineClient, count: int) -> None:
    """Put `count` requests in flight; nobody answers them."""
    for _ in range(count):
        client._submit(EngineRequest(f"r{client.path}{client.in_flight}", [1], SamplingParams()))


def chosen(replicas: Replicas, prompt: list[int], salt: str = "") -> int:
    return replicas.choose(prompt, salt).number


def test_requests_spread_over_equal_engines():
    three = engines(3)
    assert [chosen(three, [1]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    send(three.first, 1)
    assert [chosen(three, [1]) for _ in range(4)] == [1, 2, 1, 2]


def test_an_engine_that_cannot_take_requests_is_left_out():
    three = engines(3)
    three.first.state = "dead"
    list(three)[1].client.state = "loading"
    assert {chosen(three, LONG) for _ in range(5)} == {2}
    list(three)[2].client.state = "dead"
    assert chosen(three, LONG) == 0, "its client says what is wrong"
    assert three.usable() == []


def test_a_prompt_goes_where_its_beginning_is_known():
    two = engines(2)
    home = chosen(two, LONG)
    assert {chosen(two, [*LONG, *range(100)]) for _ in range(6)} == {home}
    assert chosen(two, [7, *LONG[1:]]) != home, "another beginning"
    assert chosen(two, LONG) == home
    assert chosen(two, LONG, "another tenant") != home


def test_a_short_common_beginning_holds_nothing_together():
    two, common = engines(2), LONG[: 4 * r.CHUNK_TOKENS]
    assert [chosen(two, [*common, *([i] * 6 * r.CHUNK_TOKENS)]) for i in range(4)] == [0, 1, 0, 1]


def test_a_busy_engine_hands_its_prompts_on():
    two = engines(2)
    home = chosen(two, LONG)
    client = list(two)[home].client
    send(client, r.MORE_REQUESTS)
    assert chosen(two, LONG) == home
    send(client, 1)
    assert chosen(two, LONG) == 1 - home
    send(list(two)[1 - home].client, r.MORE_REQUESTS + 1)
    assert [chosen(two, LONG) for _ in range(2)] == [home, 1 - home], "both know it now"


def test_a_new_process_knows_nothing():
    two = engines(2)
    home = chosen(two, LONG)
    be_ready(list(two)[home].client, pid=7)
    assert chosen(two, LONG) == 1 - home, "of equals the one that was chosen longest ago"


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(r, "MOST_REMEMBERED", 25)
    two = engines(2)
    home = chosen(two, LONG)
    for i in range(3):
        chosen(two, [1000 + i] * len(LONG))
    assert len(two._prefixes._engines) == 25
    send(list(two)[home].client, 1)
    assert chosen(two, LONG) != home, "it was forgotten"


def test_facts_hold_for_every_engine():
    two = engines(2)
    be_ready(list(two)[1].client, pid=5, max_model_len=1024)
    assert two.info is not None
    assert two.info.max_model_len == 1024
    list(two)[1].client.state = "dead"
    assert two.info.max_model_len == 4096
    two.first.stats.num_waiting, list(two)[1].client.stats.num_waiting = 2, 3
    assert two.stats.num_waiting == 5


def test_a_quarantine_is_the_models():
    two = engines(2)
    assert {id(replica.client.quarantine) for replica in two} == {id(two.first.quarantine)}
