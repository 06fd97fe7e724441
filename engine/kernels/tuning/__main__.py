"""``python -m engine.kernels.tuning``: see --help."""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from engine.errors import AtollError, ConfigError
from engine.kernels.gemm import tiles as gemm_tiles
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.runtime import tuned_tables
from engine.kernels.runtime.cache_dir import is_temporary, use_cache_dir
from engine.kernels.runtime.gpu_target import Target, tuned_file
from engine.kernels.runtime.tuned_tables import TableError
from engine.kernels.tuning.results import OwnTable, ShippedTables, only_tuner
from engine.kernels.tuning.rows import Row, say, show
from engine.kernels.tuning.search import PARTS, Tuner
from engine.plan import SHAPES

_DESCRIPTION = """\
Find the kernel tiles that are fastest on this machine's GPU, offline. Only a model's config.json is read; the weights
are random. Results go into a table in the engine's cache directory. From its next start the engine prefers this table
to those that come with Atoll. The search can be stopped at any time: the same command continues it.

Nothing else should use the GPU meanwhile: stop the service first.
"""
_EXAMPLES = """\
examples:
  python -m engine.kernels.tuning --model DIR                       for the engine that this user starts
  python -m engine.kernels.tuning --model DIR --quantization fp8 --budget 300
  python -m engine.kernels.tuning --show                            which tables this GPU uses; searches nothing

  On a server, as the user that runs the engine, with that engine's cache:
  sudo atoll stop
  sudo -u atoll-engine env PYTHONPATH=/opt/atoll/current/lib python3 -P -m engine.kernels.tuning \\
      --model /var/lib/atoll/models/DIGEST --cache /var/cache/atoll/engine/NAME
  sudo atoll start

  In a checkout, for a release, with all shapes in engine/bench/configs:
  python -m engine.kernels.tuning --ship --budget 1800
"""
_PARSERS = {"gemm": gemm_tiles.parse, "moe": moe_tiles.parse}


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        show(_show(options) if options.show else _search(options), as_json=options.json)
    except (AtollError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("Stopped. Results so far are kept; the same command continues the search.")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.kernels.tuning", description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--model", type=Path, nargs="+", metavar="DIR",
        help="directories with a config.json (default: the shapes that come with Atoll)",
    )  # fmt: skip
    words = "weights as the engine will load them (default: both, but fp8 alone for models of more than 20 GB)"
    parser.add_argument("--quantization", choices=["none", "fp8"], help=words)
    words = "step: the decode step of one sequence; experts: a layer's experts at several token counts (default: both)"
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help=words)
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="stop then (default: never)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="the engine's cache directory (default: as this "
                        "user's engine finds it)")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="search again what was found before")
    parser.add_argument("--ship", action="store_true", help="write into the tables of this checkout instead")
    parser.add_argument("--show", action="store_true", help="say which tables this GPU uses, and search nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout; progress is on stderr")
    return parser


def _search(options: argparse.Namespace) -> Iterator[Row]:
    device, gpu = _gpu()
    models = options.model or sorted(path for path in SHAPES.iterdir() if (path / "config.json").is_file())
    _check(models)
    _choose_cache(options.cache)
    started = time.monotonic()
    path = tuned_tables.path_for(gpu)
    with only_tuner(tuned_tables.directory()):
        results = ShippedTables(gpu) if options.ship else OwnTable(path, gpu, again=options.again)
        where = "the tables of this checkout" if options.ship else str(path)
        say(f"{gpu.name}: results go into {where}")
        tuner = Tuner(results, device, started + options.budget)
        yield from tuner.run(models, options.quantization, options.parts)
    left = f", {tuner.left} left for the next run" if tuner.left else ""
    say(f"{tuner.searched} searched, {tuner.skipped} found before{left}; {time.monotonic() - started:.0f} s.")
    if tuner.searched and not options.ship:
        say("Restart the engines: they read the new tiles when they start.")
    yield {"bench": "tuning", "table": where, "searched": tuner.searched, "found_before": tuner.skipped,
           "left": tuner.left, "seconds": round(time.monotonic() - started, 1)}  # fmt: skip


def _show(options: argparse.Namespace) -> Iterator[Row]:
    _, gpu = _gpu()
    _choose_cache(options.cache)
    kernels, path = Path(__file__).parents[1], tuned_tables.path_for(gpu)
    own: dict[str, object] = {}
    problem = None
    try:
        table = tuned_tables.load(path, gpu)
        for kind, parse in _PARSERS.items():
            own[kind] = len(tuned_tables.parsed(getattr(table, kind), gpu, parse))
    except FileNotFoundError:
        problem = "there is none"
    except TableError as error:
        problem = str(error)
    yield {"bench": "tuning", "gpu": gpu.name, "own_table": str(path), **({"not_used": problem} if problem else own)}
    for kind in _PARSERS:
        yield {"bench": "tuning", "kernels": kind, "shipped_table": tuned_file(kernels / kind / "tuned.json", gpu).name}


def _gpu() -> tuple[torch.device, Target]:
    if not torch.cuda.is_available():
        raise ConfigError("No CUDA GPU is usable here: the search must time kernels.", hint="Check nvidia-smi.")
    from engine.kernels.runtime.launcher import target_of

    device = torch.device("cuda", torch.cuda.current_device())
    return device, target_of(device)


def _check(models: Sequence[Path]) -> None:
    """Check the models before anything is started: a search takes minutes, and a typo should not cost them."""
    for model in models:
        if not (model / "config.json").is_file():
            raise ConfigError(f"{model} has no config.json.", "--model", "Name a model's directory.")


def _choose_cache(given: Path | None) -> None:
    """Choose the directory of tables where the engine will look for them. Raises ConfigError if it cannot be used."""
    if given is not None:
        os.environ.pop("TRITON_CACHE_DIR", None)
        os.environ["CACHE_DIRECTORY"] = str(given.absolute())
    found = use_cache_dir()
    if given is not None and given.resolve() not in found.parents:
        owner = f" It belongs to user ID {given.stat().st_uid}." if given.is_dir() else ""
        raise ConfigError(
            f"{given} is not a directory that only this user can write to.{owner}", "--cache",
            "Run the search as the user that runs the engine, with sudo -u.",
        )  # fmt: skip
    if is_temporary(found):
        raise ConfigError(
            "There is no permanent cache directory: results would be lost.", "--cache",
            "Name the engine's cache directory with --cache.",
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
