"""`atoll install` and `atoll upgrade` as a job: the installer's work, its result, and showing the key once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from appliance.service import jobs
from appliance.service.jobs.attach import JobReader
from appliance.service.jobs.frontend import JobFrontend
from appliance.service.jobs.process import Work
from installer.base.layout import Layout
from installer.decide.install_options import InstallOptions, ModelChoice
from installer.operate.install import Installer, InstallResult

MakeInstaller = Callable[..., Installer]
_OPTIONS = TypeAdapter(InstallOptions)


def run_install(
    options: InstallOptions, layout: Layout, reader: JobReader, *, interactive: bool, purpose: str = "install",
    make: MakeInstaller = Installer,
) -> InstallResult:  # fmt: skip
    """Start the install as a job and follow it to its end. Raises the InstallError with which it ended."""
    options = with_absolute_paths(options)
    work = install_work(options, layout, make)
    facts, secrets = jobs.run(
        layout, purpose, work, reader, kind="install", given=encode_options(options), interactive=interactive
    )
    return InstallResult(**{**facts, "api_key": secrets.get("api_key")})


def install_work(options: InstallOptions, layout: Layout, make: MakeInstaller = Installer) -> Work:
    """The work of an install's job.

    A new key goes to the attached terminal and nowhere else. Without one, nobody has seen the key, and the next install
    makes another.
    """

    def work(frontend: JobFrontend) -> dict[str, Any]:
        return without_key(make(options, frontend, layout=layout).run(), frontend)

    return work


def without_key(result: InstallResult, frontend: JobFrontend) -> dict[str, Any]:
    """The result without the key, as it may be stored on a disk."""
    if result.api_key:
        frontend.hand_over("api_key", result.api_key)
    return {**result.to_json(), "api_key": None}


def with_absolute_paths(options: InstallOptions) -> InstallOptions:
    """The same options with absolute paths: a job has its own working directory."""

    def whole(path: Path | None) -> Path | None:
        return path.expanduser().absolute() if path is not None else None

    models = [
        dataclasses.replace(m, bundle=whole(m.bundle) if isinstance(m.bundle, Path) else m.bundle)
        for m in options.models
    ]
    tls = dataclasses.replace(
        options.tls, certificate=whole(options.tls.certificate), private_key=whole(options.tls.private_key)
    )
    keys = [key.expanduser().absolute() for key in options.trust_keys]
    media = [medium.expanduser().absolute() for medium in options.media]
    return dataclasses.replace(
        options, bundle=whole(options.bundle), models=models, tls=tls, trust_keys=keys, media=media
    )


def encode_options(options: InstallOptions) -> dict[str, Any]:
    return _OPTIONS.dump_python(options, mode="json")


def decode_options(given: dict[str, Any]) -> InstallOptions:
    """The options that `encode_options` was given: an absolute path of a bundle becomes a Path again, a bare word a
    name."""
    options = _OPTIONS.validate_python(given)

    def again(model: ModelChoice) -> ModelChoice:
        bundle = Path(model.bundle) if isinstance(model.bundle, str) and "/" in model.bundle else model.bundle
        return dataclasses.replace(model, bundle=bundle)

    return dataclasses.replace(options, models=[again(model) for model in options.models])
