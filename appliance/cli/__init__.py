"""The `atoll` command. `serve` is dispatched before anything heavy is imported, because its start-up time matters."""

import sys


def main() -> None:
    """Entry point of the `atoll` console script."""
    argv = sys.argv[1:]
    asked = {word.partition("=")[0] for word in argv}
    if argv[:1] == ["serve"] and not {"-h", "--help", "--lang"} & asked:  # the command tree handles these
        from appliance.cli.language.engine_programs import engine_speaks
        from engine.server.cli.serve import main as serve

        with engine_speaks():
            sys.exit(serve(argv[1:]))
    from appliance.cli.app import app

    app()
