"""A real engine process that a certain token of a prompt kills: `poisoned_engine.py HOW TOKEN AFTER [engine flags]`.

HOW: `abort` ends the process at once, as a fault in a kernel does; `sticky` has every step fail from then on, as a
CUDA error does, until the engine gives up by itself. AFTER: tokens of the answer before it happens.
"""

import os
import sys
from typing import Any

from engine.core.batch import StepPlan
from engine.core.loop import EngineCore
from engine.server.process import engine_process


def main() -> int:
    how, token, after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    original, broken = EngineCore.__init__, False

    def init(self: EngineCore, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        forward = self.runner.forward

        def poisoned(plan: StepPlan) -> Any:
            nonlocal broken
            for item in plan.seqs:
                seq = self.scheduler.seqs.get(item.request_id)
                if seq is not None and token in seq.token_ids[: seq.prompt_len] and seq.num_output_tokens >= after:
                    broken = True
            if broken and how == "abort":
                os.abort()
            if broken:
                raise RuntimeError("an illegal memory access was encountered")
            return forward(plan)

        self.runner.forward = poisoned  # type: ignore[method-assign]

    EngineCore.__init__ = init  # type: ignore[method-assign]
    return engine_process.main(sys.argv[4:])


if __name__ == "__main__":
    sys.exit(main())
