"""Which setting to try next, from the results so far. Pure: no clock, no disk, no service.

Coordinate search: from the best known setting, one knob is moved by one step; a move that helps is kept and continued
in the same direction. Every trial costs a restart of the engine, much more than its load, so each must bring something
new: successive halving would start the same settings again and again only to measure them longer. And near a preset the
knobs hardly depend on each other, so a handful of trials finds what a grid would find.

`propose` depends only on its arguments. A run that was killed continues by calling it again with the finished trials.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from appliance.service.tuning.score import MARGIN, Score, beats

Value = int | float | str | None     # None: the key is absent, so the engine decides
Setting = dict[str, Value]
Position = tuple[int, ...]
Failure = Literal["memory", "start", "load"]


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting and its steps, from least to most memory.

    `start`: where the search begins. `in_force`: the number that the start means, if its value leaves it to the engine.
    """

    name: str                        # its key in atoll.toml
    values: tuple[Value, ...]
    start: int
    in_force: int | None = None

    def number(self, at: int) -> Value:
        return self.in_force if at == self.start and self.in_force is not None else self.values[at]

    def __post_init__(self) -> None:
        if not 0 <= self.start < len(self.values) or len(set(map(repr, self.values))) != len(self.values):
            raise ValueError(f"{self.name}: {self.values} from {self.start}")


@dataclass(frozen=True, slots=True)
class Space:
    """The knobs. `fits` says what the memory planner allows."""

    knobs: tuple[Knob, ...]
    fits: Callable[[Setting], bool] = lambda setting: True

    @property
    def start(self) -> Position:
        return tuple(knob.start for knob in self.knobs)

    def setting(self, position: Position) -> Setting:
        return {knob.name: knob.values[at] for knob, at in zip(self.knobs, position, strict=True)}

    def position(self, setting: Mapping[str, Value]) -> Position | None:
        """None for a setting of another space."""
        if setting.keys() != {knob.name for knob in self.knobs}:
            return None
        if any(setting[knob.name] not in knob.values for knob in self.knobs):
            return None
        return tuple(knob.values.index(setting[knob.name]) for knob in self.knobs)

    def changes(self, position: Position) -> int:
        """Number of steps away from the start."""
        return sum(abs(at - start) for at, start in zip(position, self.start, strict=True))


@dataclass(frozen=True, slots=True)
class Trial:
    """A finished trial: with a score, or with the way it failed."""

    position: Position
    score: Score | None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Lack:
    """What the best trial so far misses; it decides the order of the next ones.

    `ttft`, `itl`: a limit is missed. `clients`: requests in progress at once.
    """

    ttft: bool = False
    itl: bool = False
    clients: int | None = None


Order = tuple[tuple[str, int], ...]
_FASTER: Order = (("max-num-seqs", 1), ("kv-cache-dtype", -1), ("gpu-memory-utilization", 1),
                  ("max-num-batched-tokens", 1), ("max-num-batched-tokens", -1), ("max-num-seqs", -1))  # fmt: skip
_STEADIER: Order = (("max-num-batched-tokens", -1), ("max-num-seqs", -1), ("kv-cache-dtype", -1))
_SOONER: Order = (("max-num-seqs", 1), ("max-num-batched-tokens", 1), ("kv-cache-dtype", -1),
                  ("gpu-memory-utilization", 1), ("max-num-batched-tokens", -1))  # fmt: skip


def propose(space: Space, trials: Sequence[Trial], lack: Lack = Lack(), margin: float = MARGIN) -> Position | None:
    """The next setting to try; None if nothing near the best one is left.

    The start comes first. `lack` is what the best trial so far misses.
    """
    if not trials:
        return space.start
    best = best_of(space, trials, margin)
    if best is None:  # the start itself does not serve: no setting is known that does
        return None
    tried = {trial.position for trial in trials}
    return next((position for position in _near(space, best.position, trials, lack, margin)
                 if position not in tried and _worth(space, position, trials)), None)  # fmt: skip


def best_of(space: Space, trials: Sequence[Trial], margin: float = MARGIN) -> Trial | None:
    """The best one, never worse than the start. Among equals, the nearest to the start, then the one with less
    memory."""
    ended = [trial for trial in trials if trial.score is not None]
    ended.sort(key=lambda trial: (space.changes(trial.position), sum(trial.position)))
    start = next((trial for trial in ended if trial.position == space.start), None)
    champion = start
    for trial in ended:
        if start is not None and champion is not None and _better(trial, champion, margin) and not _better(
                start, trial, margin):  # fmt: skip
            champion = trial
    return champion


def _better(one: Trial, other: Trial, margin: float) -> bool:
    return one.score is not None and other.score is not None and beats(one.score, other.score, margin)


def _near(space: Space, best: Position, trials: Sequence[Trial], lack: Lack, margin: float) -> Iterator[Position]:
    """Neighbours of the best: first further in the direction that led to it, then by their likely gain."""
    names = [knob.name for knob in space.knobs]
    order = [*_steps_to(space, best, trials, margin)]
    order += [(names.index(name), by) for name, by in _order(lack) if name in names]
    order += [(at, by) for at in range(len(names)) for by in (1, -1)]
    for at, by in order:
        if space.knobs[at].name == "max-num-seqs" and by > 0 and _enough(space, best[at], at, lack.clients):
            continue
        to = best[at] + by
        if 0 <= to < len(space.knobs[at].values):
            yield (*best[:at], to, *best[at + 1 :])


def _order(lack: Lack) -> Order:
    """Most promising first. A prompt delays every stream by its step, so smaller steps make streams even; more
    sequences and larger steps empty the queue."""
    order: Order = ()
    if lack.itl:
        order += _STEADIER
    if lack.ttft:
        order += _SOONER
    return order + _FASTER


def _steps_to(space: Space, best: Position, trials: Sequence[Trial], margin: float) -> Iterator[tuple[int, int]]:
    """The moves that led to the best one."""
    by_position = {trial.position: trial for trial in trials}
    for at in range(len(best)):
        for by in (1, -1):
            before = by_position.get((*best[:at], best[at] - by, *best[at + 1 :]))
            if before is not None and _better(by_position[best], before, margin):
                yield at, by


def _enough(space: Space, index: int, at: int, clients: int | None) -> bool:
    """Whether as many sequences may already run as the load ever has in progress: more would change nothing."""
    value = space.knobs[at].number(index)
    return clients is not None and isinstance(value, int) and value >= clients


def _worth(space: Space, position: Position, trials: Sequence[Trial]) -> bool:
    """Whether it fits, and no setting that needs less memory has run out of memory."""
    for trial in trials:
        if trial.failure == "memory" and all(a >= b for a, b in zip(position, trial.position, strict=True)):
            return False
    return space.fits(space.setting(position))
