"""The first steps, which write nothing: discover what is installed, verify what the medium brings."""

import ipaddress
from pathlib import Path
from typing import Any

from installer.access import vendor_keys
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.decide.context import Context, Model, as_install_error
from installer.decide.models import choose, no_medium, which_bundle
from installer.preflight.model_needs import check_runtime
from installer.preflight.record import gib
from installer.release import config, release
from installer.release.release import Release
from installer.release.replay_guard import last_sequence
from installer.service import units
from installer.tls import endpoint as tls_endpoint
from installer.tls.custom import check_import
from offline_bundle.errors import BundleError
from offline_bundle.model.verify import verify_bundle
from offline_bundle.signing.keys import refuse_from_medium
from offline_bundle.store.store import verify_model

_UNTOUCHED = t("Nothing was changed.")


def discover(context: Context) -> str:
    """What is already here: an installation, an interrupted one, settings, trusted keys."""
    layout, options, history = context.layout, context.options, context.before
    named = [options.bundle, *(choice.bundle for choice in options.models)]
    for place in [*(path for path in named if isinstance(path, Path)), *options.media]:
        if not place.expanduser().is_dir():
            raise no_medium(place)
    if layout.prefix.exists() and not layout.prefix.is_dir():
        raise InstallError(
            t("{prefix} is a file, not a directory.", prefix=layout.prefix),
            exit_code=ExitCode.USAGE,
            changed=_UNTOUCHED,
            hint=t("Choose another --prefix."),
        )
    if not (options.bundle or options.media or options.models or history.committed):
        raise which_bundle()
    _find_keys(context)
    if not context.trusted_keys:
        raise InstallError(
            t("No key is trusted yet, so no bundle can be verified."),
            exit_code=ExitCode.USAGE,
            changed=_UNTOUCHED,
            hint=t("Give the vendor's public key with --trust-key FILE.pub. Obtain it through a separate channel, not "
                   "from the bundle."),
        )
    # After a crash behind the switch, the settings from before the switch are the base.
    switch = history.open_switch
    base = layout.config
    if switch is not None:
        base = layout.config_backup if switch["had_config"] else None
    context.base_config = config.read_text(base) if base is not None else None
    context.endpoint = _endpoint(context)
    _check_tls(context)
    context.own_pids = context.service.pids()
    if switch is not None:
        step = history.last_step or "switch"
        return t("an install that was interrupted in step '{step}' will be finished", step=step)
    if history.committed is not None:
        return t("release {release} is installed", release=history.committed["release"])
    return t("nothing is installed here yet")


def _find_keys(context: Context) -> None:
    """If the operator names a key, only that key counts for the medium. What is already installed keeps its own
    keys."""
    layout, options = context.layout, context.options
    try:
        context.trusted_keys = vendor_keys.keyring(layout, options.trust_keys)
        context.kept_keys = vendor_keys.keyring_of_installed(layout, options.trust_keys)
        for medium in (*options.media, *(choice.bundle for choice in options.models), options.bundle):
            if isinstance(medium, Path) or (medium is not None and "/" in medium):
                refuse_from_medium(options.trust_keys, Path(medium).expanduser())
    except BundleError as error:
        raise as_install_error(error, _UNTOUCHED) from None


def _endpoint(context: Context) -> config.Endpoint:
    options, layout = context.options, context.layout
    standing = config.endpoint(context.base_config, layout.config, system=layout.system)
    host, port = options.host or standing.host, options.port or standing.port
    tls_endpoint = standing.certificate is not None or options.tls.asked or not is_loopback(host)
    return config.Endpoint(host, port, layout.server_cert if layout.system or tls_endpoint else None)


def _check_tls(context: Context) -> None:
    """Check the names that clients will use, and the customer's certificate, before anything depends on them."""
    if context.endpoint.certificate is None:
        return
    choice, layout = context.options.tls, context.layout
    standing = config.endpoint(context.base_config, layout.config, system=layout.system)
    if context.base_config and standing.certificate is None:
        context.frontend.note(t("The endpoint spoke plain HTTP until now. It will speak HTTPS: tell its clients."))
    context.tls_names = tls_endpoint.wanted_names(context.endpoint.host, choice.names)
    if choice.certificate is not None or choice.private_key is not None:
        if choice.certificate is None or choice.private_key is None:
            raise InstallError(
                t("A certificate needs its private key, and a key its certificate."),
                exit_code=ExitCode.USAGE,
                changed=_UNTOUCHED,
                hint=t("Give both: --tls-cert FILE --tls-key FILE"),
            )
        context.tls_import = check_import(
            choice.certificate, choice.private_key, tls_endpoint.required_names(context.endpoint.host, choice.names)
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address, so that plain HTTP exposes nothing."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def verify(context: Context) -> str:
    """Check the signatures first, then every byte, unless the read-only store already holds this very bundle."""
    context.models = choose(context)
    for model in context.models:
        check_runtime(model.manifest)
        if not model.kept:
            _check_sequence(context, model)
            _check_content(context, model)
    context.release = Release.of([model.facts() for model in context.models], context.release_command)
    refuse_revoked_release(context)
    _render(context)
    return joined((_told(model) for model in context.models), "; ")


def survey(context: Context) -> None:
    """The models that will run and the settings that follow, from signed manifests alone."""
    context.models = choose(context)
    for model in context.models:
        check_runtime(model.manifest)
        stored = context.layout.models / model.digest
        if not model.kept and stored.is_dir():
            model.source, model.in_store = stored, True
    context.release = Release.of([model.facts() for model in context.models], context.release_command)
    refuse_revoked_release(context)
    _render(context)


def refuse_revoked_release(context: Context) -> None:
    """Raise InstallError (10) if a part of the release that this run leads to is signed by a revoked key.

    It is checked again before the switch: a key may be revoked while gigabytes are copied.
    """
    gone = vendor_keys.revoked(context.layout)
    signers = vendor_keys.signed_by(context.target().info)
    signers |= {f"{model.manifest.name} {model.manifest.version}": model.key_fingerprint for model in context.models}
    for what, fingerprint in signers.items():
        if fingerprint in gone:
            raise InstallError(
                t("{what} is signed by the key {fingerprint}, which was revoked here: {why}.", what=what,
                  fingerprint=fingerprint, why=vendor_keys.why_revoked(context.layout, fingerprint)),
                exit_code=ExitCode.UNTRUSTED,
                hint=t("Install a medium that is signed by the vendor's new key: atoll install MEDIUM --trust-key "
                       "NEW.pub"),
            )


def _told(model: Model) -> str:
    manifest = model.manifest
    how = t("runs already") if model.kept else t("already in the store") if model.in_store else ""
    how = how or t("{size} hashed", size=gib(manifest.total_bytes))
    return t("{name} {version}, signed by {key}…, {how}", name=manifest.name, version=manifest.version,
             key=model.key_fingerprint[:16], how=how)


def _check_sequence(context: Context, model: Model) -> None:
    """Refuse a bundle that is older than one that was committed here, or accept it with a recorded reason."""
    manifest = model.manifest
    minimum = last_sequence(context.layout, manifest.name)
    if minimum is None or manifest.sequence >= minimum or model.digest in _committed(context):
        return
    if context.options.allow_downgrade:
        facts = {"name": manifest.name, "sequence": manifest.sequence, "was": minimum, "bundle": model.digest}
        context.downgrades.append({**facts, "reason": context.options.allow_downgrade})
        context.frontend.note(t("{name} goes back from sequence {minimum} to {sequence}, as asked.",
                                name=manifest.name, minimum=minimum, sequence=manifest.sequence))
        return
    raise InstallError(
        t("This bundle of {name} is older (sequence {sequence}) than one that was installed here (sequence "
          "{minimum}).", name=manifest.name, sequence=manifest.sequence, minimum=minimum),
        exit_code=ExitCode.DOWNGRADE,
        why=t("Old bundles may bring back what a newer one fixed; an attacker may replay them."),
        changed=_UNTOUCHED,
        hint=t("Use a newer bundle. To go back one release without a medium: atoll rollback. If you mean this one, "
               "say why: --allow-downgrade 'reason' (recorded in the audit log)."),
    )


def _committed(context: Context) -> set[str]:
    """Digests of the models that are committed: installing one of them again is no downgrade."""
    committed = context.before.committed
    if committed is None:
        return set()
    return {facts["digest"] for facts in release.bundles_of(release.read_info(context.layout, committed["release"]))}


def _check_content(context: Context, model: Model) -> None:
    models = context.layout.models
    if (models / model.digest).is_dir():
        try:
            verify_model(models, model.digest, context.trusted_keys, deep=False)
            model.source, model.in_store = models / model.digest, True
            return
        except BundleError as error:
            if error.exit_code == ExitCode.UNTRUSTED:
                context.frontend.note(t("The copy in the store is signed by another key; it will be made again."))
            else:
                context.frontend.note(t("The copy in the store is damaged; it will be made again."))
    verify_bundle(model.source, context.trusted_keys, progress=context.frontend.progress)


def _render(context: Context) -> None:
    """The settings and the unit files that this install leads to."""
    layout, endpoint = context.layout, context.endpoint
    listen: dict[str, Any] = {"host": endpoint.host, "port": endpoint.port}
    if not layout.system:
        (model,) = context.models
        listen["api-key-file"] = str(layout.api_keys)
        if endpoint.certificate is not None:
            listen.update(tls_endpoint.settings(layout))
        values = {
            "model": str(context.model_dir(model)), "served-model-name": model.instance, **_chosen(context, model),
        }  # fmt: skip
        context.config_text = config.render(context.base_config, {**values, **listen}, layout.config)
        return
    tables = {
        model.instance: {
            "model": str(context.model_dir(model)), "served-model-name": model.instance, **_chosen(context, model),
        }
        for model in context.models
    }  # fmt: skip
    text = config.render_server(context.base_config, listen, tables, layout.config)
    context.config_text = config.with_replicas(
        text, {choice.name: {config.REPLICA_OF: choice.of, "gpus": list(choice.gpus)}
               for choice in context.options.replicas}, context.options.remove)
    settings = config.model_tables(context.config_text, layout.config)
    context.units = units.render(
        layout,
        context.names,
        host=endpoint.host,
        port=endpoint.port,
        gpus={name: table["gpus"] for name, table in settings.items() if table.get("gpus")},
        gpu=any(table.get("device") != "cpu" for table in settings.values()),
    )


def _chosen(context: Context, model: Model) -> dict[str, Any]:
    """What the operator said about this model in this run. Earlier choices are already in the settings."""
    choice = model.choice
    values: dict[str, Any] = dict(choice.settings)
    if choice.gpus is not None:
        values["gpus"] = list(choice.gpus)
    if device := choice.device or context.options.device:
        values["device"] = device
    return values
