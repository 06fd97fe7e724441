"""All searches for a model: its decode step first, then its experts at several numbers of tokens."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from engine.kernels.tuning import decode_step, experts_layer, experts_search, step_search
from engine.kernels.tuning.results import Results, model_key
from engine.kernels.tuning.rows import Row, machine, say
from engine.kernels.tuning.step_gemms import sensible_forms
from engine.kernels.tuning.step_search import Chosen, Stage
from engine.models.config.model import read_json

PARTS = ("step", "experts")
_EXPERT_TOKENS = (16, 64, 256, 4096, 4, 1024, 2)  # for one token, experts are tuned within the decode step


class Tuner:
    """Searches one model after the other until `deadline`, on the clock of time.monotonic()."""

    def __init__(self, results: Results, device: torch.device, deadline: float) -> None:
        self._results, self._device, self._deadline = results, device, deadline
        self._known: Chosen = {}  # the best tiles so far: a GEMM that several models share starts with them
        self.searched = self.skipped = self.left = 0  # skipped: found by an earlier run; left: out of time

    def run(
        self, models: Sequence[Path], quantization: str | None, parts: Sequence[str] = PARTS
    ) -> Iterator[Row]:
        for config in models:
            raw = read_json(config / "config.json")
            for form in [quantization] if quantization else sensible_forms(config):
                about = {"bench": "tuning", "model": config.name, "quantization": form}
                key = model_key(config, form, raw)
                searches = {"step": self._step}
                if experts_layer.has_experts(raw):
                    searches["experts"] = self._experts
                for part in parts:
                    if part not in searches:
                        continue
                    if time.monotonic() > self._deadline:
                        self.left += 1
                        say(f"{config.name} {form}: {part} left for the next run: the time is up.")
                        continue
                    for row in searches[part](config, form, key):
                        yield {**about, **row, **machine(self._device)}

    def _step(self, config: Path, form: str, model: str) -> Iterator[Row]:
        """Tune the decode step of a model. When this returns, the model is freed, before the next one is loaded."""
        say(f"{config.name} {form}: starting a few of its layers with random weights …")
        with decode_step.start(config, form) as step:
            plan = decode_step.plan(step, config.name, self._known)
            todo = [stage for stage in plan.stages if not self._results.is_done(_key(model, stage))]
            self._skip(len(plan.stages) - len(todo), config, form)
            if not todo:
                return
            plan, done = plan._replace(stages=todo), 0
            with decode_step.OnGpu(step, plan, self._device) as ready:
                for found in step_search.search(todo, plan.start, ready, self._deadline):
                    self._results.keep_found(_key(model, found.stage), found)
                    self._known[found.stage.part] = found.tiles
                    done += 1
                    row = found.row
                    faster = row["ms_before"] / row["ms"] - 1
                    times = f"{row['ms_before']} → {row['ms']} ms a step ({faster:+.1%})"
                    say(f"[{done}/{len(todo)}] {row['product']}: {times}")
                    yield row
        self._count(done, len(todo))

    def _experts(self, config: Path, form: str, model: str) -> Iterator[Row]:
        from engine.kernels.runtime.launcher import target_of

        numbers = [n for n in _EXPERT_TOKENS if not self._results.is_done(f"{model} experts {n}")]
        self._skip(len(_EXPERT_TOKENS) - len(numbers), config, form)
        if not numbers:
            return
        gpu, done = target_of(self._device), 0
        cells = experts_search.cells(
            [experts_layer.make_subject(config, self._device, form)], numbers, gpu.shared_memory, gpu
        )
        with torch.inference_mode(), experts_search.OnGpu(cells, self._device) as ready:
            for _, measured, row in experts_search.search(cells, ready, self._deadline - time.monotonic()):
                self._results.keep_measured(f"{model} experts {measured.tokens}", measured)
                done += 1
                faster = row["us_by_rule"] / row["us"] - 1
                times = f"{row['us_by_rule']} → {row['us']} µs ({faster:+.1%})"
                say(f"[{done}/{len(cells)}] experts, {measured.tokens} tokens: {times}")
                yield row
        self._count(done, len(cells))

    def _skip(self, number: int, config: Path, form: str) -> None:
        self.skipped += number
        if number:
            say(f"{config.name} {form}: {number} found by an earlier run; --again searches them again.")

    def _count(self, done: int, of: int) -> None:
        self.searched += done
        self.left += of - done


def _key(model: str, stage: Stage) -> str:
    return f"{model} step {stage.name} {tuple(stage.part)}"
