"""The review of a model's licence, point by point: what the signed bundle says, what a well-known licence says, and
what only a person can say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from appliance.service.findings import Finding, made
from installer.base.i18n import t
from offline_bundle.model.manifest import BundleManifest

Said = Annotated[str, StringConstraints(min_length=2, max_length=500)]
Day = Annotated[str, StringConstraints(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])\z")]


def _about(description: str) -> str | None:
    return Field(default=None, description=description)


class ReviewAnswers(BaseModel):
    """The reviewer's answers for one model. Points that the bundle or its licence settles may be left out."""

    model_config = ConfigDict(extra="forbid")

    reviewer: Said | None = _about("Who reviewed the licence.")
    date: Day | None = _about("When, as YYYY-MM-DD; default: the day of the run.")
    expires: Day | None = _about("When it must be reviewed again; a new revision always needs a new review.")
    lineage: Said | None = _about("Original model, fine-tune and quantiser, each with its licence.")
    acceptable_use: Said | None = _about("The acceptable-use policy, and that the planned use is within it.")
    commercial_terms: Said | None = _about("Limits by revenue, users or use as a service.")
    attribution: Said | None = _about("Attribution and NOTICE texts that must be shown.")
    modifications: Said | None = _about("Whether the weights were converted or quantised, and the notice of it.")
    template: Said | None = _about("Where the tokenizer and the chat template come from.")
    drafter: Said | None = _about("Licences of draft or speculator weights; if none, say so.")
    trademarks: Said | None = _about("Use of the maker's names.")
    export: Said | None = _about("Export and regional limits.")
    redistribution: Said | None = _about("Whether the weights are passed on, and the right to do so.")


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the review. `known` answers it from the manifest if that is possible."""

    id: str
    title: str
    question: str
    known: Callable[[BundleManifest], str | None] = lambda manifest: None


# What these licences themselves say; the reviewer must read any other licence.
_PERMISSIVE = {
    "acceptable_use": t("none in the licence"),
    "commercial_terms": t("none in the licence"),
    "attribution": t("keep the licence's text and its NOTICE"),
    "trademarks": t("the licence gives no right to names"),
    "redistribution": t("allowed by the licence"),
}
PERMISSIVE = ("Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause")


def _permissive(point: str) -> Callable[[BundleManifest], str | None]:
    return lambda manifest: _PERMISSIVE[point] if manifest.license.spdx in PERMISSIVE else None


def _template(manifest: BundleManifest) -> str:
    if manifest.chat_template_sha256 is None:
        return t("no chat template; tokenizer of {repo}", repo=manifest.source.repo)
    return t("from {repo}, template SHA-256 {hash}", repo=manifest.source.repo, hash=manifest.chat_template_sha256[:12])


POINTS = (
    Point("lineage", t("Lineage"),
          t("Which models is it made from (original, fine-tune, quantiser), each under which licence?")),
    Point("acceptable_use", t("Acceptable use"),
          t("Is there an acceptable-use policy, and is the planned use within it?"), _permissive("acceptable_use")),
    Point("commercial_terms", t("Commercial terms"),
          t("Are there limits by revenue, users or use as a service?"), _permissive("commercial_terms")),
    Point("attribution", t("Attribution"),
          t("Which attribution or NOTICE must be shown?"), _permissive("attribution")),
    Point("modifications", t("Modifications"), t("Were the weights converted or quantised, and is that stated?")),
    Point("template", t("Tokenizer and template"),
          t("Where do the tokenizer and the chat template come from?"), _template),
    Point("drafter", t("Draft weights"), t("Which licence do draft or speculator weights have?")),
    Point("trademarks", t("Trademarks"), t("How may the maker's names be used?"), _permissive("trademarks")),
    Point("export", t("Export and regions"), t("Are there export or regional limits?")),
    Point("redistribution", t("Redistribution"),
          t("Are the weights passed on to others, and with which right?"), _permissive("redistribution")),
    Point("reviewer", t("Reviewer"), t("Who answers for this review (name)?")),
    Point("expires", t("Review again"), t("When must this be reviewed again (YYYY-MM-DD)?")),
)  # fmt: skip


def open_points(manifest: BundleManifest, answers: ReviewAnswers) -> list[Point]:
    """The points that neither the bundle nor the answers settle."""
    return [point for point in POINTS if getattr(answers, point.id) is None and point.known(manifest) is None]


def findings(
    manifest: BundleManifest, answers: ReviewAnswers, today: str, named: Callable[[str], str] = str
) -> list[Finding]:
    """The review as findings: facts of the signed bundle, then every point. `named` makes an id specific to this
    model."""
    terms, source = manifest.license, manifest.source
    own_text = any(file.path.rpartition("/")[2].upper().startswith("LICENSE") for file in manifest.files)
    found = [
        made(named("source"), "info", True, t("Source"), observed=f"{source.repo} @ {source.revision}"),
        made(named("files"), "info", True, t("Files"),
             observed=t("{count} files, each with its SHA-256, signed", count=len(manifest.files))),
        made(named("licence-text"), "info", own_text, t("Licence text"),
             observed=t("{spdx}, SHA-256 {hash}", spdx=terms.spdx, hash=terms.sha256)),
    ]  # fmt: skip
    if set(source.revision) <= {"0"} or len(source.revision) < 12:
        found.append(
            made(named("revision"), "warn", False, t("Revision"), observed=source.revision,
                 required=t("the full commit hash"), why=t("A name that moves does not say which weights these are."),
                 fix=t("Ask the bundle's maker for the exact revision."))
        )  # fmt: skip
    found += [_point(point, manifest, answers, named(f"review-{point.id}")) for point in POINTS]
    if answers.expires is not None and answers.expires < today:
        found.append(
            made(named("review-expired"), "block", False, t("Review again"), observed=answers.expires,
                 required=t("a day that is still to come"), why=t("The review was good until then."),
                 fix=t("Review the licence again and set the new day."))
        )  # fmt: skip
    return found


def _point(point: Point, manifest: BundleManifest, answers: ReviewAnswers, id: str) -> Finding:
    said = getattr(answers, point.id) or point.known(manifest)
    if said is not None:
        return made(id, "info", True, point.title, observed=said)
    fix = t("Run the step again and answer, or use the answers file, [review.\"{model}\"], {point} = \"…\": {question}",
            model=manifest.name, point=point.id, question=point.question)  # fmt: skip
    return made(id, "block", False, point.title, observed=t("not answered"),
                required=t("an answer by a person"), fix=fix,
                why=t("The bundle does not say it, and its use depends on it."))  # fmt: skip
