"""What the service's quantisation costs: perplexity on texts that come with Atoll, and how often its most likely token
is that of the 16-bit weights.

The service itself is measured, over its endpoint, with the settings that users get. The 16-bit scores come from the
first of these that exists:

    1. a file that the operator names: [verify] quality_reference, --quality-reference
    2. quality_reference.json beside the weights: it travels in the signed bundle (atoll bench quality DIR --save FILE)
    3. the installed weights, if they have 16 bits and are quantised while they load. They are read once, on the CPU in
       a separate process, so the GPU's memory stays the service's. The scores are kept for later verifications.

Without any, only damage is looked for: a model that predicts a text no better than the frequency of its tokens does.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from appliance.service.findings import Finding, made
from appliance.service.verification.api import Api
from appliance.service.verification.context import Verifying, not_checked
from appliance.service.verification.plan import Targets
from appliance.service.verification.subject import Served
from engine.errors import ConfigError
from engine.quality import LANGUAGES, REFERENCE_FILE, Score, pieces, read_reference
from installer.base import fs
from installer.base.i18n import plain, t

_TOKENS = 1024              # of each text, about: agreement is known to a few percent, on a CPU in half a minute
_SPARE_BYTES = 2 << 30      # of memory, beside the weights, for the process that reads them in 16 bits
_BENCH = (sys.executable, "-s", "-P", "-m", "engine.bench", "quality")
_TITLES = {"en": t("Predicting English"), "ko": t("Predicting Korean")}


async def run(work: Verifying, api: Api, model: Served) -> list[Finding]:
    ids = {language: work.subject.tagged(f"perplexity-{language}", model) for language in LANGUAGES}
    found = await scores_of(work, api)
    if isinstance(found, str):
        return [not_checked(ids[language], _TITLES[language], found) for language in LANGUAGES]
    reference = await _reference(work, model)
    before = reference if isinstance(reference, dict) else {}
    kept = work.data.setdefault("prediction", {}).setdefault(model.name, {})
    findings: list[Finding] = []
    for language, score in found.items():
        kept[language] = facts = {"tokens": len(score.tokens), "perplexity": round(score.perplexity, 3)}
        both = score.alike(before[language]) if language in before else None
        if both is not None:
            facts |= {"reference_perplexity": round(both[1].perplexity, 3),
                      "top1_agreement": round(both[0].agreement(both[1]), 4)}  # fmt: skip
            findings.append(compared(ids[language], language, *both, work.plan.targets))
        elif language in before:
            findings.append(_another(ids[language], language))
        else:
            findings.append(_alone(ids[language], language, score))
    if isinstance(reference, str):
        id = work.subject.tagged("quantisation", model)
        findings.append(not_checked(id, t("Cost of the quantisation"), reference))
    return findings


# -- the service -------------------------------------------------------------------------------------------------------


async def scores_of(work: Verifying, api: Api) -> dict[str, Score] | str:
    """By language; or why the endpoint cannot be measured."""
    found = {language: Score() for language in LANGUAGES}
    for language, score in found.items():
        left = pieces(language)
        for number, piece in enumerate(left):
            if len(score.tokens) + number >= _TOKENS:  # each piece's first token is not predicted
                break
            work.told(_TITLES[language], min(len(score.tokens), _TOKENS), _TOKENS)
            answer = await api.post("/v1/completions", {"prompt": piece, "max_tokens": 1, "temperature": 0,
                                                        "prompt_logprobs": 1})  # fmt: skip
            if answer.status != 200:
                return t("the endpoint offers no log-probabilities of prompts ({answer})",
                         answer=f"HTTP {answer.status}")  # fmt: skip
            positions = answer.json["choices"][0].get("prompt_logprobs")
            if not positions or not _add(score, positions):
                return t("the endpoint offers no log-probabilities of prompts ({answer})", answer="HTTP 200")
    return found


def _add(score: Score, positions: list[dict[str, Any] | None]) -> bool:
    """vLLM's format: an object for each token, from token ids to values: the likeliest token, and that of the prompt if
    it is another."""
    for position in positions[1:]:
        if not position:
            return False
        entries = list(position.items())
        token, entry = max(reversed(entries), key=lambda each: each[1]["rank"])
        likeliest, _ = min(entries, key=lambda each: each[1]["rank"])
        score.add(int(token), float(entry["logprob"]), int(likeliest))
    return bool(score.tokens)


# -- the 16-bit weights ------------------------------------------------------------------------------------------------


async def _reference(work: Verifying, model: Served) -> dict[str, Score] | str | None:
    """By language; or why there is none; or None if nothing is quantised."""
    named = work.plan.quality_reference
    path = Path(named) if named else None
    if path is None and model.directory is not None and (model.directory / REFERENCE_FILE).is_file():
        path = model.directory / REFERENCE_FILE
    if path is not None:
        try:
            return read_reference(path)
        except ConfigError as error:
            return error.message
        except OSError as error:
            return plain(error)
    if model.directory is None:
        return t("the endpoint is elsewhere; name the scores of its 16-bit weights with --quality-reference")
    if model.stored_quantised:
        return t("its weights were quantised before they were installed, and no scores of the 16-bit weights came "
                 "with them")  # fmt: skip
    if not model.quantised_while_loading:
        return None
    return await _measured(work, model, model.directory)


async def _measured(work: Verifying, model: Served, directory: Path) -> dict[str, Score] | str:
    """Scores of the installed 16-bit weights, kept from before or measured now."""
    layout = work.subject.layout
    folder = None if layout is None else layout.checklist / "quality"
    kept = None if folder is None else folder / f"{directory.name}.json"
    if kept is not None:
        with contextlib.suppress(OSError, ConfigError):
            return read_reference(kept)
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    free = psutil.virtual_memory().available
    if size + _SPARE_BYTES > free:
        return t("reading the 16-bit weights on the CPU takes {needed} GB of memory, and {free} GB are free",
                 needed=f"{(size + _SPARE_BYTES) / 1e9:.0f}", free=f"{free / 1e9:.0f}")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="atoll-quality-") as scratch:
        written = Path(scratch) / "scores.json"
        if problem := await _read_in_16_bits(work, directory, written):
            return problem
        found = read_reference(written)
        if kept is not None:
            fs.make_dir(kept.parent, 0o700)
            fs.write_atomic(kept, written.read_text("utf-8"), 0o600)
    return found


async def _read_in_16_bits(work: Verifying, directory: Path, target: Path) -> str:
    """Empty if the scores were written; otherwise why not. The process does not outlive this verification."""
    process = await asyncio.create_subprocess_exec(
        *_BENCH, "--model", str(directory), "--device", "cpu", "--tokens", str(_TOKENS), "--save", str(target),
        "--json", "--progress", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None  # noqa: PT018
    said = asyncio.create_task(process.stderr.read())
    try:
        async for line in process.stdout:
            row = json.loads(line)
            if row.get("bench") == "progress":
                work.told(t("The same in 16 bits, on the CPU"), int(row["done"]), int(row["of"]))
        err = (await said).decode(errors="replace")
        if await process.wait() == 0:
            return ""
    except BaseException:
        said.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    return t("the 16-bit weights could not be read: {problem}", problem=err.strip()[-300:])


# -- findings ----------------------------------------------------------------------------------------------------------


def compared(id: str, language: str, score: Score, before: Score, targets: Targets) -> Finding:
    """The service's score beside that of the 16-bit weights, on the same tokens."""
    rise, agreement = score.perplexity / before.perplexity - 1, score.agreement(before)
    ok = rise <= targets.perplexity_rise and agreement >= targets.top1_agreement
    return made(
        id, "info" if ok else "block", ok, _TITLES[language],
        observed=t("perplexity {perplexity}, in 16 bits {before} ({rise}); the likeliest token is the same at "
                   "{agreement} of {count} positions", perplexity=f"{score.perplexity:.2f}",
                   before=f"{before.perplexity:.2f}", rise=f"{rise:+.1%}", agreement=f"{agreement:.1%}",
                   count=len(score.tokens)),
        required=t("at most {rise}, and at least {agreement} the same", rise=f"{targets.perplexity_rise:+.0%}",
                   agreement=f"{targets.top1_agreement:.0%}"),
        why=t("a quantised model that predicts worse also answers worse"),
        fix="" if ok else t("Use a milder quantisation (fp8 or int8, 16 bits for the KV cache) or a checkpoint that "
                            "was quantised with calibration data, or relax the target."),
    )  # fmt: skip


def _alone(id: str, language: str, score: Score) -> Finding:
    """Without 16-bit scores: a healthy model uses the words before a token to predict it. A warning, because some chat
    models predict plain text badly although nothing is wrong with them."""
    ok = score.perplexity < score.frequency_perplexity
    return made(
        id, "info" if ok else "warn", ok, _TITLES[language],
        observed=t("perplexity {perplexity} over {count} tokens", perplexity=f"{score.perplexity:.2f}",
                   count=len(score.tokens)),
        required=t("below {limit}: what the frequency of the text's tokens gives",
                   limit=f"{score.frequency_perplexity:.2f}"),
        why=t("a model that does not use the text before a token is damaged, or was never trained on such text"),
        fix="" if ok else t("Compare it with its 16-bit weights: {command}",
                            command="atoll bench quality DIR --reference DIR"),
    )  # fmt: skip


def _another(id: str, language: str) -> Finding:
    return made(
        id, "warn", False, _TITLES[language],
        observed=t("the scores of the 16-bit weights belong to another tokenizer"),
        why=t("only scores of the same tokens can be compared"),
        fix=t("Measure the 16-bit weights of this very model: {command}",
              command="atoll bench quality DIR --save quality_reference.json"),
    )  # fmt: skip
