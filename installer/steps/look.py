"""The steps that write nothing: discover, verify, preflight, licence, plan. A dry run is exactly these."""

from datetime import datetime
from pathlib import Path

from installer import audit, config, keys, licence, release
from installer.context import Context
from installer.errors import ExitCode, InstallError
from installer.layout import Layout
from installer.plan import Plan
from installer.preflight import PreflightContext, judge, run_checks
from installer.preflight.record import gib
from installer.release import Release
from installer.sequence import last_sequence
from installer.trust import installed_keys, key_name
from offline_bundle import media
from offline_bundle.errors import BundleError
from offline_bundle.keys import load_trusted
from offline_bundle.store import verify_model
from offline_bundle.verify import SignedManifest, check_signed_manifest, verify_bundle

_UNTOUCHED = "Nothing was changed."


def discover(context: Context) -> str:
    """What is here already: an installation, an interrupted one, settings, trusted keys."""
    layout, options, history = context.layout, context.options, context.before
    if not options.bundle.is_dir():
        raise InstallError(
            f"There is no bundle at {options.bundle}.",
            exit_code=ExitCode.MEDIA,
            why="The medium may not be mounted, or the path may be another.",
            changed=_UNTOUCHED,
            hint="Mount it and give the directory that holds bundle.json: --bundle DIR",
        )
    if layout.prefix.exists() and not layout.prefix.is_dir():
        raise InstallError(
            f"{layout.prefix} is a file, not a directory.",
            exit_code=ExitCode.USAGE,
            changed=_UNTOUCHED,
            hint="Choose another --prefix.",
        )
    context.trusted_keys = [*options.trust_keys, *installed_keys(layout)]
    if not context.trusted_keys:
        raise InstallError(
            "No key is trusted yet, so no bundle can be.",
            exit_code=ExitCode.USAGE,
            changed=_UNTOUCHED,
            hint="Give the vendor's public key, got by another way than the bundle: --trust-key FILE.pub",
        )
    # After a crash behind the switch, the settings to build on are those from before it.
    switch = history.open_switch
    base = layout.config
    if switch is not None:
        base = layout.config_backup if switch["had_config"] else None
    context.base_config = config.read_text(base) if base is not None else None
    standing = config.endpoint(context.base_config, layout.config)
    context.endpoint = config.Endpoint(options.host or standing.host, options.port or standing.port)
    context.own_pids = context.service.pids()
    if switch is not None:
        return f"an install that was interrupted in step '{history.last_step or 'switch'}' will be finished"
    if history.committed is not None:
        return f"release {history.committed['release']} is installed"
    return "nothing is installed here yet"


def verify(context: Context) -> str:
    """The signature first, then every byte, unless the read-only store already holds this very bundle."""
    options, layout = context.options, context.layout
    signed = _signed_manifest(context)
    context.manifest, context.digest, context.key_fingerprint = signed.manifest, signed.digest, signed.key_fingerprint
    context.source = options.bundle
    minimum = last_sequence(layout, signed.manifest.name)
    if minimum is not None and signed.manifest.sequence < minimum:
        raise InstallError(
            f"This bundle of {signed.manifest.name} is older (sequence {signed.manifest.sequence}) than one that was "
            f"installed here (sequence {minimum}).",
            exit_code=ExitCode.DOWNGRADE,
            why="Old bundles may bring back what a newer one fixed; an attacker may replay them.",
            changed=_UNTOUCHED,
            hint="Use a bundle with a higher sequence; a going-back is built by its vendor as a new bundle.",
        )
    entry = layout.models / signed.digest
    if entry.is_dir():
        try:
            verify_model(layout.models, signed.digest, context.trusted_keys, deep=False)
            context.source, context.in_store = entry, True
        except BundleError:
            context.frontend.note("The copy in the store is damaged; it will be made again.")
    if not context.in_store:
        verify_bundle(options.bundle, context.trusted_keys, progress=context.frontend.progress)
    facts = {
        "name": signed.manifest.name,
        "version": signed.manifest.version,
        "sequence": signed.manifest.sequence,
        "digest": signed.digest,
        "key_fingerprint": signed.key_fingerprint,
    }
    context.release = Release.of(facts, context.release_command)
    values = {
        "model": str(context.model_dir),
        "served-model-name": signed.manifest.name,
        "host": context.endpoint.host,
        "port": context.endpoint.port,
        "api-key-file": str(layout.api_keys),
    }
    context.config_text = config.render(context.base_config, values, layout.config)
    size = gib(signed.manifest.total_bytes)
    how = "already in the store" if context.in_store else f"{size} hashed"
    return f"{signed.manifest.name} {signed.manifest.version}, signed by {signed.key_fingerprint[:16]}…, {how}"


def preflight(context: Context) -> str:
    """The machine against what this bundle needs."""
    context.checks = run_checks(preflight_context(context), context.options.waivers)
    context.frontend.preflight(context.checks)
    judge(context.checks, strict=context.options.strict)
    counts = {status: sum(check.status == status for check in context.checks) for status in ("pass", "warn", "fail")}
    waived = f", {counts['fail']} waived" if counts["fail"] else ""
    return f"{counts['pass']} passed, {counts['warn']} warnings{waived}"


def preflight_context(context: Context) -> PreflightContext:
    """What the checks look at, from what `discover` and `verify` found."""
    manifest, _ = context.require()
    return PreflightContext(
        layout=context.layout,
        endpoint=context.endpoint,
        model_bytes=manifest.total_bytes,
        weight_bytes=sum(file.size for file in manifest.files if file.role == "weights"),
        copy_bytes=0 if context.in_store else manifest.total_bytes,
        host_ram_bytes=manifest.requires.host_ram_bytes,
        bundle_created=datetime.fromisoformat(manifest.created).timestamp(),
        own_pids=context.own_pids,
    )


def accept_licence(context: Context) -> str:
    """A person's yes to the very text, an answer that names it, or an earlier acceptance of the same bundle."""
    manifest, _ = context.require()
    terms = manifest.license
    if licence.already_approved(context.layout.approvals, terms.sha256, context.digest):
        return f"{terms.spdx}, accepted earlier"
    text = licence.read_text(context.source, terms.file, terms.sha256)
    request = licence.LicenceRequest(terms.spdx, terms.sha256, text, terms.url, f"{manifest.name} {manifest.version}")
    if licence.answered(request, context.options.accept_licenses):
        how = "answer"
    elif terms.acceptance == "none":
        how = "not required"
    elif context.options.dry_run:
        return f"{terms.spdx} will have to be accepted: --accept-license {request.answer}"
    elif context.frontend.accept_licence(request):
        how = "interactive"
    else:
        raise licence.not_accepted(request, context.source / terms.file)
    context.approval = licence.approve(request, context.digest, how)
    return f"{terms.spdx}, {'no acceptance required by the vendor' if how == 'not required' else 'accepted'}"


def plan(context: Context) -> str:
    """Everything that the next steps will write, start and open. Confirmed here, or the install ends here."""
    context.plan = made = make_plan(context)
    context.frontend.plan(made)
    if context.options.dry_run:
        return "dry run: nothing was changed"
    if not context.options.confirmed and not context.frontend.confirm_plan(made):
        raise InstallError(
            "The plan was not confirmed.",
            exit_code=ExitCode.USAGE,
            changed=_UNTOUCHED,
            hint="Run again and answer yes, or confirm it beforehand with --yes-nothing-else.",
        )
    return f"{gib(made.bytes)} to write"


def make_plan(context: Context) -> Plan:
    layout = context.layout
    manifest, target = context.require()
    plan = Plan(target.name, release.live(layout))
    begun = _begun_without_a_journal(layout)
    for directory in [layout.prefix, *_parents(context), *(path for path, _ in layout.directories())]:
        if not directory.is_dir() or directory in begun:
            plan.add("directory", directory, "create")
    for source in context.options.trust_keys:
        _plan_file(plan, layout.trust / key_name(source), source.stat().st_size, "trusted key")
    store, note = layout.models / context.digest, f"{len(manifest.files)} files, read-only"
    if context.in_store:
        plan.add("model", store, "keep", 0, note)
    else:
        plan.add("model", store, "create", manifest.total_bytes, note)
    for name, content, _ in target.files():
        _plan_file(plan, layout.releases / target.name / name, len(content))
    changed = config.read_text(layout.config) != context.config_text
    deed = "create" if not layout.config.exists() else "replace" if changed else "keep"
    plan.add("file", layout.config, deed, len(context.config_text) if deed == "create" else 0, "settings")
    keys.read(layout.api_keys)  # a damaged file is told now, not in the middle
    _plan_file(plan, layout.api_keys, 400, "mode 0600, hashes only")
    for path in (layout.journal, layout.audit, layout.approvals, layout.sequence, layout.log):
        _plan_file(plan, path, 4096)
    linked = layout.current.is_symlink()
    plan.add("symlink", layout.current, "replace" if linked else "create", 0, f"-> releases/{target.name}")
    running = context.service.state().up
    deed = "restart" if running else "start"
    plan.add("process", f"atoll serve --config {layout.config}", deed, 0, "in a session of its own")
    plan.add("port", f"{context.endpoint.host}:{context.endpoint.port}", "keep" if running else "create", 0, "HTTP")
    plan.add("user", str(audit.operator()["user"]), "keep", 0, "runs the service; no user is made")
    return plan


def _begun_without_a_journal(layout: Layout) -> set[Path]:
    """The empty directories of a run that was killed on its way to its journal; ours, if there is nothing else.

    Otherwise nobody would remember them, and a purge would leave them behind.
    """
    below = {path for path in (layout.state, *layout.state.parents) if layout.prefix in path.parents}
    if layout.journal.exists() or not (layout.prefix / "var").is_dir():
        return set()
    alone = all(path in below or path == layout.lock for path in layout.prefix.rglob("*"))
    return {layout.prefix, *below} if alone else set()


def _plan_file(plan: Plan, path: Path, size: int, note: str = "") -> None:
    here = path.exists()
    plan.add("file", path, "keep" if here else "create", 0 if here else size, note)


def _parents(context: Context) -> list[Path]:
    """Directories between the prefix and our roots, outermost first."""
    prefix = context.layout.prefix
    return sorted({parent for root in context.layout.roots for parent in root.parents if prefix in parent.parents})


def _signed_manifest(context: Context) -> SignedManifest:
    """The manifest once its signature holds: kilobytes, whatever the size of the bundle."""
    with media.open_root(context.options.bundle) as root:
        return check_signed_manifest(root, load_trusted(context.trusted_keys, context.options.bundle), None)
