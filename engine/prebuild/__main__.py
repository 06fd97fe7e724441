"""Compile the kernels that a start with these flags needs, for GPUs that need not be here.

    python -m engine.prebuild MODEL --out DIR --gpu h100 [--gpu l40s ...] [flags of `atoll engine`]

MODEL is a directory with a config.json (of a quantised checkpoint: all of it), or a shape that Atoll was measured with,
such as qwen3-8b. DIR gets a folder for each compute capability; another call adds another model, and one that was
interrupted continues. An engine of the same Triton reads DIR if $ATOLL_PREBUILT_KERNELS names it.

Exit codes: 0 ok, 1 some kernels could not be compiled (servers will try), 2 wrong flags or model.
"""

import argparse
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.kernels.runtime import prebuilt
from engine.models.config.model import ModelConfig
from engine.plan import shipped_shape
from engine.prebuild.gpus import GPUS
from engine.prebuild.listing import kernels_for
from engine.prebuild.store import compile_into
from engine.server.settings.commands import parse_engine


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    options, flags = _parser().parse_known_args(argv)
    try:
        config = _config(options.model, flags)
        failed = 0
        for name in options.gpu:
            failed += _compile(config, name, options.out)
    except (ModelError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.prebuild", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gpu", action="append", required=True, choices=sorted(GPUS))
    return parser


def _config(model: str, flags: list[str]) -> EngineConfig:
    """What `atoll engine --model MODEL flags` runs. Weights only say how a quantised checkpoint stores them."""
    place = shipped_shape(model) or Path(model)
    config = parse_engine(["--model", str(place), "--uds", "/", *flags]).engine
    return config if any(place.glob("*.safetensors")) else replace(config, load_format="dummy")


def _compile(config: EngineConfig, gpu: str, out: Path) -> int:
    """Returns how many kernels could not be compiled."""
    began = time.monotonic()
    target, total = GPUS[gpu]
    jobs = kernels_for(config, target, total)
    listed = time.monotonic() - began

    def progress(done: int, count: int) -> None:
        sys.stderr.write(f"\r{config.model.name} on {gpu}: {done} of {count} kernels")
        sys.stderr.flush()

    raw = ModelConfig.load(config.model).raw
    errors = compile_into(out, jobs, target.capability, [prebuilt.model_key(raw)], progress)
    folder = out / ".".join(map(str, target.capability))
    size = sum(path.stat().st_size for path in folder.iterdir())
    sys.stderr.write(
        f"; listed in {listed:.0f} s, done after {time.monotonic() - began:.0f} s; {folder}: {size / 1e6:.1f} MB\n"
    )
    for kernel, error in errors.items():
        sys.stderr.write(f"{kernel} could not be compiled: {error}\n")
    return len(errors)


if __name__ == "__main__":
    sys.exit(main())
