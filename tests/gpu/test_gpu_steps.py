"""Whole requests on a GPU: parameters against the CPU path, independence of neighbours, and no hidden waiting."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kit import DEVICE, VOCAB, assert_idle, checkpoint, drain, generated, on_cpu, on_gpu, prompts

from engine import LLM, SamplingParams
from engine.core.batch import StepPlan
from engine.core.request import EngineRequest
from engine.outputs import RequestOutput

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

TOKENS = 24
CLOSE = 0.15  # logits: bf16 against float32 may choose differently where the best two are closer than this


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("steps") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def gpu(model: Path) -> LLM:
    return on_gpu(model, max_num_seqs=48)


@pytest.fixture(scope="module")
def cpu(model: Path) -> LLM:
    return on_cpu(model)


# -- against the CPU path


def test_greedy_tokens_are_the_argmax_of_the_logits(gpu: LLM) -> None:
    """Within the step that sampled them, and again when the whole text is read as a prompt (other kernels)."""
    asked = prompts(10, longest=120)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
    outputs = gpu.generate(asked, params, use_tqdm=False)
    for i, output in enumerate(outputs):
        answer = output.outputs[0]
        ranks = [entry[token].rank for token, entry in zip(answer.token_ids, answer.logprobs or [], strict=True)]
        assert ranks == [1] * TOKENS, f"prompt {i}: ranks of greedy tokens {ranks}"
    whole = [{"prompt_token_ids": o.prompt_token_ids + o.outputs[0].token_ids} for o in outputs]
    again = gpu.generate(whole, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    wrong = {}
    for i, (output, read) in enumerate(zip(outputs, again, strict=True)):
        start = len(output.prompt_token_ids)
        for at, token in enumerate(output.outputs[0].token_ids, start):
            entry = (read.prompt_logprobs or [])[at] or {}
            best = max(entry.values(), key=lambda e: e.logprob)
            if best.logprob - entry[token].logprob > CLOSE:
                wrong[i, at - start] = best.logprob - entry[token].logprob
    assert not wrong, f"(prompt, output position): how much likelier another token is {wrong}"


def test_logprobs_agree_with_the_cpu(gpu: LLM, cpu: LLM) -> None:
    """Prompt and answer, on the same tokens: values, and the lists of alternatives where they are not close calls."""
    asked = prompts(6, longest=150)
    cpu_answers = generated(cpu, asked, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    whole = [{"prompt_token_ids": a["prompt_token_ids"] + b} for a, b in zip(asked, cpu_answers, strict=True)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, prompt_logprobs=5)
    worst, missing = 0.0, {}
    results = [engine.generate(whole, params, use_tqdm=False) for engine in (gpu, cpu)]
    for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
        pairs = list(zip(positions(ours), positions(theirs), strict=True))
        assert len(pairs) == len(whole[i]["prompt_token_ids"])
        for at, (mine, reference) in enumerate(pairs):
            shared = mine.keys() & reference.keys()
            worst = max([worst, *(abs(mine[t].logprob - reference[t].logprob) for t in shared)])
            last = min(e.logprob for e in reference.values() if (e.rank or 9) <= 5)
            clear = {t for t, e in reference.items() if e.logprob > last + CLOSE}
            if not clear <= mine.keys():
                missing[i, at] = clear - mine.keys()
    print(f"largest difference of log-probabilities: {worst:.3f}")
    assert not missing, f"(prompt, position): likely tokens that the GPU does not list {missing}"
    assert worst < CLOSE, f"log-probabilities differ by up to {worst:.3f}"


def positions(output: RequestOutput) -> list[dict]:
    """Log-probabilities at every position after the first: the prompt's, then the one sampled token's alternatives."""
    sampled = [{t: e for t, e in entry.items() if (e.rank or 9) <= 5} for entry in output.outputs[0].logprobs or []]
    return [entry or {} for entry in (output.prompt_logprobs or [])[1:]] + sampled


def cpu_greedy(
    cpu: LLM, prompt: dict, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[torch.Tensor]]:
    """The CPU path's greedy answer, and the logits [V] that each of its tokens was chosen from, after all edits."""
    runner: Any = cpu.engine.runner
    edit, seen = runner.sampler._edit, []

    def record(z: torch.Tensor, *args: Any) -> bool:
        changed = edit(z, *args)
        seen.append(z[0].clone())
        return changed

    with monkeypatch.context() as patch:
        patch.setattr(runner.sampler, "_edit", record)
        [answer] = generated(cpu, [prompt], params)
    return answer, seen


FEATURES: dict[str, dict] = {
    "plain": {}, "repetition": {"repetition_penalty": 1.5}, "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0}, "encouraged": {"presence_penalty": -2.0, "repetition_penalty": 0.8},
    "biased": {"logit_bias": {17: 3.0, 444: 3.5, 3: -100.0}}, "forced": {"logit_bias": {321: 100.0}},
    "banned": {"bad_token_ids": list(range(1, VOCAB, 2))},
    "held": {"min_tokens": 16, "stop_token_ids": list(range(0, VOCAB, 3))},
    "stopped": {"stop_token_ids": list(range(0, VOCAB, 12))},
}  # fmt: skip


def test_parameters_change_answers_as_on_the_cpu(gpu: LLM, cpu: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers: token for token the CPU's, until a close call parts them."""
    asked = prompts(4, seed=5, longest=60)
    jobs = [(name, prompt) for name in FEATURES for prompt in asked]
    params = {
        name: SamplingParams(**({"temperature": 0, "max_tokens": TOKENS, "ignore_eos": name != "stopped"} | extra))
        for name, extra in FEATURES.items()
    }
    ours = generated(gpu, [prompt for _, prompt in jobs], [params[name] for name, _ in jobs])
    same: Counter[str] = Counter()
    wrong, plain = {}, {}
    for number, ((name, prompt), got) in enumerate(zip(jobs, ours, strict=True)):
        want, logits = cpu_greedy(cpu, prompt, params[name], monkeypatch)
        if name == "plain":
            plain[id(prompt)] = want
        else:
            same["changed"] += want != plain[id(prompt)]
        at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        if at is None:
            same[name] += 1
            if len(got) != len(want):
                wrong[name, number] = f"{len(got)} tokens, {len(want)} on the CPU"
        elif float(logits[at][want[at]] - logits[at][got[at]]) > CLOSE:
            margin = float(logits[at][want[at]] - logits[at][got[at]])
            wrong[name, number] = f"token {at}: {got[at]}, on the CPU {want[at]}, better by {margin:.3f}"
        assert_obeyed(name, got)
    print(f"answers equal to the end, of {len(asked)}: {dict(same)}")
    assert not wrong, wrong
    assert same["changed"] >= 3 * (len(FEATURES) - 1), f"the parameters change too little to test them: {same}"
    assert sum(same[name] for name in FEATURES) > len(jobs) / 2, f"answers equal to the end: {same}"


def assert_obeyed(name: str, got: list[int]) -> None:
    """What holds whatever the logits are."""
    if name == "forced":
        assert got == [321] * TOKENS
    if name == "banned":
        assert not [t for t in got if t % 2]
    if name == "held":
        assert len(got) >= 16
        assert not [t for t in got[:16 - 1] if t % 3 == 0]
    if name == "stopped":
        assert not [t for t in got[:-1] if t % 12 == 0]


# -- neighbours


def test_a_seeded_request_does_not_see_who_runs_beside_it(gpu: LLM) -> None:
    """In steps of equal shape logits are equal bit for bit, so the tokens are, whoever the 40 neighbours are and
    whatever they ask for. (Alone, a request runs in other kernels, which may round its logits differently.)"""
    mine = prompts(1, seed=40, longest=200)[0]
    answers = []
    for seed in (41, 42, 43):
        lengths = prompts(40, seed=41, longest=60)
        fill = torch.Generator().manual_seed(seed)
        others = [{"prompt_token_ids": torch.randint(1, VOCAB, (len(p["prompt_token_ids"]),), generator=fill).tolist()}
                  for p in lengths]
        params = [SamplingParams(temperature=0.7 + 0.2 * (seed % 3), seed=seed * i, max_tokens=TOKENS, ignore_eos=True,
                                 top_k=20 * (seed % 2), presence_penalty=seed % 2) for i in range(40)]
        own = SamplingParams(temperature=1.0, seed=7, max_tokens=TOKENS, ignore_eos=True)
        gpu.engine.reset_prefix_cache()
        together = generated(gpu, [*others[:20], mine, *others[20:]], [*params[:20], own, *params[20:]])
        answers.append(together[20])
        assert len({tuple(t) for t in together}) == 41
    assert answers[0] == answers[1] == answers[2], answers


def test_n_answers_are_those_of_n_seeds(gpu: LLM) -> None:
    [prompt] = prompts(1, seed=50, longest=90)
    wanted = [(3, 5), (1, 5), (1, 6), (1, 7)]
    params = [SamplingParams(n=n, seed=seed, max_tokens=TOKENS, ignore_eos=True) for n, seed in wanted]
    gpu.engine.reset_prefix_cache()
    [several] = gpu.generate([prompt], params[0], use_tqdm=False)
    gpu.engine.reset_prefix_cache()
    single = generated(gpu, [prompt] * 3, params[1:])
    assert [answer.token_ids for answer in several.outputs] == single


# -- waiting


class Watched:
    """A runner that may not wait for the device but once a step, in `collect`.

    torch raises for a copy or a read that would wait inside `launch`; explicit waits are counted. An event that has
    already passed is no wait: the ring of pinned buffers asks so whether its turn has come.
    """

    def __init__(self, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runner, self._phase = runner, "between"
        self.steps: Counter[str] = Counter()
        self.waits: list[tuple[int, str, str]] = []  # (step, phase, what)
        self._step = -1
        passed = torch.cuda.Event.query
        for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
            original = owner.synchronize

            def counted(*args: Any, original: Any = original, owner: Any = owner) -> Any:
                if not (owner is torch.cuda.Event and self._phase == "launch" and passed(args[0])):
                    self.waits.append((self._step, self._phase, owner.__name__))
                return original(*args)

            monkeypatch.setattr(owner, "synchronize", counted)

    def forward(self, plan: StepPlan) -> Any:
        self._step, self._phase = plan.step_id, "launch"
        self.steps["decode" if plan.num_tokens == len(plan.seqs) else "mixed"] += 1
        self.steps["with logprobs"] += any(s.logprobs is not None for s in plan.seqs)
        self.steps["with prompt logprobs"] += any(s.prompt_logprobs is not None for s in plan.seqs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._runner.forward(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            self._phase = "between"

    def sample(self, forwarded: Any) -> Any:
        self._phase = "launch"
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._runner.sample(forwarded)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            self._phase = "between"

    def collect(self, handle: Any) -> Any:
        self._step, self._phase = handle.plan.step_id, "collect"
        try:
            return self._runner.collect(handle)
        finally:
            self._phase = "between"


def test_torch_reports_a_wait_when_there_is_one() -> None:
    """Else the next test would see nothing."""
    number = torch.ones(1, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            number.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_steps_wait_for_the_device_once_and_only_to_collect(
    gpu: LLM, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, runner = gpu.engine, gpu.engine.runner
    kinds: list[dict] = [
        {}, {"temperature": 0}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.1}, {"logprobs": 4}, {"prompt_logprobs": 2},
        {"logit_bias": {5: 2.0}, "bad_token_ids": [9]}, {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"min_tokens": 10, "stop_token_ids": [4]},
    ]  # fmt: skip
    if eager:
        monkeypatch.setattr(runner, "graphs", None)
    watched = Watched(runner, monkeypatch)
    monkeypatch.setattr(core, "runner", watched)

    def serve(name: str, asked: list[dict], params: list[SamplingParams]) -> None:
        requests = [
            EngineRequest(f"{name}-{i}", prompt["prompt_token_ids"], p)
            for i, (prompt, p) in enumerate(zip(asked, params, strict=True))
        ]
        errors = {rid: o.error for rid, listed in drain(core, requests).items() for o in listed if o.error}
        assert not errors, f"launch waited, or failed: {errors}"

    for g, kind in enumerate(kinds):  # alone, so that plain steps come too
        serve(f"alone-{g}", prompts(1, seed=100 + g, longest=300), [SamplingParams(seed=1, max_tokens=12, **kind)])
    together = prompts(4 * len(kinds), seed=99, longest=300)
    generator = torch.Generator().manual_seed(98)
    long = [{"prompt_token_ids": torch.randint(1, VOCAB, (2000,), generator=generator).tolist()} for _ in range(8)]
    for turn in range(2):  # the second time from the prefix cache: more table entries than a step's copy has room for
        params = [SamplingParams(seed=i, max_tokens=12, **kind) for i, kind in enumerate(kinds * 4)]
        serve(f"together-{turn}", together, params)
        hits = core.stats().prefix_hits
        serve(f"long-{turn}", long, [SamplingParams(seed=i, max_tokens=4) for i in range(8)])
    assert core.stats().prefix_hits - hits > 8 * 1900
    print(f"steps {dict(watched.steps)}, waits {len(watched.waits)}")
    kinds_seen = [watched.steps[kind] for kind in ("decode", "mixed", "with logprobs", "with prompt logprobs")]
    assert min(kinds_seen) > 5, watched.steps
    elsewhere = [wait for wait in watched.waits if wait[1] != "collect"]
    assert not elsewhere, f"waits outside of collect (step, phase, what): {elsewhere[:10]}"
    per_step = Counter(step for step, _, _ in watched.waits)
    assert max(per_step.values()) <= 1, f"waits of the busiest steps: {per_step.most_common(5)}"
    assert_idle(core)


_NO_COMPILATION = """
import sys
from pathlib import Path
from engine import SamplingParams
from engine.kernels.runtime.launcher import Kernel
from gpu_kit import generated, on_gpu, prompts

llm = on_gpu(Path(sys.argv[1]), max_num_seqs=48)
original = Kernel._compile
def record(self, *args):
    print("compiled", self.name, *args[:2])
    return original(self, *args)
Kernel._compile = record
for count in (1, 2, 3, 5, 17, 33, 48):
    asked = prompts(count, seed=200 + count, longest=300)
    for kinds in ([{}], [{"top_k": 20}, {"logprobs": 3}, {"frequency_penalty": 1.0}, {"prompt_logprobs": 2}]):
        params = [SamplingParams(seed=i, max_tokens=6, **kinds[i % len(kinds)]) for i in range(count)]
        generated(llm, asked, params)
print("served")
"""


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_no_kernel_is_compiled_after_the_start(tmp_path: Path, family: str) -> None:
    """Compilation would stall every request for a second. In a process of its own: here the other tests came before."""
    here, model = str(Path(__file__).parent), checkpoint(tmp_path / family, family)
    done = subprocess.run(
        [sys.executable, "-c", _NO_COMPILATION, str(model)], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "served\n", f"after the start:\n{done.stdout}"
