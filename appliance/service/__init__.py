"""The product without a user interface: facts, the checklist and its steps, and the jobs that do the long work.

Nothing here prints or reads a terminal: the `atoll` commands and the TUI build on this room.
"""
