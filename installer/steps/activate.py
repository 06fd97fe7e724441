"""The steps that touch what runs: switch, start, smoke, commit; and their way back.

`switch` journals what it replaces before it replaces it. Until `commit` is journalled, that record stays open and says
how to go back; a run that finds one open goes on from there, whatever killed the run before it.
"""

import contextlib
import time

from installer import audit, config, fs, keys, release
from installer.context import Context
from installer.errors import ExitCode, InstallError
from installer.preflight.record import gib
from installer.ready import unhealthy, wait_ready
from installer.sequence import raise_sequence
from installer.smoke import SmokeFailure, smoke_test
from offline_bundle.errors import BundleError
from offline_bundle.store import remove_model


def switch(context: Context) -> str:
    """Settings, then `current`, each by one rename(2)."""
    layout = context.layout
    _, target = context.require()
    opened = context.history.open_switch
    if opened is None:
        before = config.read_text(layout.config)
        if before is not None:
            fs.write_atomic(layout.config_backup, before, 0o600)
        committed = context.history.committed
        opened = context.journal.add(
            "switch",
            previous=committed["release"] if committed else None,
            had_config=before is not None,
            was_running=context.service.state().up,
        )
    if config.read_text(layout.config) != context.config_text:
        fs.write_atomic(layout.config, context.config_text, 0o644)
    if release.live(layout) != target.name:
        fs.symlink_atomic(layout.current, f"releases/{target.name}")
    previous = opened["previous"]
    if previous == target.name:
        return "new settings for the same release"
    return f"{previous or 'nothing'} -> {target.name}"


def start(context: Context) -> str:
    """Stop what ran, start the new release, wait until a token has come from its engine."""
    layout = context.layout
    context.service.stop()
    drop_private_keys(context)
    if not keys.usable(layout.api_keys):
        context.new_key = make_key(context)
    lifetime = context.options.start_timeout + context.options.smoke_timeout + 60
    context.smoke_key = keys.add_smoke(layout.api_keys, lifetime)
    began = time.monotonic()
    context.service.start()
    wait_ready(context.service, context.endpoint, layout, context.frontend, context.options.start_timeout)
    return f"ready in {time.monotonic() - began:.1f} s at {context.endpoint.url}"


def make_key(context: Context) -> keys.NewKey:
    """The operator's first key. Until it was shown it counts as never given out, and a later run replaces it."""
    key = keys.add(context.layout.api_keys, "first key, made at install")
    context.journal.add("key-created", key=key.id)
    audit.append(context.layout.audit, "api-key-created", key=key.id)
    return key


def drop_private_keys(context: Context) -> None:
    """Keys that nobody was shown: of a smoke test, or of a run that ended before it could show them."""
    unshown = context.history.unshown_keys
    keys.remove(context.layout.api_keys, unshown, smoke=True)
    for key in sorted(unshown):
        context.journal.add("key-removed", key=key)


def smoke(context: Context) -> str:
    """A real question, its answer streamed."""
    manifest, _ = context.require()
    assert context.smoke_key is not None
    try:
        context.smoke = smoke_test(
            context.endpoint, manifest.name, context.smoke_key.text, context.options.smoke_timeout
        )
    except SmokeFailure as failure:
        message = f"The service started, but did not answer a question: {failure}."
        raise unhealthy(context.service, context.layout, message) from failure
    result = context.smoke
    context.journal.add("smoke", tokens=result.tokens, ttft_s=result.ttft_s, tokens_per_s=result.tokens_per_s)
    return f"{result.tokens} tokens, first after {result.ttft_s * 1000:.0f} ms, then {result.tokens_per_s:.1f} tokens/s"


def commit(context: Context) -> str:
    """From here on this release is the one to go back to. Then what is older than the one before it goes."""
    layout = context.layout
    manifest, target = context.require()
    keys.remove(layout.api_keys, set(), smoke=True)
    raise_sequence(layout, manifest.name, manifest.sequence)
    history = context.history
    previous = history.open_switch["previous"] if history.open_switch else None
    if previous == target.name and history.committed:
        previous = history.committed.get("previous")
    facts = {"bundle": context.digest, "name": manifest.name, "sequence": manifest.sequence}
    audit.append(layout.audit, "committed", release=target.name, **facts)
    context.journal.add(
        "commit",
        release=target.name,
        previous=previous,
        bundle=target.info["bundle"],
        licence=manifest.license.spdx,
        smoke=context.smoke.to_json() if context.smoke else None,
    )
    freed = prune(context)
    return f"release {target.name}" + (f", {gib(freed)} of older releases removed" if freed else "")


def prune(context: Context) -> int:
    """Remove releases and models that are neither live nor the one before; returns the bytes freed.

    A failure here only leaves something behind for the next run to remove.
    """
    layout = context.layout
    committed = context.history.committed
    if committed is None or context.history.open_switch is not None:
        return 0
    kept = {committed["release"], committed.get("previous")}
    freed = 0
    with contextlib.suppress(OSError, BundleError):
        for entry in sorted(layout.releases.iterdir()):
            if entry.name not in kept:
                freed += fs.tree_size(entry)
                fs.remove_tree(layout.prefix, entry)
        used = {release.read_info(layout, name).get("bundle", {}).get("digest") for name in kept if name}
        for entry in sorted(layout.models.iterdir()):
            if entry.is_dir() and entry.name not in used and len(entry.name) == 64:
                freed += fs.tree_size(entry)
                remove_model(layout.models, entry.name)
    return freed


def roll_back(context: Context, cause: InstallError) -> InstallError:
    """Put back what `switch` replaced and start it again; returns the error to show. Safe to run twice."""
    layout = context.layout
    opened = context.history.open_switch
    if opened is None:
        return cause
    context.frontend.step("rollback", "begin")
    previous = opened["previous"]
    try:
        context.service.stop()
        before = config.read_text(layout.config_backup) if opened["had_config"] else None
        if before is not None:
            fs.write_atomic(layout.config, before, 0o644)
        else:
            fs.remove_file(layout.config)
        if previous is not None:
            fs.symlink_atomic(layout.current, f"releases/{previous}")
        else:
            fs.remove_file(layout.current)
        drop_private_keys(context)
        context.new_key = None
        if previous is not None and opened["was_running"]:
            context.endpoint = config.endpoint(before, layout.config)
            context.service.start()
            wait_ready(context.service, context.endpoint, layout, context.frontend, context.options.start_timeout)
        context.journal.add("rolled-back", to=previous, reason=cause.message)
        audit.append(layout.audit, "rolled-back", to=previous, reason=cause.message)
    except (InstallError, OSError) as failure:
        reason = failure.message if isinstance(failure, InstallError) else str(failure)
        with contextlib.suppress(OSError):
            context.journal.add("rollback-failed", to=previous, reason=reason)
        context.frontend.step("rollback", "failed", reason)
        return InstallError(
            f"{cause.message} Going back failed too: {reason}",
            exit_code=ExitCode.ROLLBACK_FAILED,
            why=cause.why,
            changed="The service is not running. The model and the previous release are still on the disk.",
            hint=f"Read {layout.log}, then run the same install again: it goes on from here.",
            log_tail=cause.log_tail,
        )
    if previous is None:
        done = "Nothing runs, as before. The verified model stays in the store, so a new attempt copies nothing."
    elif opened["was_running"]:
        done = f"The previous release {previous} was put back and serves again."
    else:
        done = f"The previous release {previous} was put back; it was stopped before and still is."
    context.frontend.step("rollback", "done", done)
    cause.changed = done
    return cause
