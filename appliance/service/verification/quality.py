"""Quality: golden questions, texts that do not repeat themselves, meaningful probabilities, what a quantisation costs,
correct kernels.

A verification cannot say how good a model is. It says whether the model that answers is the one that was trained.
"""

import asyncio
import fnmatch
import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

from appliance.load.http_client import HttpError
from appliance.service.findings import Finding, Severity, made
from appliance.service.verification import quantisation
from appliance.service.verification.api import Api
from appliance.service.verification.context import Verifying, not_checked
from appliance.service.verification.detectors import repetition, saturation
from appliance.service.verification.subject import Served
from engine.message import without_ids
from installer.base.i18n import plain, t

_SELF_TEST = (sys.executable, "-s", "-P", "-m", "engine.selftest", "--json", "--time-limit", "300")
_PROMPT = "Say something about the sea."
_THINKING_TOKENS = 2048   # of an answer: models that think first need room before it
_TEXT_TOKENS = 300
_Text = Annotated[str, StringConstraints(min_length=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Prompt(_Strict):
    models: tuple[_Text, ...]
    language: Literal["en", "ko"]
    ask: _Text
    answer: Annotated[str, StringConstraints(min_length=1)]


class LongText(_Strict):
    language: Literal["en", "ko"]
    ask: _Text


class Golden(_Strict):
    prompts: tuple[Prompt, ...]
    texts: tuple[LongText, ...]

    def of(self, model: Served) -> list[Prompt]:
        """The questions that any healthy model of this family answers."""
        names = [model.bundle.lower(), model.family.lower()]
        return [prompt for prompt in self.prompts
                if any(name and fnmatch.fnmatchcase(name, pattern) for name in names for pattern in prompt.models)]


@cache
def golden() -> Golden:
    return Golden.model_validate(tomllib.loads((Path(__file__).parent / "golden.toml").read_text("utf-8")))


async def run(work: Verifying) -> list[Finding]:
    found: list[Finding] = []
    for model in work.subject.models:
        async with Api(work.subject.of(model), model.name) as api:
            try:
                found += await _of_model(work, api, model)
            except (HttpError, OSError, TimeoutError, ValueError, KeyError, TypeError, IndexError) as error:
                found.append(made(
                    work.subject.tagged("quality-answers", model), "block", False, t("Answers"),
                    observed=plain(error) or type(error).__name__, why=t("without answers nothing can be judged"),
                ))  # fmt: skip
    found.append(await self_test(on_gpu=any(model.on_gpu for model in work.subject.models)
                                 and work.subject.layout is not None))  # fmt: skip
    return found


async def _of_model(work: Verifying, api: Api, model: Served) -> list[Finding]:
    tag = work.subject.tagged
    found = [_judged_probabilities(await _logprobs(api), tag("saturation", model))]
    if not model.real_weights:
        why = t("its weights are random")
        return [*found, not_checked(tag("golden", model), t("Golden questions"), why),
                not_checked(tag("repetition", model), t("Repetition"), why)]  # fmt: skip
    prompts = golden().of(model)
    wrong, answered = [], []
    for number, prompt in enumerate(prompts):
        work.told(t("Golden questions"), number, len(prompts))
        text = await _text(api, prompt.ask, _THINKING_TOKENS if "smollm" not in model.bundle.lower() else 64)
        answered.append({"ask": prompt.ask, "said": text[-400:]})
        if re.search(prompt.answer, text) is None:
            wrong.append(t("'{ask}' got '{said}'", ask=prompt.ask, said=text.strip()[-120:]))
    work.data.setdefault("golden", {})[model.name] = answered
    if prompts:
        found.append(made(
            tag("golden", model), "info" if not wrong else "block", not wrong, t("Golden questions"),
            observed=wrong[0] if wrong else t("{count} answered correctly", count=len(prompts)),
            why=t("any healthy model of this family knows these answers"),
            fix="" if not wrong else t("Compare the weights with what was signed: {command}", command="atoll verify"),
            command="" if not wrong else "atoll verify --all", evidence="; ".join(map(str, wrong)),
        ))  # fmt: skip
    else:
        found.append(not_checked(tag("golden", model), t("Golden questions"), t("none are known for this model")))
    found.append(await _texts(work, api, model, known=bool(prompts) and "smollm" not in model.bundle.lower()))
    return [*found, *await quantisation.run(work, api, model)]


async def _texts(work: Verifying, api: Api, model: Served, *, known: bool) -> Finding:
    """Longer texts with the server's own sampling. A small model that knows no Korean may repeat itself: a warning."""
    loops = []
    for number, text in enumerate(golden().texts):
        work.told(t("Repetition"), number, len(golden().texts))
        said = await _text(api, text.ask, _TEXT_TOKENS, temperature=None)
        seen = repetition(said)
        work.data.setdefault("texts", {}).setdefault(model.name, []).append(
            {"language": text.language, "said": said, "share": round(seen.share, 3),
             "compressed": round(seen.compressed, 3)})  # fmt: skip
        if seen.found:
            loops.append(t("{language}: '{piece}' {times} times in a row", language=text.language,
                           piece=seen.piece[:60], times=seen.times))  # fmt: skip
    severity: Severity = "block" if known else "warn"
    return made(
        work.subject.tagged("repetition", model), "info" if not loops else severity, not loops, t("Repetition"),
        observed=loops[0] if loops else t("{count} texts, none of which repeats itself", count=len(golden().texts)),
        why=t("wrong arithmetic or a wrong chat template often shows as text that repeats"),
        fix="" if not loops else t("Look at the sampling defaults and the KV cache's format, then tune again."),
    )


async def _text(api: Api, ask: str, tokens: int, temperature: float | None = 0.0) -> str:
    more = {} if temperature is None else {"temperature": temperature}
    answer = await api.chat(ask, max_tokens=tokens, seed=1, **more)
    if answer.status != 200 and "max" in answer.said:  # its context is shorter than that
        answer = await api.chat(ask, max_tokens=64, seed=1, **more)
    if answer.status != 200:
        raise ValueError(f"HTTP {answer.status}: {answer.said}")
    message = answer.json["choices"][0]["message"]
    return str(message.get("content") or message.get("reasoning_content") or message.get("reasoning") or "")


async def _logprobs(api: Api) -> list[dict]:
    answer = await api.chat(_PROMPT, max_tokens=32, temperature=0, logprobs=True, top_logprobs=5)
    if answer.status != 200:
        raise ValueError(f"HTTP {answer.status}: {answer.said}")
    return (answer.json["choices"][0].get("logprobs") or {}).get("content") or []


def _judged_probabilities(entries: list[dict], id: str) -> Finding:
    wrong = saturation(entries)
    return made(
        id, "info" if not wrong else "block", not wrong, t("Probabilities"),
        observed=wrong or t("{count} tokens, their probabilities are plausible", count=len(entries)),
        why=t("overflowing numbers or wrong weights show here first"),
        fix="" if not wrong else t("Check the GPU's arithmetic: {command}", command="atoll doctor"),
        command="" if not wrong else "atoll doctor",
    )


async def self_test(*, on_gpu: bool, command: tuple[str, ...] = _SELF_TEST) -> Finding:
    """The engine's own check of each kernel against plain arithmetic, in a separate process."""
    title = t("Numeric self-test")
    if not on_gpu:
        return not_checked("self-test", title, t("the models compute on the CPU, whose arithmetic is PyTorch's own"))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await process.communicate()
    except BaseException:
        process.kill()
        raise
    end: dict = {}
    for line in out.decode(errors="replace").splitlines():
        try:
            value = without_ids(json.loads(line))
        except ValueError:
            continue
        end = value if isinstance(value, dict) and value.get("kind") == "end" else end
    if not end:
        said = err.decode(errors="replace").strip().splitlines()[-1:] or ["–"]
        return made("self-test", "block", False, title, observed=t("it could not start: {why}", why=said[0]),
                    fix=t("Run it by hand: {command}", command="atoll doctor"), command="atoll doctor")  # fmt: skip
    if end["exit_code"] == 2:
        return not_checked("self-test", title, t("there is no usable GPU"))
    ok = end["exit_code"] == 0
    return made(
        "self-test", "info" if ok else "block", ok, title,
        observed=t("{passed} checks passed", passed=end["passed"]) if ok else end.get("message") or "",
        why=t("a wrong kernel gives wrong answers without an error"),
        fix="" if ok else t("Run it by hand: {command}", command="atoll doctor"), command="" if ok else "atoll doctor",
    )
