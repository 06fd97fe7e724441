"""KV waste: the share of the slots in requests' pages that was never written.

    page 16 slots   ████████████████ ████████████████ █████···········     37 written, 48 allocated

Sampled after every step; each page counts once, however many requests share it.
"""

from engine.core.loop import EngineCore


class KVMeter:
    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.batch = 0             # running requests, summed over steps
        self._written = 0          # slots, summed over steps
        self._allocated = 0

    def sample(self) -> None:
        """Sample the engine between two steps."""
        size = self.core.kv.page_size
        running = self.core.scheduler.running
        full: set[int] = set()
        partial: dict[int, int] = {}
        for seq in running:
            whole, rest = divmod(seq.num_computed_tokens, size)
            full.update(seq.pages[:whole])
            partial |= dict.fromkeys(seq.pages[whole:], 0)
            if rest:
                partial[seq.pages[whole]] = rest
        self.steps += 1
        self.batch += len(running)
        self._written += len(full) * size + sum(partial.values())
        self._allocated += (len(full) + len(partial)) * size

    @property
    def waste(self) -> float:
        """1 - written / allocated slots, over all steps so far."""
        return 1 - self._written / self._allocated if self._allocated else 0.0

    @property
    def mean_batch(self) -> float:
        return self.batch / self.steps if self.steps else 0.0
