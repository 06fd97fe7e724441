"""The `atoll` command. `serve` is dispatched before anything heavy is imported: its start-up time is a feature."""

import sys


def main() -> None:
    """Entry point of the `atoll` console script."""
    argv = sys.argv[1:]
    asked = {word.partition("=")[0] for word in argv}
    if argv[:1] == ["serve"] and not {"-h", "--help", "--lang"} & asked:  # the command tree knows these
        from engine.errors import retelling
        from engine.server.cli.serve import main as serve

        with retelling(_told):
            sys.exit(serve(argv[1:]))
    from appliance.cli.app import app

    app()


def _told(text: str) -> str:
    from appliance.cli.language.engine_words import told_here  # the catalogue is read when there is something to say

    return told_here(text)
