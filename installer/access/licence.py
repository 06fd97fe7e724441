"""The licence gate: no model is installed before a person, or an explicit answer, has accepted its exact text.

An unattended acceptance names the licence and the text: ``Apache-2.0@cfc7749b96f6`` (SPDX id, at least 8 hex digits of
the text's SHA-256). There is no blanket acceptance. A gated model also needs the reference of the agreement that
permits its use: ``LicenseRef-Gemma@cfc7749b96f6:CONTRACT-4711``.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from installer.audit import log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.timestamps import timestamp

_ANSWER = re.compile(r"([A-Za-z0-9.+-]+)@([0-9a-fA-F]{8,64})(?::(.*))?\Z")
REFERENCE = range(3, 121)  # characters
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
TEXT_LIMIT = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class LicenceRequest:
    """What is to be accepted. `text` is safe to show: it has no control or direction characters."""

    spdx: str
    sha256: str
    text: str
    url: str | None
    model: str
    gated: bool = False  # a reference to the agreement is required too

    @property
    def answer(self) -> str:
        """The answer that accepts it in an unattended install."""
        return f"{self.spdx}@{self.sha256[:12]}" + (":REFERENCE" if self.gated else "")


@dataclass(frozen=True, slots=True)
class Approval:
    """One acceptance, as the audit log and approvals.json record it."""

    spdx: str
    sha256: str
    bundle_digest: str
    how: str  # "interactive", "answer", or "not required" by the bundle's maker
    who: dict[str, Any]
    when: str
    reference: str = ""  # of the agreement, for a gated model

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def read_text(root: Path, name: str, sha256: str) -> str:
    """The licence text. It is checked against its signed hash while it is read."""
    fd = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        data = file.read(TEXT_LIMIT + 1)
    if len(data) > TEXT_LIMIT or hashlib.sha256(data).hexdigest() != sha256:
        raise InstallError(
            t("The licence text {name} is not the one that was signed.", name=name),
            exit_code=ExitCode.CONTENT_MISMATCH,
            changed=t("Nothing was changed."),
            hint=t("Copy the bundle from its source again."),
        )
    return _CONTROL.sub("", data.decode(errors="replace").replace("\r\n", "\n"))


def answered(request: LicenceRequest, answers: Iterable[str]) -> str | None:
    """The reference in the answer that names exactly this licence and this text ("" for none); None without such an
    answer.

    Malformed answers are an error, and so is an answer for a gated model without a reference.
    """
    found: str | None = None
    for answer in answers:
        match = _ANSWER.match(answer.strip())
        if match is None:
            raise InstallError(
                t("'{answer}' does not accept a licence.", answer=answer),
                exit_code=ExitCode.USAGE,
                why=t("An acceptance names the licence and its text: SPDX-ID@SHA256-PREFIX, with at least 8 hex "
                      "digits."),
                changed=t("Nothing was changed."),
                hint=t("For this bundle: --accept-license {answer}", answer=request.answer),
            )
        if match[1] == request.spdx and request.sha256.startswith(match[2].lower()):
            found = found or (match[3] or "").strip()
    return check_reference(request, found) if found is not None else None


def check_reference(request: LicenceRequest, reference: str) -> str:
    """`reference` as it will be recorded. Raises InstallError (20) if a gated model needs one and this is not one."""
    if request.gated and not (len(reference) in REFERENCE and reference.isprintable()):
        raise InstallError(
            t("{model} is gated: its licence {spdx} is not enough to use it.", model=request.model, spdx=request.spdx),
            exit_code=ExitCode.LICENCE,
            why=t("Its maker gives access by agreement. Which one covers this server is written into the audit log."),
            changed=t("Nothing was changed."),
            hint=t("Name the contract, approval or account ({least} to {most} characters): --accept-license {answer}",
                   least=REFERENCE[0], most=REFERENCE[-1], answer=request.answer),
        )
    return reference if request.gated else ""


def not_accepted(request: LicenceRequest, where: Path) -> InstallError:
    return InstallError(
        t("The licence {spdx} of {model} was not accepted.", spdx=request.spdx, model=request.model),
        exit_code=ExitCode.LICENCE,
        why=t("The bundle's maker asks for acceptance before the model is installed."),
        changed=t("Nothing was changed."),
        hint=t("Read {where}, then accept it: --accept-license {answer}", where=where, answer=request.answer),
    )


def load_approvals(path: Path) -> list[dict[str, Any]]:
    """Earlier acceptances. A damaged file counts as none: the audit log still has them."""
    try:
        approvals = json.loads(path.read_bytes())["approvals"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [entry for entry in approvals if isinstance(entry, dict)] if isinstance(approvals, list) else []


def already_approved(path: Path, sha256: str, bundle_digest: str, *, gated: bool = False) -> bool:
    """Whether this text was accepted for this bundle; for a gated one, with a reference."""
    return any(
        a.get("sha256") == sha256 and a.get("bundle_digest") == bundle_digest and (a.get("reference") or not gated)
        for a in load_approvals(path)
    )


def record(approvals_path: Path, audit_path: Path, approval: Approval) -> None:
    """Record an acceptance, first in the audit log; once per text and bundle."""
    if already_approved(approvals_path, approval.sha256, approval.bundle_digest, gated=bool(approval.reference)):
        return
    facts = {"spdx": approval.spdx, "sha256": approval.sha256, "bundle": approval.bundle_digest, "how": approval.how}
    if approval.reference:
        facts["reference"] = approval.reference
    log.append(audit_path, "licence-accepted", **facts)
    entries = [*load_approvals(approvals_path), approval.to_json()]
    fs.write_atomic(approvals_path, json.dumps({"approvals": entries}, indent=2) + "\n", 0o600)


def approve(request: LicenceRequest, bundle_digest: str, how: str, reference: str = "") -> Approval:
    """An acceptance made now by this person; `record` makes it lasting."""
    when = timestamp()
    return Approval(request.spdx, request.sha256, bundle_digest, how, log.operator(), when, reference)
