"""The steps of an install, one file per phase: inspect and decide (write nothing), stage (touches nothing that runs),
activate, undo."""
