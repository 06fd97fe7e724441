"""The engines that answer under one model's name, and which of them gets a request.

The one with the fewest requests in flight; of equals the one that was chosen longest ago. A request whose prompt begins
like earlier ones goes to an engine that has computed that beginning, as long as most of the prompt is known there and
the engine has not clearly more to do than the others. Engines that load, hang or are gone are left out.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from engine.core.request import EngineStats
from engine.server.ipc.client import EngineClient
from engine.server.ipc.messages import EngineInfo

CHUNK_TOKENS = 64            # of a prompt, that one hash stands for
MOST_CHUNKS = 128            # of a prompt that are hashed: conversations differ long before
MOST_REMEMBERED = 65_536     # chunks, of all prompts
MORE_REQUESTS = 4            # that an engine may have in flight, beyond the least busy one, …
MORE_SHARE = 1.5             # … or this many times as many, and still get a prompt that it knows
KNOWN_SHARE = 0.5            # of a prompt's chunks, below which knowing them does not count


@dataclass(slots=True, eq=False)
class Replica:
    """One of the engines. `number` is its label in metrics, `name` its instance (`[models.NAME]`)."""

    number: int
    client: EngineClient
    name: str = ""
    turn: int = 0            # when it was last chosen
    pid: int = 0             # of the process whose prefix cache is remembered

    @property
    def usable(self) -> bool:
        return self.client.state == "ready" and self.client.info is not None and not self.client.stalled()


class Replicas:
    """At least one engine, all of the same model. The first one's client is `first`."""

    def __init__(self, first: EngineClient, name: str = "") -> None:
        self.first = first
        self._replicas = [Replica(0, first, name)]
        self._prefixes = _Prefixes()
        self._turn = 0

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, client: EngineClient, name: str) -> Replica:
        """One more engine, under the lowest number that is free."""
        taken = {replica.number for replica in self._replicas}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        client.quarantine = self.first.quarantine  # what killed one must not kill the next one
        replica = Replica(number, client, name)
        self._replicas.append(replica)
        return replica

    def keep(self, names: Collection[str]) -> list[Replica]:
        """Remove all but the first engine and those of `names`; returns those that were removed."""
        gone = [replica for replica in self._replicas[1:] if replica.name not in names]
        self._replicas = [replica for replica in self._replicas if replica not in gone]
        for replica in gone:
            self._prefixes.forget(replica.number)
        return gone

    def usable(self) -> list[EngineClient]:
        """The engines that can take a request now."""
        return [replica.client for replica in self._replicas if replica.usable]

    @property
    def info(self) -> EngineInfo | None:
        """What every usable engine can do: the facts of the one with the shortest context. While none is usable, of one
        that was."""
        known = [client.info for client in self.usable()] or [replica.client.info for replica in self._replicas]
        return min((info for info in known if info is not None), key=lambda info: info.max_model_len, default=None)

    @property
    def stats(self) -> EngineStats:
        """Sums of those counts that tell how fast the queue moves."""
        if len(self._replicas) == 1:
            return self.first.stats
        every = [replica.client.stats for replica in self._replicas]
        return EngineStats(
            num_waiting=sum(stats.num_waiting for stats in every),
            prompt_tokens=sum(stats.prompt_tokens for stats in every),
            generation_tokens=sum(stats.generation_tokens for stats in every))

    def choose(self, prompt: Sequence[int], salt: str = "") -> Replica:
        """The engine for a request; the first one if none is usable, whose client then says what is wrong.

        `salt`: prompts of different salts share nothing in an engine's prefix cache.
        """
        if len(self._replicas) == 1:
            return self._replicas[0]
        usable = [replica for replica in self._replicas if replica.usable]
        if not usable:
            return self._replicas[0]
        for replica in usable:
            if replica.pid != (pid := replica.client.info.pid if replica.client.info else 0):
                self._prefixes.forget(replica.number)  # a new process has an empty cache
                replica.pid = pid
        least = min(replica.client.in_flight for replica in usable)
        hashes = _hashes(prompt, salt)
        chunks, knowing = self._prefixes.longest(hashes, usable)
        most = max(least + MORE_REQUESTS, least * MORE_SHARE)
        if knowing and chunks >= KNOWN_SHARE * len(hashes):
            usable = [replica for replica in knowing if replica.client.in_flight <= most] or usable
        chosen = min(usable, key=lambda replica: (replica.client.in_flight, replica.turn))
        self._turn += 1
        chosen.turn = self._turn
        self._prefixes.remember(hashes, chosen.number)
        return chosen


class _Prefixes:
    """Which engines have computed which beginnings of prompts: bit N of a value stands for the engine of number N."""

    def __init__(self) -> None:
        self._engines: OrderedDict[bytes, int] = OrderedDict()  # the one used longest ago comes first

    def longest(self, hashes: Sequence[bytes], among: Sequence[Replica]) -> tuple[int, list[Replica]]:
        """(chunks of the longest known beginning, the engines that know it)."""
        for chunks in range(len(hashes), 0, -1):
            bits = self._engines.get(hashes[chunks - 1], 0)
            if knowing := [replica for replica in among if bits >> replica.number & 1]:
                return chunks, knowing
        return 0, []

    def remember(self, hashes: Sequence[bytes], number: int) -> None:
        for key in reversed(hashes):  # a beginning outlives what follows it
            self._engines[key] = self._engines.get(key, 0) | 1 << number
            self._engines.move_to_end(key)
        while len(self._engines) > MOST_REMEMBERED:
            self._engines.popitem(last=False)

    def forget(self, number: int) -> None:
        for key, bits in list(self._engines.items()):
            if rest := bits & ~(1 << number):
                self._engines[key] = rest
            else:
                del self._engines[key]


def _hashes(prompt: Sequence[int], salt: str) -> list[bytes]:
    """One hash for each whole chunk, which covers all before it too."""
    running = hashlib.blake2b(salt.encode(), digest_size=16)
    found = []
    for start in range(0, min(len(prompt) // CHUNK_TOKENS, MOST_CHUNKS) * CHUNK_TOKENS, CHUNK_TOKENS):
        running.update(array("I", prompt[start : start + CHUNK_TOKENS]))
        found.append(running.digest())
    return found
