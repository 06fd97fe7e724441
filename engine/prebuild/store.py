"""Compiles variants and writes them in the form that engine/kernels/runtime/prebuilt.py reads.

A run that was interrupted continues: Triton's cache has what was compiled, and the directory what was written. The
index comes last, so a directory is either complete or what the run before had made of it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import triton

from engine.kernels.runtime import compile_pool, prebuilt
from engine.kernels.runtime.compile_ahead import line_of, longest_first
from engine.kernels.runtime.launcher import Job, KernelError, machine_code, variant_key

Progress = Callable[[int, int], None]


def compile_into(
    directory: Path,
    jobs: Iterable[Job],
    capability: tuple[int, int],
    models: Iterable[str] = (),
    progress: Progress | None = None,
) -> dict[str, str]:
    """Add these variants to `directory`, which has one folder for each compute capability. `models`: the model_key of
    those whose kernels are listed completely. Returns why some could not be compiled, by kernel: a server does that.
    """
    place = directory / ".".join(map(str, capability))
    place.mkdir(parents=True, exist_ok=True)
    toolchain = prebuilt.toolchain(capability)
    index = _earlier(place, toolchain)
    by_line = {line_of(job, capability): job for job in jobs}
    missing = {line: job for line, job in by_line.items() if variant_key(job, capability) not in index.kernels}
    kernels, errors = dict(index.kernels), {}
    if missing:
        order = longest_first(missing)
        pool = compile_pool.take()
        pool.submit(order)
        pool.seal()
        for done, line in enumerate(order, len(by_line) - len(missing)):
            if progress:
                progress(done, len(by_line))
            job = missing[line]
            failed = pool.wait([line])
            try:
                if failed:
                    raise KernelError(failed[line])
                code = machine_code(job, capability)
            except KernelError as error:
                errors[job.kernel.name] = str(error)
                continue
            key = variant_key(job, capability)
            _write(place / f"{key}.cubin", code.cubin)
            kernels[key] = code.function, code.num_warps, code.shared, hashlib.sha256(code.cubin).hexdigest()
        pool.close()
    if progress:
        progress(len(by_line), len(by_line))
    _write(place / prebuilt.INDEX, _text(toolchain, {*index.models, *models}, kernels))
    _remove_others(place, kernels)
    return errors


def _earlier(place: Path, toolchain: str) -> prebuilt.Index:
    """What an earlier run of the same Triton has left, as far as its files are whole."""
    nothing = prebuilt.Index(toolchain, frozenset(), {})
    try:
        index = prebuilt.read_index(place / prebuilt.INDEX)
    except (OSError, ValueError):
        return nothing
    if index.toolchain != toolchain:
        return nothing
    found = prebuilt.Prebuilt(place, index)
    return index._replace(kernels={key: entry for key, entry in index.kernels.items() if key in found})


def _text(toolchain: str, models: set[str], kernels: dict[str, tuple[str, int, int, str]]) -> bytes:
    body = {
        "format": prebuilt.FORMAT, "triton": triton.__version__, "toolchain": toolchain, "models": sorted(models),
        "kernels": dict(sorted(kernels.items())),
    }  # fmt: skip
    return (json.dumps(body, indent=1) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.chmod(0o644)  # whatever the umask: the reader refuses what others can write to
    os.replace(new, path)


def _remove_others(place: Path, kernels: Iterable[str]) -> None:
    named = {prebuilt.INDEX, *(f"{key}.cubin" for key in kernels)}
    for path in place.iterdir():
        if path.name not in named:
            path.unlink()
