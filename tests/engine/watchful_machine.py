"""The machine of paged_machine.py, more suspicious: it looks at what the scheduler promises, not only at answers.

    rows       a row that a step in flight uses belongs to the same sequence in every later step until that one is read
    states     a step takes up no state that it is itself about to save
    index      whatever can be found by a hash, page or state, holds just the tokens that the hash stands for

What it sees is in `violations`. Steps can be made to fail when they are launched or when they are read.
"""

from collections.abc import Iterable

from paged_machine import PAGE_SIZE, PagedMachine, absorb

from engine.core.batch import StepPlan, StepResult
from engine.core.kv.prefix import PageHasher
from engine.core.loop import EngineCore
from engine.core.sequence import Sequence


class WatchfulMachine(PagedMachine):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.rows_in_flight: dict[int, dict[int, int]] = {}  # step -> row -> whose it is
        self.fail_reads: set[int] = set()
        self.violations: list[str] = []

    def forward(self, plan: StepPlan) -> StepResult:
        try:
            self._watch(plan)
            result = super().forward(plan)
        except AssertionError as error:
            self.violations.append(str(error))  # to the engine it is one more step that fails
            raise
        self.rows_in_flight[plan.step_id] = {seq.row: seq.uid for seq in plan.seqs}
        return result

    def _watch(self, plan: StepPlan) -> None:
        rows = {seq.row: seq.uid for seq in plan.seqs}
        assert len(rows) == len(plan.seqs), "two sequences of a step share a row"
        assert 0 not in rows, "the padding row was given out"
        for step, earlier in self.rows_in_flight.items():
            for row in rows.keys() & earlier.keys():
                assert rows[row] == earlier[row], f"row {row} changed hands while step {step} is in flight"
        saved = {target for _, target in plan.state_saves}
        taken_up = {init.state_from for init in plan.row_inits}
        assert not saved & taken_up, "a state is taken up before it is there"
        assert len(saved) == len(plan.state_saves), "two states are saved to one slot"
        slots = {row: self.slot[row] for row in rows} | {init.row: init.slot for init in plan.row_inits}
        assert not saved & set(slots.values()), "a state is saved to a slot that is in use"

    def collect(self, handle: StepResult) -> StepResult:
        del self.rows_in_flight[handle.step_id]
        written = [cells for step in self.written.values() for cells in step.values()]
        result = super().collect(handle)
        if handle.step_id in self.fail_reads:
            for cells in written:
                self.spoil(cells, -2)
            self.written.clear()
            self.rows_in_flight.clear()  # the loop gives up on the steps behind it too, and reads none of them
            self.in_flight.clear()
            raise RuntimeError("injected fault")
        return result


def check_index(core: EngineCore, machine: PagedMachine, texts: Iterable[list[int]]) -> tuple[int, int]:
    """Every page and state that a beginning of one of `texts` finds holds just that. Returns how many were found."""
    pages = states = 0
    for text in texts:
        for i, digest in enumerate(_digests(core.kv._hasher, text)):
            end = (i + 1) * PAGE_SIZE
            for group, pool in enumerate(core.kv.pools):
                page = pool.find(digest)
                if page is not None:
                    held = [machine._read(group, page, offset) for offset in range(PAGE_SIZE)]
                    assert held == text[end - PAGE_SIZE : end], f"a page is found by a name that is not its own, {end}"
                    pages += 1
            slot = None if core.kv.slots is None else core.kv.slots.find(digest)
            if slot is not None:
                held = machine._read(len(core.kv.pools), slot, 0)
                assert held == absorb(0, text[:end]), f"a state is not that after {end} tokens"
                states += 1
    return pages, states


def _digests(hasher: PageHasher, text: list[int]) -> list[bytes]:
    seq = Sequence("x", None, text, 0, 0, frozenset(), frozenset(), 0, 0, "", None)  # type: ignore[arg-type]
    hasher.extend(seq)
    return seq.page_hashes

