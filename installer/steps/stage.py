"""The steps that write beside what runs and leave it alone: claim, stage."""

from installer import audit, fs, licence, trust
from installer.context import Context
from installer.preflight.record import gib
from offline_bundle.ingest import ingest


def make_state(context: Context) -> None:
    """The directory of lock and journal: the first thing an install writes."""
    fs.make_dir(context.layout.state, 0o700)


def claim(context: Context) -> None:
    """Journal what is about to be created before it is, so that an uninstall after any crash knows it."""
    assert context.plan is not None
    created = [path for path in context.plan.created() if path not in context.history.created]
    if created:
        context.journal.add("creates", paths=created)


def record_decisions(context: Context) -> None:
    """Waivers and the licence's acceptance, into the audit log."""
    layout = context.layout
    for check in context.checks:
        if check.waived is not None:
            audit.append(layout.audit, "check-waived", check=check.id, observed=check.observed, reason=check.waived)
    if context.approval is not None:
        licence.record(layout.approvals, layout.audit, context.approval)


def stage(context: Context) -> str:
    """The tree, the trusted keys, the model in the read-only store, the release. Nothing that runs is touched."""
    layout = context.layout
    manifest, release = context.require()
    for directory, mode in layout.directories():
        fs.make_dir(directory, mode)
    record_decisions(context)
    for key in context.options.trust_keys:
        trust.trust(layout, key)
    copied = 0
    if not context.in_store:
        copied = ingest(
            context.source,
            context.trusted_keys,
            layout.models,
            progress=context.frontend.progress,
            min_sequence=manifest.sequence,
        ).copied_bytes
    release.stage(layout)
    how = f"{gib(copied)} copied and verified" if copied else "already in the store"
    return f"release {release.name}, model {how}"
