"""``python -m engine.bench``: see --help."""

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path

from engine.bench import clients, guided, latency, quality, report, workload
from engine.errors import AtollError

_EXAMPLES = """examples:
  python -m engine.bench workload mixed single --model DIR            DIR needs only a config.json: weights are random
  python -m engine.bench workload single --model DIR --json > rows.jsonl
  python -m engine.bench latency --model DIR                          streams' waits while long prompts arrive
  python -m engine.bench clients --model DIR                          throughput and waits under latency targets
  python -m engine.bench guided --model DIR                           what structured output costs
  python -m engine.bench quality --model DIR --quantization int4      what a quantisation costs in quality
"""
# In a checkout only: a medium does not carry them.
_AUTHOR = "engine.bench.author"
_AUTHOR_COMMANDS = ("cpu", "profile", "load", "moe", "gemv", "delta", "cascade", "schedule")
_AUTHOR_EXAMPLES = """
of a checkout only:
  python -m engine.bench cpu --model SmolLM2-135M-Instruct            against transformers, a few minutes
  python -m engine.bench cpu --model DIR --no-peer --json > rows.jsonl
  python -m engine.bench profile --model DIR --batch 64               where a step's time goes
  python -m engine.bench load --model DIR --quantization fp8          from the page cache to ready weights
  python -m engine.bench moe --model DIR                              the experts of a layer, alone
  python -m engine.bench gemv --model DIR                             one row times each weight, alone
  python -m engine.bench schedule short prompts                       the scheduler alone, no device, no model
  python -m engine.bench delta --model DIR                            a recurrent layer, without its projections
  python -m engine.bench cascade                                      a shared prefix, read once or for each sequence
"""


def main(argv: list[str] | None = None) -> int:
    modules = {"workload": workload, "latency": latency, "clients": clients, "guided": guided,
               "quality": quality}
    examples = _EXAMPLES
    if importlib.util.find_spec(_AUTHOR) is not None:
        modules |= {name: importlib.import_module(f"{_AUTHOR}.{name}") for name in _AUTHOR_COMMANDS}
        examples += _AUTHOR_EXAMPLES
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench", description="Measure the engine.", epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in modules.items():
        summary = (module.__doc__ or "").split(": ", 1)[1].splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        defaults = getattr(module, "DEFAULT_MODELS", ())
        words = "model directory" + (f" (default: the shapes of {', '.join(defaults)})" if defaults else "")
        several = "+" if getattr(module, "SEVERAL_MODELS", False) else None
        if getattr(module, "NEEDS_MODEL", True):
            command.add_argument("--model", type=Path, nargs=several, required=not defaults, metavar="DIR", help=words)
        command.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
        module.add_arguments(command)
    args = parser.parse_args(argv)
    if args.command == "cpu" and not args.no_peer and importlib.util.find_spec("transformers") is None:
        parser.error("transformers is not installed: pip install 'atoll[demo]', or measure without it: --no-peer")
    try:
        report.show(modules[args.command].run(args), as_json=args.json)
    except AtollError as error:
        report.say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        report.say("Stopped.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
