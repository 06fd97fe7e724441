"""Compile the kernels that a start with these flags needs, for GPUs that need not be here.

    python -m engine.prebuild MODEL --out DIR --gpu h100 [--gpu l40s ...] [flags of `atoll engine`]
    python -m engine.prebuild --wishes FILE --out DIR [--json]

MODEL is a directory with a config.json (of a quantised checkpoint: all of it), or a shape that Atoll was measured with,
such as qwen3-8b. DIR gets a folder for each compute capability; another call adds another model, and one that was
interrupted continues. An engine of the same Triton reads DIR if $ATOLL_PREBUILT_KERNELS names it.

With --wishes, DIR gets exactly the kernels of all wishes in FILE: [{"model": …, "gpu": …, "flags": […]}, …]. --json
reports progress as lines of JSON on stdout.

Exit codes: 0 ok, 1 some kernels could not be listed or compiled (servers will try), 2 wrong flags or model.
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, ModelError
from engine.prebuild.gpus import GPUS
from engine.prebuild.listers import Listed, list_all, list_one
from engine.prebuild.store import compile_into
from engine.prebuild.wishes import Wish, read_wishes


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    parser = _parser()
    options, flags = parser.parse_known_args(argv)
    if (options.wishes is None) == (options.model is None) or (options.wishes is None) == (options.gpu is None):
        parser.error("give MODEL and --gpu, or --wishes")
    if options.wishes is not None and flags:
        parser.error(f"unknown: {' '.join(flags)}")
    report = _Report(as_json=options.json)
    try:
        if options.wishes is None:
            listed = [list_one(Wish(options.model, gpu, tuple(flags))) for gpu in options.gpu]
        else:
            listed = list_all(read_wishes(options.wishes), lambda done, total: report.progress("list", done, total))
    except (ModelError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    failed = _compile(listed, options.out, report, add=options.wishes is None)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.prebuild", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", nargs="?")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gpu", action="append", choices=sorted(GPUS))
    parser.add_argument("--wishes", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    return parser


def _compile(listed: list[Listed], out: Path, report: "_Report", *, add: bool) -> int:
    """Compile what was listed, one compute capability after the other. Returns how many lists and kernels failed."""
    failed = 0
    for one in listed:
        if one.error:
            failed += 1
            report.problem(f"{one.wish.model} on {one.wish.gpu} cannot be listed: {one.error}")
    by_capability: dict[tuple[int, int], list[Listed]] = {}
    for one in listed:
        if not one.error:
            by_capability.setdefault(GPUS[one.wish.gpu].target.capability, []).append(one)
    lines = {capability: {line for one in of for line in one.lines} for capability, of in by_capability.items()}
    total, before = sum(map(len, lines.values())), 0
    for capability, of in sorted(by_capability.items()):
        errors = compile_into(
            out, lines[capability], capability, {one.model for one in of},
            lambda done, _, before=before: report.progress("compile", before + done, total), add=add,
        )  # fmt: skip
        before += len(lines[capability])
        failed += len(errors)
        for kernel, error in errors.items():
            report.problem(f"{kernel} could not be compiled: {error}")
        folder = out / ".".join(map(str, capability))
        report.done(folder, len(lines[capability]), sum(path.stat().st_size for path in folder.iterdir()))
    return failed


class _Report:
    """For people on stderr; with --json, progress on stdout for the program that started this one."""

    def __init__(self, *, as_json: bool) -> None:
        self._json = as_json

    def progress(self, stage: str, done: int, total: int) -> None:
        if self._json:
            self._write(stage=stage, done=done, total=total)
        else:
            sys.stderr.write(f"\r{stage}: {done} of {total}" + ("\n" if done == total else ""))
            sys.stderr.flush()

    def problem(self, text: str) -> None:
        if self._json:
            self._write(problem=text)
        else:
            sys.stderr.write(f"{text}\n")

    def done(self, folder: Path, kernels: int, size: int) -> None:
        if self._json:
            self._write(capability=folder.name, kernels=kernels, bytes=size)
        else:
            sys.stderr.write(f"{folder}: {kernels} kernels, {size / 1e6:.1f} MB\n")

    def _write(self, **facts: Any) -> None:
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
