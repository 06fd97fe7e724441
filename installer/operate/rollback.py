"""`atoll rollback`: go back to the previous release, from what is on the disk. No medium is needed.

It runs the second half of an install's steps, with the code, models and settings of the previous release. So it may be
killed at any point, and if the previous release no longer answers, the switch is undone. Running it a second time
returns to the newer release.
"""

import contextlib
from typing import Any

import tomlkit

from installer.access import vendor_keys
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.base.lock import ignore_hangup
from installer.decide.context import Context
from installer.decide.frontend import Frontend
from installer.decide.install_options import InstallOptions, ModelChoice
from installer.decide.models import stored
from installer.operate.install import InstallResult, Run
from installer.operate.lifecycle import history_of
from installer.release import config, migrate, release
from installer.release.release import Release
from installer.service import snapshots
from installer.service.choice import service_for
from installer.service.manager import ServiceManager
from installer.steps.inspect import refuse_revoked_release
from installer.steps.undo import roll_back
from installer.tls import endpoint as tls_endpoint

# Settings that an install decides; all others are the operator's and stay as they are now.
_OURS = ("host", "port", "model", "served-model-name", "api-key-file", "ssl-certfile", "ssl-keyfile")


class Rollback(Run):
    """One rollback. With `dry_run` in the options it only looks."""

    purpose = "rollback"

    def __init__(
        self, options: InstallOptions, frontend: Frontend, *, layout: Layout, service: ServiceManager | None = None
    ) -> None:
        super().__init__(options, frontend, layout, service or service_for(layout))

    def _run(self) -> InstallResult:
        history_of(self.layout)
        with contextlib.ExitStack() as stack:
            if not self.options.dry_run:
                stack.enter_context(self._lock())
            context = self._context()
            stack.callback(context.journal.close)
            context.kind = "rollback"
            if not self.options.dry_run:
                context.journal.open(self.layout.journal)
                ignore_hangup()
            opened = context.before.open_switch
            if opened is not None and opened.get("kind", "install") == "install":
                return self._undo(context)
            self._steps(context, (("discover", _discover), ("verify", _verify)))
            if self.options.dry_run:
                return self._result(context, "dry-run")
            self._activate(context)
            return self._result(context, "rolled-back")

    def _undo(self, context: Context) -> InstallResult:
        """An install was interrupted after its switch: go back to the release that was committed before it."""
        committed = context.before.committed
        if committed is None:
            raise _nothing(t("The install that was cut off was the first one."))
        target_release(context, committed["release"], committed.get("snapshot"))
        if self.options.dry_run:
            return self._result(context, "dry-run")
        outcome = roll_back(context, InstallError(t("An install was interrupted."), exit_code=ExitCode.OK))
        if outcome.exit_code != ExitCode.OK:
            raise outcome
        return self._result(context, "rolled-back")


def _discover(context: Context) -> str:
    """Find the release to go back to, and check that it is complete."""
    committed = context.before.committed
    if committed is None:
        raise _nothing(t("No release has been committed here."))
    if committed.get("previous") is None:
        raise _nothing(t("The running release is the first one."))
    target_release(context, committed["previous"], committed.get("previous_snapshot"))
    return f"{committed['release']} -> {context.target().name}"


def target_release(context: Context, name: str, snapshot: str | None) -> None:
    layout = context.layout
    info = release.read_info(layout, name)
    if not info or not (layout.releases / name / "bin/atoll").is_file():
        raise _nothing(t("The release {name} is not on the disk any more.", name=name))
    context.release = Release(name, info, "")
    context.trusted_keys = context.kept_keys = vendor_keys.keyring(layout)
    saved = snapshots.load(layout, snapshot) if snapshot else snapshots.Snapshot(None, [], [])
    context.units = saved.units
    context.own_pids = context.service.pids()
    opened = context.before.open_switch
    base = layout.config if opened is None or not opened["had_config"] else layout.config_backup
    context.base_config = config.read_text(base)
    context.models = [
        stored(context, facts, ModelChoice(name=facts["instance"])) for facts in release.bundles_of(info)
    ]
    context.config_text = _settings(context, saved.settings)
    context.endpoint = config.endpoint(context.config_text, layout.config, system=layout.system)


def _verify(context: Context) -> str:
    """The models were checked when they were found. But the code's key may have been revoked since, and the certificate
    must cover the names that clients use."""
    refuse_revoked_release(context)
    if context.endpoint.certificate is not None:
        context.tls_names = tls_endpoint.wanted_names(context.endpoint.host)
    names = [f"{model.manifest.name} {model.manifest.version}" for model in context.models]
    return t("{names} in the store, signature and seals hold", names=joined(names))


def _settings(context: Context, saved: str | None) -> str:
    """The operator's settings of today, with the previous release's values for what an install decides.

    Settings in an older format are taken as they were: the older code reads no other.
    """
    layout, now = context.layout, context.base_config
    if saved is None:
        (model,) = context.models  # version 0.1 kept no snapshot, and knew only prefixes
        values = {"model": str(context.model_dir(model)), "served-model-name": model.instance}
        return config.render(now, values, layout.config)
    document: Any = tomlkit.parse(saved)
    if now is None or migrate.version_of(document) != migrate.version_of(tomlkit.parse(now)):
        return saved
    if not layout.system:
        return config.render(now, _ours(document.get("serve", {})), layout.config)
    tables = document.get("models", {}).unwrap()
    here = config.parse(now, layout.config, "models")
    models = {name: _ours(table) if name in here else table for name, table in tables.items()
              if name not in config.replicas(saved, layout.config)}  # those of today stay
    return config.render_server(now, _ours(document.get("gateway", {})), models, layout.config)


def _ours(table: Any) -> dict[str, Any]:
    values = table.unwrap() if hasattr(table, "unwrap") else table
    return {key: value for key, value in values.items() if key in _OURS}


def _nothing(why: str) -> InstallError:
    return InstallError(
        t("There is no release to go back to."),
        exit_code=ExitCode.USAGE,
        why=why,
        changed=t("Nothing was changed."),
        hint=t("Install the one that you want from its medium: atoll install MEDIUM"),
    )
