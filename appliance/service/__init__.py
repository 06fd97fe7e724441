"""The product without a face: facts, the checklist and its steps, and the jobs that do the long work.

Nothing here prints or reads a terminal: `atoll` commands and the TUI are readers of this room.
"""
