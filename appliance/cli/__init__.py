"""The `atoll` command. `serve` is dispatched before anything heavy is imported: its start-up time is a feature."""

import sys


def main() -> None:
    """Entry point of the `atoll` console script."""
    argv = sys.argv[1:]
    if argv[:1] == ["serve"] and not {"-h", "--help"} & set(argv):  # its help speaks the operator's language
        from engine.server.cli import main as serve

        sys.exit(serve(argv[1:]))
    from appliance.cli.app import app

    app()
