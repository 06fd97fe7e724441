"""The steps that ask: preflight, licence, plan. They write nothing; a dry run ends after them."""

from pathlib import Path

from installer.access import api_keys, licence
from installer.access.vendor_keys import key_name
from installer.audit import log
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.base.lock import refuse_if_busy
from installer.decide.context import Context, Model
from installer.decide.plan import Plan
from installer.preflight import PreflightContext, judge, run_checks
from installer.preflight.certificate import names_in
from installer.preflight.lookup_tables import FLAG
from installer.preflight.model_needs import of_manifests
from installer.preflight.record import gib
from installer.release import config, release
from installer.service import snapshots
from installer.tls import endpoint as tls_endpoint


def preflight(context: Context) -> str:
    """Check the machine against what these bundles need."""
    context.checks = run_checks(preflight_context(context), context.options.waivers)
    context.frontend.preflight(context.checks)
    if not context.options.dry_run:
        refuse_if_busy(context.layout.lock)  # another command began since this run looked: not a fault of the machine
    judge(context.checks, strict=context.options.strict)
    counts = {status: sum(check.status == status for check in context.checks) for status in ("pass", "warn", "fail")}
    good, warn, waived = counts["pass"], counts["warn"], counts["fail"]
    if waived:
        return t("{good} passed, {warn} warnings, {waived} waived", good=good, warn=warn, waived=waived)
    return t("{good} passed, {warn} warnings", good=good, warn=warn)


def preflight_context(context: Context) -> PreflightContext:
    """What the checks look at, from the facts that `discover` and `verify` found."""
    layout, options = context.layout, context.options
    if layout.system:
        tables = config.model_tables(context.config_text, layout.config)
    else:
        tables = {model.instance: config.parse(context.config_text, layout.config) for model in context.models}
    gpus = {name: tuple(table["gpus"]) for name, table in tables.items() if table.get("gpus")}
    on_cpu = all(table.get("device") == "cpu" for table in tables.values())
    return PreflightContext(
        layout=layout,
        endpoint=context.endpoint,
        own_pids=context.own_pids,
        device="cpu" if on_cpu else options.device or "auto",
        gpus=tuple(gpu for listed in gpus.values() for gpu in listed),
        tls=context.endpoint.certificate is not None,
        certificate_names=names_in(options.tls.certificate),
        bundle=next(iter(options.media), options.bundle),
        **of_manifests(
            {model.instance: model.manifest for model in context.models},
            in_store=[model.manifest for model in context.models if model.in_store],
            gpus=gpus,
            sources={model.instance: model.source for model in context.models},
            tables={name: str(table[FLAG]) for name, table in tables.items() if FLAG in table},
        ),
    )


def accept_licences(context: Context) -> str:
    """For each model, one of: a person accepts the exact text, an answer names it, or the same bundle was accepted
    before."""
    return joined((_accept(context, model) for model in context.models), "; ")


def _accept(context: Context, model: Model) -> str:
    manifest, terms = model.manifest, model.manifest.license
    gated = terms.acceptance == "gated"
    if licence.already_approved(context.layout.approvals, terms.sha256, model.digest, gated=gated):
        return t("{spdx}, accepted earlier", spdx=terms.spdx)
    text = licence.read_text(model.source, terms.file, terms.sha256)
    about = f"{manifest.name} {manifest.version}"
    request = licence.LicenceRequest(terms.spdx, terms.sha256, text, terms.url, about, gated)
    reference = licence.answered(request, context.options.accept_licenses)
    if reference is not None:
        how = "answer"
    elif terms.acceptance == "none":
        how = "not required"
    elif context.options.dry_run:
        return t("{spdx} will have to be accepted: --accept-license {answer}", spdx=terms.spdx, answer=request.answer)
    elif context.frontend.accept_licence(request):
        how = "interactive"
        reference = licence.check_reference(request, context.frontend.licence_reference(request) if gated else "")
    else:
        raise licence.not_accepted(request, model.source / terms.file)
    model.approval = licence.approve(request, model.digest, how, reference or "")
    if how == "not required":
        return t("{spdx}, no acceptance required by the vendor", spdx=terms.spdx)
    return t("{spdx}, accepted", spdx=terms.spdx)


def plan(context: Context) -> str:
    """Everything that the next steps will write, start and open. Without confirmation here, the install ends."""
    context.plan = made = make_plan(context)
    context.frontend.plan(made)
    if context.options.dry_run:
        return t("dry run: nothing was changed")
    if not context.options.confirmed and not context.frontend.confirm_plan(made):
        raise InstallError(
            t("The plan was not confirmed."),
            exit_code=ExitCode.USAGE,
            changed=t("Nothing was changed."),
            hint=t("Run again and answer yes, or confirm it beforehand with --yes-nothing-else."),
        )
    return t("{bytes} to write", bytes=gib(made.bytes))


def make_plan(context: Context) -> Plan:
    """Item by item, in the order of the steps."""
    layout, target = context.layout, context.target()
    plan = Plan(target.name, release.live(layout))
    _plan_tree(context, plan)
    for model in context.models:
        store, count = layout.models / model.digest, len(model.manifest.files)
        note = t("{instance}: {count} files, read-only", instance=model.instance, count=count)
        size = 0 if model.in_store else model.manifest.total_bytes
        plan.add("model", store, "keep" if model.in_store else "create", size, note)
    if code := release.plan_code(layout):
        here = code[0].is_dir()
        plan.add("directory", code[0], "keep" if here else "create", 0 if here else code[1], t("the code, verified"))
    for name, content, _ in target.files():
        _plan_file(plan, layout.releases / target.name / name, len(content))
    _plan_text(plan, layout.config, context.config_text, t("settings"))
    api_keys.read(layout.api_keys)  # report a damaged file now, not half-way through
    _plan_file(plan, layout.api_keys, 400, t("mode 0600, hashes only"))
    for path in (layout.journal, layout.audit, layout.approvals, layout.sequence):
        _plan_file(plan, path, 4096)
    saved, text = snapshots.file_of(layout, context.snapshot())
    _plan_file(plan, saved, len(text.encode()), t("what a rollback to this release needs"))
    if context.tls_names:
        for path, size, note in tls_endpoint.plan_files(layout):
            _plan_file(plan, path, size, note)
    linked = layout.current.is_symlink()
    plan.add("symlink", layout.current, "replace" if linked else "create", 0, f"-> releases/{target.name}")
    if layout.system:
        _plan_services(context, plan)
    else:
        _plan_process(context, plan)
    listens = "HTTPS" if context.endpoint.certificate else "HTTP"
    deed = "keep" if context.service.state().up else "create"
    plan.add("port", f"{context.endpoint.host}:{context.endpoint.port}", deed, 0, listens)
    return plan


def _plan_tree(context: Context, plan: Plan) -> None:
    layout = context.layout
    begun = _begun_without_a_journal(layout)
    outside = {path.parent for path in (*(unit.path for unit in context.units), layout.command) if layout.system}
    for directory in [layout.prefix, *_parents(layout), *sorted(outside), *(path for path, _ in layout.directories())]:
        if not directory.is_dir() or directory in begun:
            plan.add("directory", directory, "create")
    for source in context.options.trust_keys:
        _plan_file(plan, layout.trust / key_name(source), source.stat().st_size, t("trusted key"))


def _plan_process(context: Context, plan: Plan) -> None:
    layout = context.layout
    _plan_file(plan, layout.log, 4096)
    deed = "restart" if context.service.state().up else "start"
    plan.add("process", f"atoll serve --config {layout.config}", deed, 0, t("in a session of its own"))
    plan.add("user", str(log.operator()["user"]), "keep", 0, t("runs the service; no user is made"))


def _plan_services(context: Context, plan: Plan) -> None:
    """Files that systemd reads, users, units."""
    from installer.service import units

    layout = context.layout
    for unit in context.units:
        _plan_text(plan, unit.path, unit.content, "systemd")
    wanted = {unit.path for unit in context.units}
    for path in units.owned_files(layout):
        if path not in wanted and path.is_file():
            plan.add("file", path, "remove", 0, "systemd")
    linked = layout.command.is_symlink()
    plan.add("symlink", layout.command, "keep" if linked else "create", 0, f"-> {layout.current}/bin/atoll")
    for user, note in ((units.ENGINE_USER, t("runs the engines")), (units.GATEWAY_USER, t("runs the gateway")),
                       (units.SAMPLER_USER, t("keeps the history of the service"))):  # fmt: skip
        about = t("no shell, no home; {note}", note=note)
        plan.add("user", user, "keep" if _user_exists(layout, user) else "create", 0, about)
    plan.add("group", units.GROUP, "keep" if _user_exists(layout, units.GROUP, "group") else "create")
    for name in units.enabled(context.names):
        here = (layout.units / "atoll.target").exists()
        plan.add("unit", name, "keep" if here and name not in _new_units(context) else "start", 0, t("at every boot"))
    for name in context.removed:
        plan.add("unit", units.engine_unit(name), "remove", 0, t("its model is kept as long as a rollback may need it"))


def _new_units(context: Context) -> set[str]:
    from installer.decide.models import installed
    from installer.service import units

    here = {facts["instance"] for facts in installed(context)}
    here |= config.replicas(context.base_config, context.layout.config).keys()
    return {units.engine_unit(name) for name in context.names if name not in here}


def _user_exists(layout: Layout, name: str, database: str = "passwd") -> bool:
    lines = (config.read_text(layout.prefix / "etc" / database) or "").splitlines()
    return any(line.partition(":")[0] == name for line in lines)


def _begun_without_a_journal(layout: Layout) -> set[Path]:
    """What exists although there is no journal yet: empty directories of a run that was killed before it opened its
    journal, and the code that install.sh unpacks earlier. Without this list, a purge would leave them behind."""
    if layout.journal.exists() or layout.prefix == Path("/"):
        return set()
    ours = (layout.state, *layout.state.parents, layout.code, *layout.code.parents)
    below = {path for path in ours if layout.prefix in path.parents}
    alone = all(
        path in below or path == layout.lock or layout.code in path.parents for path in layout.prefix.rglob("*")
    )
    here = {path for path in below if path.is_dir()}
    return {layout.prefix, *here} if alone and here else set()


def _plan_file(plan: Plan, path: Path, size: int, note: str = "") -> None:
    here = path.exists()
    plan.add("file", path, "keep" if here else "create", 0 if here else size, note)


def _plan_text(plan: Plan, path: Path, text: str, note: str) -> None:
    """A file whose whole content is known."""
    before = config.read_text(path)
    deed = "create" if before is None else "keep" if before == text else "replace"
    plan.add("file", path, deed, len(text.encode()) if deed == "create" else 0, note)


def _parents(layout: Layout) -> list[Path]:
    """Directories between the prefix and our roots, outermost first."""
    prefix = layout.prefix
    return sorted({parent for root in layout.roots for parent in root.parents if prefix in parent.parents})
