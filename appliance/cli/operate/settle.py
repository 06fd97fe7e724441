"""`atoll settle`, which atoll-settle.service runs at boot."""

import typer


def register(app: typer.Typer) -> None:
    """Add the command of this module to the `atoll` command tree."""
    app.command()(settle)


def settle() -> None:
    """Put the proven release back after an upgrade that a power cut interrupted. atoll-settle.service runs it at boot,
    before the engines; while the machine runs, `atoll start` does the same."""
    from installer.operate.boot_recovery import main

    raise typer.Exit(main())
