"""The state of the running service, as data: what each model does, the GPUs, what is wrong and what to do about it.

    snapshot   the state at one moment
    watcher    polls the service for it
    alerts     what to act on
    cells      a snapshot as text: cells of tables, and lines for a terminal without screens
"""
