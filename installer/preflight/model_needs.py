"""What a medium requires of a machine: sizes and requirements of its bundles, from their signed manifests.

Without a trusted key nothing on the medium is parsed: the lengths of the files suffice for a first estimate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.preflight import lookup_tables
from installer.preflight.record import ModelNeed
from installer.preflight.torch_build import TorchBuild
from installer.release.release import UNKNOWN_VERSION, code_version
from offline_bundle import untrusted_dir
from offline_bundle.bundle.manifest import MANIFEST
from offline_bundle.bundle.verify import check_signed_manifest
from offline_bundle.errors import BundleError
from offline_bundle.model.manifest import BundleManifest
from offline_bundle.model.versions import admits
from offline_bundle.runtime.manifest import RuntimeManifest
from offline_bundle.runtime.verify import verify_runtime
from offline_bundle.signing.keys import load_trusted

RUNTIME = "runtime"
MAX_FILES = 100_000


@dataclass(frozen=True, slots=True)
class Needs:
    """`values` are arguments of PreflightContext. `verified`: they come from signed manifests, not from file
    lengths."""

    values: dict[str, Any]
    names: tuple[str, ...]
    verified: bool


def bundles_on(medium: Path) -> list[Path]:
    """The model bundles of a medium: the directory itself, or those directly below it."""
    if (medium / MANIFEST).is_file():
        return [medium]
    return sorted(path.parent for path in medium.glob(f"*/{MANIFEST}") if path.parent.name != RUNTIME)


def runtime_on(medium: Path) -> Path | None:
    """The runtime's directory on a medium, or beside a bundle of it."""
    return next((path for path in (medium / RUNTIME, medium.parent / RUNTIME) if path.is_dir()), None)


def read_needs(medium: Path, keys: Sequence[Path], layout: Layout) -> Needs:
    """Raises InstallError: no bundle (13), or one whose signature is not valid (10, 11)."""
    bundles = bundles_on(medium)
    runtime = runtime_on(medium)
    if not bundles and runtime is None:
        raise InstallError(
            t("There is no bundle at {path}.", path=medium),
            exit_code=ExitCode.MEDIA,
            why=t("The medium may not be mounted, or the path may be another."),
            changed=t("Nothing was changed."),
            hint=t("Give the directory that holds bundle.json, or the mounted disk: --bundle DIR"),
        )
    values: dict[str, Any] = {"runtime": runtime, "bundle": medium, "code_bytes": _length(runtime) if runtime else 0}
    if not keys:
        return Needs({**values, **_by_length(bundles)}, tuple(path.name for path in bundles), not bundles)
    signed = [_signed(path, keys) for path in bundles]
    for manifest, _ in signed:
        check_runtime(manifest)
    in_store = [manifest for manifest, digest in signed if (layout.models / digest).is_dir()]
    sources = {manifest.name: path for path, (manifest, _) in zip(bundles, signed, strict=True)}
    values |= of_manifests({manifest.name: manifest for manifest, _ in signed}, in_store, sources=sources)
    if runtime is not None:
        values |= _of_runtime(_signed_runtime(runtime, keys), values["driver_min"])
    return Needs(values, tuple(manifest.name for manifest, _ in signed), True)


def check_runtime(manifest: BundleManifest) -> None:
    """Raises InstallError (3) for a model that needs another version of Atoll than the running one."""
    here, wanted = code_version(), manifest.requires.runtime
    if wanted is None or here == UNKNOWN_VERSION or admits(wanted, here):
        return
    raise InstallError(
        t("{name} {version} needs Atoll {wanted}; this is {here}.", name=manifest.name, version=manifest.version,
          wanted=wanted, here=here),
        exit_code=ExitCode.PREFLIGHT_FAIL,
        why=t("Its maker has tested it with those versions only."),
        changed=t("Nothing was changed."),
        hint=t("Install that Atoll first (sudo sh install.sh from its medium), or ask for a bundle for this one."),
    )


def of_manifests(
    models: Mapping[str, BundleManifest],
    in_store: Sequence[BundleManifest] = (),
    gpus: Mapping[str, Sequence[str | int] | None] | None = None,
    sources: Mapping[str, Path] | None = None,
    tables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Arguments of PreflightContext for the models that will run, by instance name, some with their own GPUs.

    `sources`: where their files are now. `tables`: settings of --per-layer-embeddings other than "auto".
    """
    chosen = {name: tuple((gpus or {}).get(name) or ()) for name in models}
    sizes = {name: lookup_tables.of_bundle(path, models[name]) for name, path in (sources or {}).items()}
    manifests = list({id(manifest): manifest for manifest in models.values()}.values())
    weights = {id(m): [file.size for file in m.files if file.role == "weights"] for m in manifests}

    def most(name: str) -> Any:
        """The largest requirement of one kind. Versions are compared by the numbers in them."""
        given = [value for m in manifests if (value := getattr(m.requires, name)) is not None]
        return max(given, key=_order, default=None)

    return {
        "model_bytes": sum(m.total_bytes for m in manifests),
        "weight_bytes": sum(sum(weights[id(m)]) for m in models.values()),
        "copy_bytes": sum(max(m.total_bytes, m.requires.disk_bytes) for m in manifests if m not in in_store),
        "shard_bytes": max((size for sizes in weights.values() for size in sizes), default=0),
        "host_ram_bytes": most("host_ram_bytes"),
        "bundle_created": max((datetime.fromisoformat(m.created).timestamp() for m in manifests), default=None),
        "driver_min": most("driver_min"),
        "cuda": most("cuda"),
        "compute_cap": most("compute_cap"),
        "vram_gib": most("vram_gib"),
        "models": tuple(
            ModelNeed(name, sum(weights[id(m)]), m.requires.vram_gib, chosen[name], sizes.get(name, 0),
                      (tables or {}).get(name, "auto")) for name, m in models.items()
        ),
    }


def _of_runtime(manifest: RuntimeManifest, driver_min: str | None) -> dict[str, Any]:
    """What the code requires, in addition to the models."""
    asked = manifest.requires
    version, cuda = (asked.torch or "").partition("+")[0], asked.cuda
    numbers = tuple(int(part) for part in cuda.split(".")) if cuda else None
    drivers = [text for text in (driver_min, asked.driver_min) if text]
    return {
        "code_bytes": asked.disk_bytes,
        "pythons": asked.python,
        "driver_min": max(drivers, key=_order, default=None),
        "torch": TorchBuild(version, (numbers[0], numbers[1]) if numbers else None, True) if version else None,
    }


def _signed_runtime(path: Path, keys: Sequence[Path]) -> RuntimeManifest:
    """The runtime's manifest, once its signature is verified. The install checks the bytes."""
    try:
        return verify_runtime(path, load_trusted(keys, path), signature_only=True).manifest
    except BundleError as error:
        raise InstallError(error.message, exit_code=error.exit_code, changed=t("Nothing was changed."),
                           hint=error.hint) from None  # fmt: skip


def _order(value: Any) -> Any:
    if isinstance(value, int):
        return value
    numbers = "".join(c if c.isdigit() else " " for c in value).split()
    return [int(number) for number in numbers[:4]]


def _signed(path: Path, keys: Sequence[Path]) -> tuple[BundleManifest, str]:
    try:
        with untrusted_dir.open_root(path) as root:
            signed = check_signed_manifest(root, load_trusted(keys, path), BundleManifest)
    except BundleError as error:
        raise InstallError(error.message, exit_code=error.exit_code, changed=t("Nothing was changed."),
                           hint=error.hint) from None  # fmt: skip
    return signed.manifest, signed.digest


def _by_length(bundles: Sequence[Path]) -> dict[str, Any]:
    shards = [_length(file) for path in bundles for file in (path / "model").glob("*.safetensors")]
    total = sum(_length(path) for path in bundles)
    sizes = {"model_bytes": total, "copy_bytes": total}
    return {**sizes, "weight_bytes": sum(shards), "shard_bytes": max(shards, default=0)}


def _length(path: Path) -> int:
    """Bytes of a file, or of all files below a directory. Links are not followed."""
    if path.is_file() and not path.is_symlink():
        return path.stat().st_size
    total = 0
    for count, file in enumerate(path.rglob("*")):
        if count >= MAX_FILES:
            break
        if file.is_file() and not file.is_symlink():
            total += file.stat().st_size
    return total
