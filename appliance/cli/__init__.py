"""The `atoll` command. Programs that serve are called before anything heavy is imported, because their start-up time
matters."""

import sys
from importlib import import_module

# Command -> module whose `main` parses its own arguments.
PROGRAMS = {
    "serve": "engine.server.cli.serve",
    "engine": "engine.server.process.engine_process",
    "gateway": "engine.server.gateway.gateway",
    "gpu-ready": "engine.server.process.gpu_ready",
    "sampler": "appliance.series.sampler",
}


def main() -> None:
    """Entry point of the `atoll` console script."""
    argv = sys.argv[1:]
    asked = {word.partition("=")[0] for word in argv}
    if argv and argv[0] in PROGRAMS and not {"-h", "--help", "--lang"} & asked:  # the command tree handles these
        from appliance.cli.language.engine_programs import engine_speaks

        run = import_module(PROGRAMS[argv[0]]).main
        with engine_speaks():
            sys.exit(run(argv[1:]))
    from appliance.cli.app import app

    app()
