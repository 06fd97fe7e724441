"""The steps that write beside what runs without touching it: claim, stage."""

import time

from installer.access import licence, vendor_keys
from installer.audit import log
from installer.base import fs
from installer.base.i18n import t
from installer.decide.context import Context
from installer.preflight.record import gib
from installer.steps.inspect import refuse_revoked_release
from installer.tls import endpoint as tls_endpoint
from offline_bundle.store.ingest import ingest


def make_state(context: Context) -> None:
    """The directory of lock and journal: the first thing an install writes."""
    fs.make_dir(context.layout.state, 0o700)


def claim(context: Context) -> None:
    """Record in the journal what is about to be created, so that an uninstall after any crash knows about it."""
    assert context.plan is not None
    created = [path for path in context.plan.created() if path not in context.history.created]
    if created:
        context.journal.add("creates", paths=created)


def record_decisions(context: Context) -> None:
    """Write waivers, downgrades and accepted licences into the audit log."""
    layout = context.layout
    for check in context.checks:
        if check.waived is not None:
            log.append(layout.audit, "check-waived", check=check.id, observed=check.observed, reason=check.waived)
    for facts in context.downgrades:
        log.append(layout.audit, "downgrade-allowed", **facts)
    for model in context.models:
        if model.approval is not None:
            licence.record(layout.approvals, layout.audit, model.approval)


def stage(context: Context) -> str:
    """Create the directories, the trusted keys, the models in the read-only store, and the release. Nothing that runs
    is touched."""
    layout, release = context.layout, context.target()
    for directory, mode in layout.directories():
        fs.make_dir(directory, mode)
    record_decisions(context)
    for key in context.options.trust_keys:
        vendor_keys.trust(layout, key)
    copied, began = 0, time.monotonic()
    for model in context.models:
        if not model.in_store:
            copied += ingest(
                model.source,
                vendor_keys.keyring(layout, context.options.trust_keys),  # read again: a key may have been revoked
                layout.models,
                progress=context.frontend.progress,
                min_sequence=model.manifest.sequence,
            ).copied_bytes
            model.in_store = True
    refuse_revoked_release(context)
    if copied:
        context.journal.add("copied", bytes=copied, copy_s=round(time.monotonic() - began, 2))
    release.stage(layout)
    if context.tls_names and context.tls_import is None:
        required = tls_endpoint.required_names(context.endpoint.host, context.options.tls.names)
        tls_endpoint.ensure(layout, context.tls_names, required=required)
    how = t("{size} copied and verified", size=gib(copied)) if copied else t("already in the store")
    return t("release {name}, model {how}", name=release.name, how=how)
