"""What trust in an installation rests on, for `atoll status`: its last verification, trusted keys, certificate, API
keys and approved licences."""

import calendar
import contextlib
import os
import time
from typing import Any

from installer.access import api_keys, licence, vendor_keys
from installer.base.exposure import check_exposure
from installer.base.i18n import t
from installer.base.journal import Replay
from installer.base.layout import Layout
from installer.base.messages import without_ids
from installer.operate.deep_verify import report
from installer.operate.findings import Findings
from installer.release import config, release
from installer.tls import endpoint as tls_endpoint

VERIFY_DAYS = 15       # two weekly checks were missed
KEY_DAYS = 14          # a key's holder should have a new one before the key ends
SHORT_KEY = 86_400.0   # seconds; a key that was made for a day is meant to end

Facts = dict[str, Any]


def last_verify(layout: Layout, log: Replay, committed: Facts, found: Findings) -> Facts | None:
    """The last time that every byte was read: by `atoll verify`, or else by the install."""
    record = found.try_read(t("the last verification"), lambda: _read_verify(layout), None)
    installed = next((r for r in reversed(log.records) if r["event"] == "done" and r.get("step") == "verify"), None)
    if record is None:
        if "the last verification" in found.unseen:
            return None
        at = (installed or committed).get("at")
        if at and _age_days(at) > VERIFY_DAYS:
            found.warn(t("Nothing was verified since the install at {at}.", at=at), "atoll verify")
        if installed is None:
            return None
        detail = without_ids(installed)["detail"]
        return {"at": at, "by": "install", "outcome": "good", "exit_code": 0, "detail": detail}
    if record["outcome"] == "bad":
        for target in (target for target in record["targets"] if target.get("exit_code")):
            message = t("Verification of {at}: {error}", at=record["finished"], error=target["error"])
            found.error(message, target.get("hint", ""))
    elif record["outcome"] == "interrupted":
        found.warn(t("The verification started at {at} was interrupted.", at=record["started"]), "atoll verify")
    elif _age_days(record["finished"]) > VERIFY_DAYS:
        found.warn(t("The last verification was {days} days ago.", days=_age_days(record["finished"])), "atoll verify")
    count = len(record["targets"])
    detail = t("{count} parts, {size:.2f} GiB in {seconds:.0f} s", count=count, size=record["bytes"] / 2**30,
               seconds=record["seconds"])
    return {"at": record["finished"], "by": "verify", "outcome": record["outcome"], "exit_code": record["exit_code"],
            "detail": detail}


def trust(layout: Layout, committed: Facts, found: Findings) -> Facts:
    """The trusted keys, and which parts of this release were signed by a key that is no longer trusted."""
    gone = vendor_keys.revoked(layout)
    info = release.read_info(layout, str(committed.get("release")))
    for what, fingerprint in vendor_keys.signed_by(info).items():
        if fingerprint in gone:
            found.error(
                t("{what} is signed by the key {key}…, which was revoked here: {why}.", what=what,
                  key=fingerprint[:16], why=vendor_keys.why_revoked(layout, fingerprint)),
                t("Replace it with one that the vendor's new key has signed: atoll install MEDIUM --trust-key NEW.pub"),
            )
    keys_here = vendor_keys.entries(layout)
    for entry in keys_here:
        if entry.problem:
            tell = found.warn if entry.path.is_symlink() else found.error  # symlinks are not read
            tell(t("The trusted key {path} cannot be used: {problem}", path=entry.path, problem=entry.problem),
                 f"atoll trust remove {entry.path.name}")  # fmt: skip
    good = [entry.fingerprint for entry in keys_here if entry.fingerprint and entry.fingerprint not in gone]
    return {"trusted": good, "revoked": sorted(gone)}


def certificate(layout: Layout, endpoint: config.Endpoint | None, found: Findings) -> Facts | None:
    facts = tls_endpoint.facts(layout)
    if endpoint is None or endpoint.certificate is None:
        if endpoint is not None and not layout.system:
            path, text = layout.config, config.read_text(layout.config) or ""
            found.try_read(t("the settings"), lambda: check_exposure(config.parse(text, path), path), None)
        return facts
    if facts is None:
        found.error(t("The certificate {path} is missing.", path=layout.server_cert), "atoll tls renew")
        return None
    fix = "atoll tls renew" if facts["source"] == "local" else "atoll tls import --cert FILE --key FILE"
    if facts["days_left"] < 0:
        found.error(t("The certificate expired at {at}: clients refuse it.", at=facts["not_after"]), fix)
    elif facts["days_left"] < tls_endpoint.RENEW_DAYS:
        days, at = facts["days_left"], facts["not_after"]
        found.warn(t("The certificate ends in {days} days, at {at}.", days=days, at=at), fix)
    if facts["ca"] and facts["ca"]["days_left"] < 3 * tls_endpoint.RENEW_DAYS:
        days = facts["ca"]["days_left"]
        found.warn(t("The local authority ends in {days} days.", days=days), "atoll tls renew --new-ca")
    return facts


def keys(layout: Layout, found: Findings, *, serving: bool) -> list[Facts]:
    if not layout.api_keys.exists() and not os.access(layout.credentials, os.X_OK) and layout.credentials.exists():
        raise PermissionError
    entries = api_keys.people(layout.api_keys)
    active = [entry for entry in entries if api_keys.state(entry) == "active"]
    if serving and not any({"serve", "admin"} & set(api_keys.scopes_of(entry)) for entry in active):
        found.error(t("No active API key is left: nobody can use the endpoint."), "atoll apikey new --name NAME")
    for entry in active:
        left, lifetime = api_keys.seconds_left(entry), api_keys.lifetime_of(entry)
        if left is not None and lifetime is not None and left < KEY_DAYS * 86400 and lifetime > SHORT_KEY:
            days, name = int(left // 86400), entry.get("name", "")
            found.warn(
                t("The API key {id} ({name}) ends in {days} days.", id=entry["id"], name=name, days=days),
                t("atoll apikey new --name NAME, give it out, then revoke the old one"),
            )
    return [
        {**{name: entry.get(name) for name in ("id", "name", "created", "expires")},
         "scopes": api_keys.scopes_of(entry), "state": api_keys.state(entry)}
        for entry in entries if api_keys.state(entry) != "revoked"
    ]


def licences(layout: Layout, bundles: list[Facts]) -> list[Facts]:
    if not os.access(layout.state, os.X_OK) and layout.state.exists():
        raise PermissionError
    digests = {bundle.get("digest") for bundle in bundles}
    fields = ("spdx", "sha256", "how", "who", "when", "bundle_digest")
    approvals = licence.load_approvals(layout.approvals)
    return [{name: entry.get(name) for name in fields} for entry in approvals if entry.get("bundle_digest") in digests]


def _read_verify(layout: Layout) -> Facts | None:
    os.stat(layout.state)
    if not os.access(layout.state, os.X_OK):
        raise PermissionError
    return report.last(layout)


def _age_days(at: str) -> int:
    with contextlib.suppress(ValueError):
        return int((time.time() - calendar.timegm(time.strptime(at, "%Y-%m-%dT%H:%M:%SZ"))) // 86400)
    return 0
