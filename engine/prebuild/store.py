"""Compiles variants and writes them in the form that engine/kernels/runtime/prebuilt.py reads.

A run that was interrupted continues: Triton's cache has what was compiled. The index is written last, and names the
hash of each kernel, so a reader never takes one for another.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import triton

from engine.kernels.runtime import compile_pool, prebuilt
from engine.kernels.runtime.compile_ahead import job_of, longest_first
from engine.kernels.runtime.driver import KernelError
from engine.kernels.runtime.launcher import MachineCode, machine_code, variant_key

Progress = Callable[[int, int], None]


def compile_into(
    directory: Path,
    lines: Iterable[str],
    capability: tuple[int, int],
    models: Iterable[str] = (),
    progress: Progress | None = None,
    *,
    add: bool = True,
) -> dict[str, str]:
    """Compile these variants (compile_ahead.line_of) into `directory`, which has one folder for each compute
    capability. With `add`, what an earlier call has left there stays. `models`: the model_key of those whose kernels
    are listed completely. Returns why some could not be compiled, by kernel: a server tries them again.
    """
    place = directory / ".".join(map(str, capability))
    place.mkdir(parents=True, exist_ok=True)
    toolchain = prebuilt.toolchain(capability)
    jobs = {line: job_of(line) for line in longest_first(set(lines))}
    keys = {line: variant_key(job, capability) for line, job in jobs.items()}
    codes, known = _earlier(place, toolchain)
    if not add:
        codes, known = {key: code for key, code in codes.items() if key in keys.values()}, set()
    missing = [line for line in jobs if keys[line] not in codes]
    errors: dict[str, str] = {}
    if missing:
        pool = compile_pool.take()
        pool.submit(missing)
        pool.seal()
        for done, line in enumerate(missing, len(jobs) - len(missing)):
            if progress:
                progress(done, len(jobs))
            failed = pool.wait([line])
            try:
                if failed:
                    raise KernelError(failed[line])
                codes[keys[line]] = machine_code(jobs[line], capability)
            except KernelError as error:
                errors[jobs[line].kernel.name] = str(error)
        pool.close()
    if progress:
        progress(len(jobs), len(jobs))
    _write_all(place, toolchain, known | set(models), codes)
    return errors


def _earlier(place: Path, toolchain: str) -> tuple[dict[str, MachineCode], set[str]]:
    """The whole kernels and the models that an earlier run of the same Triton has left."""
    try:
        index = prebuilt.read_index(place / prebuilt.INDEX)
        found = prebuilt.Prebuilt(place, index)
    except (OSError, ValueError):
        return {}, set()
    if index.toolchain != toolchain:
        return {}, set()
    codes = {key: found.code(key) for key in index.kernels}
    return {key: code for key, code in codes.items() if code is not None}, set(index.models)


def _write_all(place: Path, toolchain: str, models: set[str], codes: dict[str, MachineCode]) -> None:
    entries, offset = {}, 0
    for key, code in sorted(codes.items()):
        digest = hashlib.sha256(code.cubin).hexdigest()
        entries[key] = prebuilt.Entry(
            code.function, code.num_warps, code.shared, code.scratch, offset, len(code.cubin), digest
        )  # fmt: skip
        offset += len(code.cubin)
    _write(place / prebuilt.CODE, b"".join(code.cubin for _, code in sorted(codes.items())))
    body = {
        "format": prebuilt.FORMAT, "triton": triton.__version__, "toolchain": toolchain, "models": sorted(models),
        "kernels": entries,
    }  # fmt: skip
    _write(place / prebuilt.INDEX, (json.dumps(body, indent=1) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.chmod(0o644)  # whatever the umask: the reader refuses what others can write to
    os.replace(new, path)
