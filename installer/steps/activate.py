"""The steps that touch what runs: units, switch, start, smoke, commit. undo.py reverses them.

The first of them records in the journal what it is about to replace. Until `commit` is journalled, that record stays
open and says how to go back. A run that finds an open record continues from there, whatever killed the previous run.
"""

import time
from pathlib import Path

from installer.access import api_keys
from installer.audit import log
from installer.base import fs
from installer.base.i18n import joined, t
from installer.base.recovery_mark import mark, unmark
from installer.decide import changes
from installer.decide.context import Context
from installer.preflight.record import gib
from installer.release import config, migrate, release
from installer.release.replay_guard import raise_sequence
from installer.service import snapshots, units
from installer.service.manager import Switched, stop_and_start
from installer.service.smoke_test import SmokeFailure, smoke_test
from installer.steps.prune import prune
from installer.steps.wait_until_ready import unhealthy, wait_engines, wait_ready
from installer.tls import endpoint as tls_endpoint


def open_switch(context: Context) -> dict[str, object]:
    """The journal's record of what is about to be replaced. If a killed run has written one, it is kept."""
    opened = context.history.open_switch
    if opened is not None:
        return opened
    layout = context.layout
    before = config.read_text(layout.config)
    if before is not None:
        fs.write_atomic(layout.config_backup, before, 0o600)
    if context.tls_import is not None and layout.server_key.is_file():
        fs.write_atomic(layout.key_backup, layout.server_key.read_bytes(), 0o600)
    committed = context.history.committed
    mark(layout)
    return context.journal.add(
        "switch",
        previous=committed["release"] if committed else None,
        to=context.target().name,
        kind=context.kind,
        had_config=before is not None,
        had_key=context.tls_import is not None and layout.key_backup.is_file(),
        was_running=context.service.state().up,
        serving=context.service.serving(),
    )


def write_units(context: Context) -> str:
    """System form: unit files, users, directories, and the command on the PATH. A running service is not affected."""
    layout = context.layout
    open_switch(context)
    written = units.write(context.units)
    wanted = {unit.path for unit in context.units}
    gone = units.remove(path for path in units.owned_files(layout) if path not in wanted)
    link_command(context)
    # An engine that goes serves on until the gateway has let it go, unless another one may need its GPU.
    here = context.service.models()
    context.leaving = [] if set(context.names) - set(here) else [name for name in here if name not in context.names]
    context.service.apply_units([*context.names, *context.leaving])
    return t("{written} files written, {removed} removed, {kept} as they were", written=len(written), removed=len(gone),
             kept=len(context.units) - len(written))


def link_command(context: Context) -> None:
    """Make `atoll` available to operators. A file of that name that is not ours is left alone."""
    layout = context.layout
    target = str(Path("/") / layout.current.relative_to(layout.prefix) / "bin/atoll")
    here = layout.command
    if here.exists() and not here.is_symlink():
        context.frontend.note(t("{here} is not Atoll's and was left alone; call {current}/bin/atoll", here=here,
                                current=layout.current))
    elif not here.is_symlink() or str(here.readlink()) != target:
        fs.make_dir(here.parent)
        fs.symlink_atomic(here, target)


def switch(context: Context) -> str:
    """Replace the settings, then `current`, each by one rename(2)."""
    layout, target = context.layout, context.target()
    opened = open_switch(context)
    _keep_old_form(context)
    if context.tls_import is not None:
        tls_endpoint.install_import(layout, context.tls_import)
    if config.read_text(layout.config) != context.config_text:
        fs.write_atomic(layout.config, context.config_text, 0o644)
    if release.live(layout) != target.name:
        fs.symlink_atomic(layout.current, f"releases/{target.name}")
    previous = opened["previous"]
    if previous == target.name:
        return t("new settings for the same release")
    return f"{previous} -> {target.name}" if previous else t("nothing -> {release}", release=target.name)


def _keep_old_form(context: Context) -> None:
    """Keep settings in an older format beside the ones that were made from them."""
    if context.base_config is None:
        return
    _, had = migrate.migrate(context.base_config, context.layout.config)
    copy = context.layout.config.with_name(f"{context.layout.config.name}.v{had}")
    if had != migrate.current() and not copy.exists():
        fs.write_atomic(copy, context.base_config, 0o644)
        context.frontend.note(t("The settings were converted to the current format; the old ones are kept as {copy}",
                                copy=copy))


def start(context: Context) -> str:
    """Change over to the new release, and wait until its engines have produced a token."""
    layout, service = context.layout, context.service
    drop_private_keys(context)
    if not api_keys.usable(layout.api_keys):
        context.new_key = make_key(context)
    lifetime = context.options.start_timeout + context.options.smoke_timeout + 60
    context.smoke_key = api_keys.add_smoke(layout.api_keys, lifetime)
    ran = service.state().up
    parts = changes.changed(context) if ran else None
    if ran:
        switched = _switch(context, parts)
    else:
        switched = stop_and_start(service, None)
    service.reload_keys()
    wait_ready(service, context.endpoint, layout, context.frontend, context.options.start_timeout)
    wait_engines(service, context.names, layout, context.frontend, context.options.start_timeout)
    ready = time.monotonic()
    context.startup_s = round(ready - switched.starting_from, 2)
    context.downtime_s = round(ready - switched.silent_from, 2) if ran else None
    told = [t("ready in {seconds:.1f} s at {url}", seconds=context.startup_s, url=context.endpoint.url)]
    if context.downtime_s is not None:
        silent = t("{seconds} s without service", seconds=f"{context.downtime_s:.1f}")
        told.append(silent if parts is None or parts - {changes.MODELS} else t("nothing was restarted"))
    return joined(told)


def _switch(context: Context, parts: set[str] | None) -> Switched:
    """Restart these parts (None: all). Where only the list of models changes, the gateway reads it again instead."""
    service, began = context.service, time.monotonic()
    again = parts is not None and changes.MODELS in parts
    if parts is not None:
        parts = parts - {changes.MODELS}
    if again and parts is not None and changes.GATEWAY not in parts \
            and not service.reload_models(context.options.drain_timeout):
        parts |= {changes.GATEWAY}
    if context.leaving:
        service.apply_units(context.names)
    if parts is not None and not parts:
        return Switched(began, began)
    return service.switch(parts, context.options.start_timeout, hand_over=not changes.trade_places(context))


def make_key(context: Context) -> api_keys.NewKey:
    """The operator's first key. Until it has been shown it counts as never issued, and a later run replaces it."""
    key = api_keys.add(context.layout.api_keys, api_keys.FIRST)
    context.journal.add("key-created", key=key.id)
    log.append(context.layout.audit, "api-key-created", key=key.id)
    return key


def drop_private_keys(context: Context) -> None:
    """Remove keys that were never shown: those of a smoke test, or of a run that ended before it could show them.

    A tuning removes only the smoke test's: a checklist shows the operator's first key only at its end.
    """
    tuning = (context.history.open_switch or {}).get("kind") == "tune"
    unshown = set[str]() if tuning else context.history.unshown_keys
    api_keys.remove(context.layout.api_keys, unshown, smoke=True)
    for key in sorted(unshown):
        context.journal.add("key-removed", key=key)


def smoke(context: Context) -> str:
    """Ask each model a real question and stream the answer."""
    assert context.smoke_key is not None
    told = []
    for model in context.models:
        try:
            key, timeout = context.smoke_key.text, context.options.smoke_timeout
            result = smoke_test(context.endpoint, model.instance, key, timeout)
        except SmokeFailure as failure:
            message = t("The service started, but {instance} did not answer a question: {failure}.",
                        instance=model.instance, failure=failure)
            raise unhealthy(context.service, context.layout, message) from failure
        context.smoke = context.smoke or result
        context.journal.add(
            "smoke", model=model.instance, tokens=result.tokens, ttft_s=result.ttft_s, tokens_per_s=result.tokens_per_s
        )
        told.append(t("{tokens} tokens, first after {first:.0f} ms, then {rate:.1f} tokens/s", tokens=result.tokens,
                      first=result.ttft_s * 1000, rate=result.tokens_per_s))
    return joined(told, "; ")


def commit(context: Context) -> str:
    """From here on this release is the one to go back to. Then remove what is older than the previous release."""
    layout, target = context.layout, context.target()
    api_keys.remove(layout.api_keys, set(), smoke=True)
    context.service.reload_keys()
    for model in context.models:  # first: after a power cut here, an older bundle must still be refused
        raise_sequence(layout, model.manifest.name, model.manifest.sequence)
    release.raise_runtime_sequence(layout)
    previous, previous_snapshot = _previous(context)
    snapshot = snapshots.save(layout, context.snapshot())
    bundles = [model.facts() for model in context.models]
    event = "committed" if context.kind == "install" else "gone-back"
    for facts in bundles:
        told = {"bundle": facts["digest"], **{name: facts[name] for name in ("instance", "name", "sequence")}}
        log.append(layout.audit, event, release=target.name, **told)
    context.journal.add(
        "commit",
        release=target.name,
        previous=previous,
        snapshot=snapshot,
        previous_snapshot=previous_snapshot,
        bundle=target.info["bundle"],
        bundles=bundles,
        licence=bundles[0]["spdx"],
        parts=changes.parts(context) if layout.system else {},
        smoke=context.smoke.to_json() if context.smoke else None,
        startup_s=context.startup_s,
        downtime_s=context.downtime_s,
    )
    unmark(layout)
    fs.remove_file(layout.key_backup)
    freed = prune(context)
    if freed:
        return t("release {name}, {freed} of older releases removed", name=target.name, freed=gib(freed))
    return t("release {name}", name=target.name)


def _previous(context: Context) -> tuple[str | None, str | None]:
    """The release to go back to, and what it ran with. New settings for the same release do not change it."""
    history, committed = context.history, context.history.committed
    previous = history.open_switch["previous"] if history.open_switch else None
    if committed is None:
        return previous, None
    if previous == context.target().name:
        return committed.get("previous"), committed.get("previous_snapshot")
    return previous, committed.get("snapshot")
