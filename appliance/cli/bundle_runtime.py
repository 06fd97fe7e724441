"""What `atoll bundle build --runtime` and its relatives say; offline_bundle/runtime.py does the work."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from offline_bundle.errors import USAGE, BundleError
from offline_bundle.keys import load_trusted
from offline_bundle.progress import Progress
from offline_bundle.runtime import Torch, build_runtime
from offline_bundle.runtime_manifest import RuntimeManifest
from offline_bundle.runtime_verify import inspect_runtime, verify_runtime

from .byte_progress import byte_progress, size
from .json_output import emit
from .keys import grouped

_LABELS = {"verify": "Verifying"}


def build(
    out: Path,
    key: Path,
    sequence: int,
    torch: Torch,
    *,
    pythons: list[Path],
    wheels: Path | None,
    passphrase: bytes | None,
    as_json: bool,
) -> None:
    """Build the runtime half of a medium, and print what the vendor has to tell apart from it."""
    with _progress(as_json) as progress:
        made = build_runtime(
            out,
            private_key=key,
            sequence=sequence,
            torch=torch,
            pythons=pythons,
            wheels=wheels,
            passphrase=passphrase,
            progress=progress,
        )
    if as_json:
        extra = {"key_fingerprint": made.fingerprint, "install_sha256": made.install_sha256}
        emit({"ok": True, "path": str(out / "runtime"), "medium": str(out)} | summary(made.manifest) | extra)
        return
    typer.echo(f"Built {out / 'runtime'}")
    show(made.manifest)
    typer.echo("\nTell the operator these two by letter or phone, never on the disk itself:")
    typer.echo(f"  key fingerprint       {grouped(made.fingerprint)}")
    typer.echo(f"  install.sh (SHA-256)  {grouped(made.install_sha256)}")
    typer.echo(f"\nNext: put model bundles beside it: atoll bundle build MODEL ... --out {out}")
    typer.echo(f'On the server: sudo sh install.sh --fingerprint "{grouped(made.fingerprint[:32])}"')


def inspect(path: Path, *, as_json: bool) -> None:
    """Show what a runtime claims."""
    manifest = inspect_runtime(path)
    if as_json:
        facts = {"ok": True, "verified": False, "path": str(path)} | summary(manifest)
        emit(facts | {"manifest": manifest.model_dump(mode="json")})
        return
    typer.echo("NOT VERIFIED: this is what the runtime claims. Check it with: atoll bundle verify --key PUB")
    show(manifest)
    for entry in manifest.files:
        typer.echo(f"    {size(entry.size):>10}  {entry.role:<12}  {entry.path}")


def verify(path: Path, trusted: list[Path], min_sequence: int | None, *, as_json: bool) -> None:
    """Verify a runtime against pinned keys."""
    with _progress(as_json) as progress:
        found = verify_runtime(path, load_trusted(trusted, path), min_sequence=min_sequence, progress=progress)
    if as_json:
        facts = {"ok": True, "verified": True, "path": str(path), "key_fingerprint": found.key_fingerprint}
        emit(facts | summary(found.manifest))
        return
    typer.echo(f"VERIFIED: {path}")
    show(found.manifest)
    typer.echo(f"  signed by  {found.key_fingerprint}")


def summary(manifest: RuntimeManifest) -> dict[str, Any]:
    """The facts of a runtime for `--json`."""
    return {
        "kind": "runtime",
        "name": manifest.name,
        "version": manifest.version,
        "sequence": manifest.sequence,
        "created": manifest.created,
        "digest": manifest.digest,
        "bytes": manifest.total_bytes,
        "files": len(manifest.files),
        "requires": manifest.requires.model_dump(mode="json"),
    }


def show(manifest: RuntimeManifest) -> None:
    """The same facts for a person."""
    requires = manifest.requires
    gpu = f"CUDA {requires.cuda}, driver {requires.driver_min} or newer" if requires.cuda else "CPU only"
    packages = sum(f.role == "wheel" for f in manifest.files)
    rows = {
        "runtime": f"{manifest.name} {manifest.version} (sequence {manifest.sequence}, {manifest.created})",
        "needs": f"{requires.arch}, Python {' or '.join(requires.python)}, glibc {requires.glibc} or newer; {gpu}",
        "torch": requires.torch or "none",
        "content": f"{packages} packages, {size(manifest.total_bytes)}; installed {size(requires.unpacked_bytes)}",
        "digest": manifest.digest,
    }
    for label, value in rows.items():
        typer.echo(f"  {label:<10} {value}")


def require(given: dict[str, Any]) -> None:
    """Options that a model's bundle cannot do without; a runtime has no use for most of them."""
    if lacking := [name for name, value in given.items() if value is None]:
        raise BundleError(
            f"Missing: {', '.join(lacking)}.", "A model's bundle needs it; see: atoll bundle build --help", USAGE
        )


@contextmanager
def _progress(as_json: bool) -> Iterator[Progress]:
    with byte_progress(_LABELS, quiet=as_json) as bytes_done:

        def report(stage: str, done: int, total: int) -> None:
            if stage != "wheels":
                bytes_done(stage, done, total)
            elif not as_json and done < total:
                typer.echo(
                    f"Collecting packages with pip, step {done + 1} of {total} (minutes the first time) ...", err=True
                )

        yield report
