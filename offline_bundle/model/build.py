"""Build and sign a bundle from a model directory: copy and hash in one pass, describe, sign, rename into place."""

import fnmatch
import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ValidationError

from offline_bundle import limits, names, untrusted_dir
from offline_bundle.bundle.manifest import MANIFEST, SIGNATURE
from offline_bundle.bundle.output import now, sync_directory, write_failed
from offline_bundle.bundle.verify import check_file_set, check_signed_manifest
from offline_bundle.errors import CONTENT, MISSING, SPACE_IO, USAGE, BundleError
from offline_bundle.model import content, sbom
from offline_bundle.model.manifest import (
    Acceptance,
    BundleManifest,
    FileEntry,
    License,
    Requires,
    Role,
    Source,
)
from offline_bundle.parallel import Reader, Tick, default_workers, run, write_at
from offline_bundle.progress import Progress, silent
from offline_bundle.signing import keys, model_signing
from offline_bundle.text import complaint, joined, reason, t

_SPACE_SLACK = 16 * limits.MIB


def build_bundle(
    source_model_dir: Path,
    out_dir: Path,
    *,
    name: str,
    version: str,
    sequence: int,
    license_id: str,
    license_file: Path,
    source_repo: str,
    source_revision: str,
    private_key: Path,
    progress: Progress = silent,
    passphrase: bytes | None = None,
    acceptance: Acceptance = "click",
    license_url: str | None = None,
    requires: Mapping[str, Any] | None = None,
    exclude: Sequence[str] = (),
    chunk_size: int = limits.DEFAULT_CHUNK,
) -> Path:
    """Copy, hash and sign `source_model_dir` into `out_dir/<name>-<version>`; returns that path.

    The model directory is not changed. `license_id` is an SPDX identifier (or ``LicenseRef-…``) and `license_file`
    its text, which always travels with the model. `sequence` must grow with every release of one `name`: servers
    refuse a lower one. `requires` are fields of `Requires`; disk_bytes is the sum of the files unless given.
    `exclude` are shell patterns of paths or names to leave out. `passphrase` opens an encrypted `private_key`. The
    time in ``created`` is SOURCE_DATE_EPOCH when that is set. Progress stage: ``copy``.

    Raises BundleError with exit code 2 (an argument, or the target exists), 11 (content that a bundle may not
    carry), 13 (a path is missing), 30 (space or I/O). The target appears only when it is complete.
    """
    key = keys.load_private(private_key, passphrase)
    target = out_dir / f"{name}-{version}"
    license_text = _read_license(license_file)
    license_path = f"licenses/{license_id}.txt"
    draft = _draft(
        chunk_size,
        name=name,
        version=version,
        sequence=sequence,
        created=now(),
        source=lambda: Source(repo=source_repo, revision=source_revision),
        requires=lambda: Requires(**{"disk_bytes": 0, **(requires or {})}),
        license=lambda: License(
            spdx=license_id,
            file=license_path,
            sha256=hashlib.sha256(license_text).hexdigest(),
            acceptance=acceptance,
            url=license_url,
        ),
    )
    if os.path.lexists(target):
        raise BundleError(
            t("{target} exists already; a bundle is never overwritten.", target=target),
            t("Raise --version and --sequence, choose another --out, or delete it yourself."),
            USAGE,
        )
    partial = out_dir / f".{target.name}.partial"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        with untrusted_dir.open_root(source_model_dir) as root:
            sizes = _list_sources(root, source_model_dir, exclude)
            _check_space(out_dir, sum(sizes.values()))
            partial.mkdir()
            entries = _copy_model(root, partial, sizes, chunk_size, progress)
        entries.append(_add(partial, license_path, license_text, chunk_size))
        entries.sort(key=lambda e: e.path)
        entries.append(_add(partial, sbom.PATH, sbom.make(draft, entries), chunk_size))
        manifest = _complete(draft, entries, requires, _check_content(partial, entries))
        _sign(partial, target.name, manifest, key)
        with untrusted_dir.open_root(partial) as built:
            signed = check_signed_manifest(built, {(p := keys.public_of(key)).fingerprint: p}, BundleManifest)
            check_file_set(built, signed)
        _sync_directories(partial)
        os.rename(partial, target)
        sync_directory(out_dir)
    except OSError as e:
        raise write_failed(out_dir, e) from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _draft(chunk_size: int, **fields: Any) -> BundleManifest:
    """The manifest with placeholders for the files, so that a bad argument is found before hours of copying.

    `fields` are those of BundleManifest. A callable makes its value here, so that its errors are reported alike.
    """

    def placeholder(path: str, role: Role, sha256: str) -> FileEntry:
        return FileEntry(path=path, size=1, sha256=sha256, role=role, chunk_size=chunk_size, chunks=(sha256,))

    try:
        made: dict[str, Any] = {k: v() if callable(v) else v for k, v in fields.items()}
        text: License = made["license"]
        files = (
            placeholder(text.file, "license", text.sha256),
            placeholder("model/config.json", "config", "0" * 64),
            placeholder("model/model.safetensors", "weights", "0" * 64),
        )
        return BundleManifest(**made, files=files, chat_template_sha256=None)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise BundleError(
            t("The argument '{loc}' is not usable: {msg}.", loc=first["loc"][0] if first["loc"] else "value",
              msg=complaint(first)),
            t("name: letters, digits, '.', '_', '-'; version: 1.2.3; sequence: a whole number from 1; licence: an "
              "SPDX identifier; source: printable ASCII."),
            USAGE,
        ) from e


def _complete(
    draft: BundleManifest, entries: Sequence[FileEntry], requires: Mapping[str, Any] | None, template: str | None
) -> BundleManifest:
    """The draft with the real files."""
    real = {
        "files": tuple(sorted(entries, key=lambda e: e.path)),
        "chat_template_sha256": template,
        "requires": Requires(**{"disk_bytes": sum(e.size for e in entries), **(requires or {})}),
    }
    try:
        return BundleManifest.model_validate(dict(draft) | real)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise BundleError(
            t("The model cannot become a bundle: {msg}.", msg=complaint(first)),
            t("Correct it and build again."),
            CONTENT,
        ) from e


def _read_license(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(limits.MAX_TEXT["license"] + 1)  # the content rules refuse a longer text
        text.decode("utf-8")
    except OSError as e:
        raise BundleError(
            t("The licence text {path} cannot be read: {why}.", path=path, why=reason(e)),
            t("Give the licence's text file."),
            MISSING,
        ) from e
    except UnicodeDecodeError as e:
        raise BundleError(
            t("The licence text {path} is not UTF-8 text.", path=path), t("Convert it to UTF-8."), USAGE
        ) from e
    if not text.strip():
        raise BundleError(t("The licence text {path} is empty.", path=path), t("Give the licence's full text."), USAGE)
    return text


def _list_sources(root: int, source: Path, exclude: Sequence[str]) -> dict[str, int]:
    """Path (below the model directory) → size, after refusing files that no bundle may hold."""

    def skip(path: str) -> bool:
        name = path.rsplit("/", 1)[-1]
        return any(fnmatch.fnmatchcase(path, p) or fnmatch.fnmatchcase(name, p) for p in exclude)

    try:
        tree = untrusted_dir.walk(root, skip=skip)
    except BundleError as e:
        advice = t("To leave files out, use --exclude; to turn a download cache's links into files, use 'cp -rL'.")
        raise BundleError(
            t("In {source}: {message}", source=source, message=e.message), joined([e.hint, advice], " "), e.exit_code
        ) from e
    for path in tree.files:
        content.role_of(f"model/{path}")
    if "config.json" not in tree.files or not any(p.endswith(".safetensors") for p in tree.files):
        raise BundleError(
            t("{source} is not a model directory: it lacks config.json or *.safetensors.", source=source),
            t("Give a directory in the usual Hugging Face layout."),
            MISSING,
        )
    if pair := names.collision([f"model/{p}" for p in tree.files]):
        raise BundleError(
            t("The paths '{one}' and '{other}' collide on some file systems.", one=pair[0], other=pair[1]),
            t("Rename one of them."),
            CONTENT,
        )
    return tree.files


def _check_space(out_dir: Path, need: int) -> None:
    info = os.statvfs(out_dir)
    free = info.f_bavail * info.f_frsize
    if free < need + _SPACE_SLACK:
        raise BundleError(
            t("{out_dir} has {free:,} bytes free; the bundle needs {need:,}.", out_dir=out_dir, free=free,
              need=need + _SPACE_SLACK),
            t("Free space or choose another --out."),
            SPACE_IO,
        )


def _copy_model(
    root: int, partial: Path, sizes: dict[str, int], chunk_size: int, progress: Progress
) -> list[FileEntry]:
    """Copy every source file to partial/model, hashing it whole and by chunks while it passes."""
    for directory in sorted({os.path.dirname(p) for p in sizes}):
        (partial / "model" / directory).mkdir(parents=True, exist_ok=True)
    entries: list[FileEntry] = []
    reader = Reader(root)
    # A file's own hash is sequential; the chunk hash of the same block is computed in parallel.
    with ThreadPoolExecutor(default_workers(), thread_name_prefix="chunk-hash") as helpers:

        def copy(path: str, tick: Tick) -> None:
            whole, chunks, at = hashlib.sha256(), [], 0
            with untrusted_dir.open_file(root, path) as fd, _create(partial / "model" / path) as out:
                while at < sizes[path]:
                    chunk, chunk_end = hashlib.sha256(), min(at + chunk_size, sizes[path])
                    while at < chunk_end:
                        view = reader.buffer(chunk_size, chunk_end - at)
                        try:
                            if reader.read_into(fd, view, at) != len(view):
                                raise _changed(path)
                        except OSError as e:
                            raise untrusted_dir.read_failed(path, e) from e
                        beside = helpers.submit(chunk.update, view)
                        whole.update(view)
                        write_at(out.fileno(), view, at)
                        beside.result()
                        at += len(view)
                        tick(len(view))
                    chunks.append(chunk.hexdigest())
                if os.pread(fd, 1, at):
                    raise _changed(path)
                _flush(out.fileno())
            entries.append(
                FileEntry(
                    path=f"model/{path}",
                    size=at,
                    sha256=whole.hexdigest(),
                    role=content.role_of(f"model/{path}"),
                    chunk_size=chunk_size,
                    chunks=tuple(chunks),
                )
            )

        biggest_first = sorted(sizes, key=lambda p: -sizes[p])
        run(
            biggest_first,
            copy,
            stage="copy",
            total=sum(sizes.values()),
            progress=progress,
            workers=max(1, default_workers() // 2),
        )
    return entries


def _changed(path: str) -> BundleError:
    return BundleError(
        t("{path} changed while it was read.", path=names.show(path)),
        t("Let the download finish, then build again."),
        CONTENT,
    )


def _create(path: Path):
    return open(path, "xb", buffering=0)


def _flush(fd: int) -> None:
    os.fchmod(fd, 0o644)
    os.fsync(fd)


def _add(partial: Path, path: str, data: bytes, chunk_size: int) -> FileEntry:
    """Write a file that we generate, and describe it."""
    (partial / path).parent.mkdir(parents=True, exist_ok=True)
    _write(partial / path, data)
    return FileEntry(
        path=path,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        role=content.role_of(path),
        chunk_size=chunk_size,
        chunks=tuple(hashlib.sha256(data[i : i + chunk_size]).hexdigest() for i in range(0, len(data), chunk_size)),
    )


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as out:
        out.write(data)
        out.flush()
        _flush(out.fileno())


def _check_content(partial: Path, entries: Sequence[FileEntry]) -> str | None:
    """Apply the content rules to the copy; returns the chat template's hash."""
    files = {e.path: e for e in entries}
    with untrusted_dir.open_root(partial) as root:
        for entry in entries:
            with untrusted_dir.open_file(root, entry.path) as fd:
                content.check_file(fd, entry)

        def read(path: str) -> bytes:
            return untrusted_dir.read_small(root, path, limits.MAX_PARSED)

        content.check_index(read, files)
        return content.chat_template_sha256(read, files)


def _sign(partial: Path, model_name: str, manifest: BundleManifest, key: ec.EllipticCurvePrivateKey) -> None:
    text = manifest.to_bytes()
    if len(text) > limits.MAX_MANIFEST:
        raise BundleError(t("bundle.json would be too large."), t("Use a larger chunk size."), CONTENT)
    resources = {f.path: f.sha256 for f in manifest.files} | {MANIFEST: hashlib.sha256(text).hexdigest()}
    _write(partial / MANIFEST, text)
    _write(partial / SIGNATURE, model_signing.sign(resources, model_name, key))


def _sync_directories(top: Path) -> None:
    for directory, _, _ in os.walk(top):
        sync_directory(Path(directory))
