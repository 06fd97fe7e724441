"""The runtime side of `atoll bundle build | inspect | verify`; offline_bundle/runtime does the work."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from appliance.cli.common import print_json, say, say_rows
from appliance.cli.view.byte_progress import byte_progress
from appliance.cli.view.fingerprint import grouped, word_lines
from appliance.cli.view.step_lines import StepLines
from appliance.service.words import human_bytes
from installer.base.errors import InstallError
from installer.base.i18n import joined, t
from offline_bundle.errors import USAGE, BundleError
from offline_bundle.progress import Progress
from offline_bundle.runtime.build import build_runtime
from offline_bundle.runtime.download import DownloadPlan
from offline_bundle.runtime.kernels import Wish
from offline_bundle.runtime.manifest import RuntimeManifest
from offline_bundle.runtime.resolve import Torch
from offline_bundle.runtime.verify import inspect_runtime, verify_runtime
from offline_bundle.signing.hash_words import in_words
from offline_bundle.signing.keys import load_trusted, refuse_from_medium

_LABELS = {
    "download": t("Fetching packages"), "read": t("Reading packages"), "verify": t("Verifying"),
}  # fmt: skip
_STEPS = {
    "unpack": t("Unpacking the packages that compile kernels"), "list": t("Listing the kernels of each model and GPU"),
    "compile": t("Compiling kernels"),
}  # fmt: skip


def build(
    out: Path,
    key: Path,
    sequence: int,
    torch: Torch,
    *,
    pythons: list[Path],
    wheels: Path | None,
    passphrase: bytes | None,
    kernels: Sequence[Wish],
    as_json: bool,
) -> None:
    """Build the runtime half of a medium, and print the hashes that the vendor gives out separately."""
    with _progress(as_json) as progress:
        made = build_runtime(
            out,
            private_key=key,
            sequence=sequence,
            torch=torch,
            pythons=pythons,
            wheels=wheels,
            passphrase=passphrase,
            kernels=kernels,
            progress=progress,
            planned=lambda plan: None if as_json else show_plan(plan),
        )
    if as_json:
        extra = {"key_fingerprint": made.fingerprint, "install_sha256": made.install_sha256}
        extra |= {"kernel_problems": made.kernels.problems}
        extra |= {"key_words": in_words(made.fingerprint), "install_words": in_words(made.install_sha256)}
        print_json({"ok": True, "path": str(out / "runtime"), "medium": str(out)} | summary(made.manifest) | extra)
        return
    say(t("Built {out}", out=out / "runtime"))
    show(made.manifest)
    for problem in made.kernels.problems:
        say(t("Servers will compile this at their first start: {problem}", problem=problem))
    say(t("\nGive the operator these two hashes by letter or phone, never on the disk itself:"))
    say_rows([(t("key fingerprint"), grouped(made.fingerprint)),
              *(("", line) for line in word_lines(made.fingerprint)),
              ("install.sh (SHA-256)", grouped(made.install_sha256)),
              *(("", line) for line in word_lines(made.install_sha256))], indent=2)
    say(t("Digits and words are the same hash; the words are easier on the phone. install.sh is identical on every "
          "medium of this version of Atoll."))
    say(t("\nNext: put model bundles beside it: atoll bundle build MODEL ... --out {out}", out=out))
    say(t("On the server, first compare, then install:"))
    say(joined(["  cp MEDIUM/install.sh /root && sha256sum /root/install.sh"], ""))
    say(joined([f'  sudo sh /root/install.sh --medium MEDIUM --fingerprint "{grouped(made.fingerprint[:32])}"'], ""))


def inspect(path: Path, *, as_json: bool) -> None:
    """Show what a runtime claims about itself."""
    manifest = inspect_runtime(path)
    if as_json:
        facts = {"ok": True, "verified": False, "path": str(path)} | summary(manifest)
        print_json(facts | {"manifest": manifest.model_dump(mode="json")})
        return
    say(t("NOT VERIFIED: this is what the runtime claims. Check it with: atoll bundle verify --key PUB"))
    show(manifest)
    for entry in manifest.files:
        typer.echo(f"    {human_bytes(entry.size):>10}  {entry.role:<12}  {entry.path}")


def verify(path: Path, trusted: Sequence[Path], min_sequence: int | None, *, as_json: bool) -> None:
    """Verify a runtime against pinned keys."""
    refuse_from_medium(trusted, path)
    with _progress(as_json) as progress:
        found = verify_runtime(path, load_trusted(trusted, path), min_sequence=min_sequence, progress=progress)
    if as_json:
        facts = {"ok": True, "verified": True, "path": str(path), "key_fingerprint": found.key_fingerprint}
        print_json(facts | summary(found.manifest))
        return
    say(t("VERIFIED: {path}", path=path))
    show(found.manifest, (t("signed by"), found.key_fingerprint))


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
        "kernels": sorted({f.path.split("/")[1] for f in manifest.files if f.role == "kernels"}, key=float),
        "requires": manifest.requires.model_dump(mode="json"),
    }


def show(manifest: RuntimeManifest, *more: tuple[str, str]) -> None:
    """The same facts for people."""
    requires = manifest.requires
    gpu = t("CPU only")
    if requires.cuda:
        gpu = t("CUDA {cuda}, driver {driver_min} or newer", cuda=requires.cuda, driver_min=requires.driver_min)
    packages = sum(f.role == "wheel" for f in manifest.files)
    kernels = [f for f in manifest.files if f.role == "kernels"]
    families = sorted({f.path.split("/")[1] for f in kernels}, key=float)
    rows = [
        (t("runtime"), t("{name} {version} (sequence {sequence}, {created})", name=manifest.name,
                         version=manifest.version, sequence=manifest.sequence, created=manifest.created)),
        (t("needs"), t("{arch}, Python {versions}, glibc {glibc} or newer; {gpu}", arch=requires.arch,
                       versions=joined(requires.python, "/"), glibc=requires.glibc, gpu=gpu)),
        ("torch", requires.torch or t("none")),
        (t("content"), t("{packages} packages, {size}; installed {unpacked}", packages=packages,
                         size=human_bytes(manifest.total_bytes), unpacked=human_bytes(requires.unpacked_bytes))),
        (t("kernels"), t("for compute capability {families}, {size}", families=joined(families),
                         size=human_bytes(sum(f.size for f in kernels)))
         if kernels else t("none: servers compile them")),
        (t("digest"), manifest.digest),
    ]
    say_rows([*rows, *more], indent=2, width=10, gap=1)


def kernel_wishes(torch: Torch, gpus: Sequence[str], models: Sequence[str]) -> list[Wish]:
    """What GPU kernels to compile. Raises BundleError for a name that is not known, and for kernels in a CPU build."""
    if torch == "cpu":
        if gpus or models:
            raise BundleError(
                t("--gpu and --for-model are for the CUDA build: the CPU build has no kernels."),
                t("Leave them out, or build with --torch cuda."), USAGE,
            )  # fmt: skip
        return []
    from appliance.service.presets.kernels import wishes

    try:
        return wishes(gpus, models)
    except InstallError as error:
        raise BundleError(error.message, error.hint, error.exit_code) from None


def require(given: dict[str, Any]) -> None:
    """Check for the options that a model bundle needs and a runtime usually does not."""
    if lacking := [name for name, value in given.items() if value is None]:
        raise BundleError(
            t("Missing: {names}.", names=joined(lacking)),
            t("A model bundle needs them; see: atoll bundle build --help"),
            USAGE,
        )


@contextmanager
def _progress(as_json: bool) -> Iterator[Progress]:
    with byte_progress(_LABELS, quiet=as_json) as bytes_done:

        kernels = StepLines()

        def report(stage: str, done: int, total: int) -> None:
            if stage in _STEPS:
                if not as_json:
                    kernels.report(_STEPS[stage], done, total)
            elif stage != "resolve":
                bytes_done(stage, done, total)
            elif not as_json and done < total:
                say(t("Choosing packages with pip, step {done} of {total} ...", done=done + 1, total=total), err=True)

        yield report


def show_plan(plan: DownloadPlan) -> None:
    """Show what will be downloaded."""
    say(t("{packages} packages, {size}:", packages=len(plan.wheels), size=human_bytes(plan.total)), err=True)
    local = sum(wheel.size or 0 for wheel in plan.wheels if wheel.local)
    rows = [(t("from the network"), human_bytes(plan.to_fetch))]
    if plan.already_here:
        rows.append((t("left by an earlier run"), human_bytes(plan.already_here)))
    if local:
        rows.append((t("on this machine"), human_bytes(local)))
    if plan.unknown:
        rows.append((t("size unknown"), t("{count} packages, fetched by pip", count=plan.unknown)))
    largest = sorted(plan.wheels, key=lambda wheel: -wheel.progress_bytes)[:5]
    rows.append((t("the largest"), joined(f"{p.pick.name} {human_bytes(p.size or 0)}" for p in largest)))
    say_rows(rows, indent=2, err=True)
