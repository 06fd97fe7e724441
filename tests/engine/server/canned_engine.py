"""An engine process without a model: the real socket, messages and process, and answers that follow from the prompt.

    python canned_engine.py --uds SOCKET [--step-seconds S]

Each step gives every request one token: the prompt's tokens again and again, so that an answer shows whose it is. Since
nothing else takes time, the cost of the HTTP edge can be measured in front of it.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from engine.core.request import EngineRequest, EngineStats, FinishReason, RequestTimes, StepOutput
from engine.server.ipc.framing import PeerPolicy, listen
from engine.server.ipc.server import IpcServer
from engine.server.process.engine_process import signals
from engine.server.process.engine_service import EngineService
from engine.server.process.notify import Notifier


class CannedCore:
    on_moved = None

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._running: dict[str, tuple[EngineRequest, int, float]] = {}
        self._stats = EngineStats(pages_total=1)
        self._next_step = 0.0

    def add_request(self, request: EngineRequest) -> None:
        self._running[request.request_id] = (request, 0, time.monotonic())

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> list[StepOutput]:
        if (wait := self._next_step - time.monotonic()) > 0:
            time.sleep(wait)
        now = time.monotonic()
        self._next_step = now + self._step_seconds
        outputs = []
        for key, (request, made, began) in list(self._running.items()):
            output = StepOutput(key, [request.prompt_token_ids[made % len(request.prompt_token_ids)]])
            if made + 1 >= (request.params.max_tokens or 16):
                output.finish_reason, output.times = FinishReason.LENGTH, RequestTimes(began, began, now, now)
                del self._running[key]
            else:
                self._running[key] = (request, made + 1, began)
            outputs.append(output)
        self._stats.steps += 1
        self._stats.last_step_time = now
        self._stats.generation_tokens += len(outputs)
        return outputs

    def stats(self) -> EngineStats:
        self._stats.num_running = len(self._running)
        return self._stats

    def info(self) -> dict:
        return {"model_names": ["canned"], "max_model_len": 4096, "vocab_size": 320, "eos_token_ids": [2],
                "dtype": "float32", "device": "none", "num_pages": 1, "page_size": 16, "max_num_seqs": 4096}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", type=Path, required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    options = parser.parse_args()
    server = IpcServer(listen(options.uds), PeerPolicy(), pid=os.getpid())
    service = EngineService(server, Notifier())
    with signals(service, server, under_parent=False) as loaded:
        service.load(lambda _: CannedCore(options.step_seconds), time.monotonic())
        loaded()
        service.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
