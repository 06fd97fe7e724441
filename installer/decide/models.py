"""Which models will run: what the operator asked for, what the medium holds, what is installed.

A bundle's name counts only once its signature has been verified; until then it is just a directory.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.decide.context import Context, Model
from installer.decide.install_options import ModelChoice
from installer.preflight.model_needs import bundles_on
from installer.release import config, release
from installer.service import units
from offline_bundle import untrusted_dir
from offline_bundle.bundle.manifest import MANIFEST
from offline_bundle.bundle.verify import SignedManifest, check_signed_manifest
from offline_bundle.errors import BundleError
from offline_bundle.model.manifest import BundleManifest
from offline_bundle.signing.keys import load_trusted
from offline_bundle.store.store import verify_model

_UNTOUCHED = t("Nothing was changed.")


def which_bundle() -> InstallError:
    hint = t("Give the medium, or one bundle of it: atoll install MEDIUM, atoll install --bundle DIR")
    return InstallError(t("Which bundle?"), exit_code=ExitCode.USAGE, changed=_UNTOUCHED, hint=hint)


def no_medium(path: Path) -> InstallError:
    return InstallError(
        t("There is no bundle at {path}.", path=path),
        exit_code=ExitCode.MEDIA,
        why=t("The medium may not be mounted, or the path may be another."),
        changed=_UNTOUCHED,
        hint=t("Mount it and give its directory, or one that holds bundle.json: atoll install DIR"),
    )


def signed_manifest(context: Context, bundle: Path) -> SignedManifest[BundleManifest]:
    """The manifest, once its signature has been verified. It is kilobytes, whatever the size of the bundle."""
    if not bundle.is_dir():
        raise no_medium(bundle)
    with untrusted_dir.open_root(bundle) as root:
        return check_signed_manifest(root, load_trusted(context.trusted_keys, bundle), BundleManifest)


def installed(context: Context) -> list[dict[str, Any]]:
    """The facts of the models that the committed release runs."""
    committed = context.before.committed
    return release.bundles_of(release.read_info(context.layout, committed["release"])) if committed else []


def choose(context: Context) -> list[Model]:
    """Every model that will run, each with a verified manifest. Raises InstallError, BundleError."""
    options, layout = context.options, context.layout
    here = {facts["instance"]: facts for facts in installed(context)}
    chosen: dict[str, Model] = {}
    for choice in _wanted(context, here):
        if choice.bundle is None and choice.name in chosen:  # the choice names a model that the medium brings
            model = chosen[choice.name]
            model.choice = replace(choice, bundle=model.choice.bundle)
            continue
        model = _kept(context, choice, here) if choice.bundle is None else _brought(context, choice, here)
        if model.instance in chosen:
            raise InstallError(
                t("Two models would have the name {instance}.", instance=model.instance),
                exit_code=ExitCode.USAGE,
                changed=_UNTOUCHED,
                hint=t("Give each a name of its own: `name` in the answers' [[models]], or --bundle NAME=DIR."),
            )
        chosen[model.instance] = model
    copies = config.replicas(context.base_config, layout.config) if layout.system else {}
    _check_replicas(context, chosen, copies)
    for name in options.remove:
        if name not in here and name not in copies:
            raise InstallError(
                t("No model called {name} runs here.", name=name),
                exit_code=ExitCode.USAGE,
                changed=_UNTOUCHED,
                hint=t("Installed: {names}.", names=joined(here) or t("none")),
            )
    if layout.system and not options.only_these:
        for name in here:
            if name not in chosen and name not in options.remove:
                chosen[name] = _kept(context, ModelChoice(name=name), here)
    if not chosen:
        raise InstallError(
            t("No model would be left."),
            exit_code=ExitCode.USAGE,
            changed=_UNTOUCHED,
            hint=t("To stop serving: atoll stop. To remove everything: atoll uninstall"),
        )
    if not layout.system and len(chosen) > 1:
        raise InstallError(
            t("An installation under a prefix runs one model; {count} were given: {names}.", count=len(chosen),
              names=joined(chosen)),
            exit_code=ExitCode.USAGE,
            changed=_UNTOUCHED,
            hint=t("Give one bundle, or install on the server itself: as root, without --prefix."),
        )
    context.removed = sorted(here.keys() - chosen.keys())
    return [chosen[name] for name in sorted(chosen)]


def _check_replicas(context: Context, chosen: dict[str, Model], copies: dict[str, str]) -> None:
    """Raises InstallError for a replica that would have no model, or another's name."""
    here = {facts["instance"] for facts in installed(context)}
    for choice in context.options.replicas:
        if not context.layout.system:
            raise InstallError(
                t("An installation under a prefix has one engine."), exit_code=ExitCode.USAGE, changed=_UNTOUCHED,
                hint=t("Replicas need a server with systemd: as root, without --prefix."))
        units.check_name(choice.name)
        if choice.of not in here:
            raise InstallError(
                t("No model called {name} runs here.", name=choice.of), exit_code=ExitCode.USAGE, changed=_UNTOUCHED,
                hint=t("Installed: {names}.", names=joined(here) or t("none")))
        if choice.name in here or choice.name in chosen or copies.get(choice.name, choice.of) != choice.of:
            raise InstallError(
                t("There is a model or a replica called {name} already.", name=choice.name),
                exit_code=ExitCode.USAGE, changed=_UNTOUCHED, hint="atoll models list")


def _wanted(context: Context, here: dict[str, dict[str, Any]]) -> list[ModelChoice]:
    """What the operator named, and what the medium is meant for; models with a bundle first."""
    options = context.options
    found = [bundle for medium in options.media for bundle in bundles_on(medium)]
    wanted = list(options.models or ([ModelChoice(options.bundle)] if options.bundle is not None else []))
    for number, choice in enumerate(wanted):
        if choice.bundle is None and choice.name not in here and found:  # a new name for what is on the medium
            wanted[number] = replace(choice, bundle=_only(found))
    if found and not options.only_these and all(choice.bundle is None for choice in wanted):
        wanted += _meant_by_the_medium(context, found, here)
    if not wanted and not here:
        raise no_medium(options.media[0]) if options.media else which_bundle()
    return sorted(wanted, key=lambda choice: choice.bundle is None)


def _meant_by_the_medium(
    context: Context, found: list[Path], here: dict[str, dict[str, Any]]
) -> list[ModelChoice]:
    """Newer bundles for what runs here. On a new server: the only bundle."""
    newer = []
    for path in found if here else []:
        name = signed_manifest(context, path).manifest.name
        newer += [ModelChoice(path, facts["instance"]) for facts in here.values() if facts["name"] == name]
    return newer or [ModelChoice(_only(found))]


def _only(found: list[Path]) -> Path:
    if len(found) == 1:
        return found[0]
    listed = "; ".join(str(path) for path in found)
    raise InstallError(
        t("The medium holds {count} models: {listed}.", count=len(found), listed=listed),
        exit_code=ExitCode.USAGE,
        why=t("Each model needs its own GPU, so you must choose which of them run."),
        changed=_UNTOUCHED,
        hint=t("Choose: --bundle {found}. For several, each with its GPU: [[models]] in --answers FILE",
               found=found[0]),
    )


def _brought(context: Context, choice: ModelChoice, here: dict[str, dict[str, Any]]) -> Model:
    source, signed = _resolve(context, choice.bundle)
    name = choice.name or _instance_of(signed.manifest.name, here.values())
    if context.layout.system:
        name = units.check_name(choice.name or name.lower())
    return Model(name, choice, source, signed.manifest, signed.digest, signed.key_fingerprint)


def _instance_of(bundle: str, here: Iterable[dict[str, Any]]) -> str:
    """A newer bundle replaces the one instance that runs the older; otherwise the bundle's name is used."""
    running = [facts["instance"] for facts in here if facts["name"] == bundle]
    return running[0] if len(running) == 1 else bundle


def _resolve(context: Context, bundle: Path | str | None) -> tuple[Path, SignedManifest[BundleManifest]]:
    """A directory, or the name of a signed bundle on one of the media."""
    path = Path(bundle or "").expanduser().absolute()
    if isinstance(bundle, Path) or "/" in str(bundle) or (path / MANIFEST).is_file():
        return path, signed_manifest(context, path)
    names = []
    for candidate in [found for medium in context.options.media for found in bundles_on(medium)]:
        signed = signed_manifest(context, candidate)
        if bundle in (signed.manifest.name, candidate.name):
            return candidate, signed
        names.append(signed.manifest.name)
    raise InstallError(
        t("There is no bundle called {bundle} on the medium.", bundle=bundle),
        exit_code=ExitCode.MEDIA,
        changed=_UNTOUCHED,
        hint=t("It holds: {names}.", names=joined(names))
        if names
        else t("Give its directory, or the medium: atoll install DIR"),
    )


def _kept(context: Context, choice: ModelChoice, here: dict[str, dict[str, Any]]) -> Model:
    facts = here.get(choice.name or "")
    if facts is None:
        raise InstallError(
            t("No model called {name} is installed, and no bundle was given for it.",
              name=choice.name or t("(no name)")),
            exit_code=ExitCode.USAGE,
            changed=_UNTOUCHED,
            hint=t("Name its bundle. Installed: {names}.", names=joined(here) or t("none")),
        )
    return stored(context, facts, choice)


def stored(context: Context, facts: dict[str, Any], choice: ModelChoice) -> Model:
    """A model that needs no medium. Its copy in the store is checked: signature, file set, seals."""
    models = context.layout.models
    try:
        found = verify_model(models, facts["digest"], context.kept_keys, deep=False)
    except BundleError as error:
        error.hint = t("Install it again from its medium: atoll install DIR  ({hint})", hint=error.hint)
        raise
    return Model(
        facts["instance"], choice, models / facts["digest"], found.manifest, found.digest, found.key_fingerprint,
        kept=True, in_store=True,
    )  # fmt: skip
