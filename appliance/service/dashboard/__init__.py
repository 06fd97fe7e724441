"""One look at the running service, as data: what each model does, the GPUs, what is wrong and what to do about it.

    snapshot   what one look sees
    watcher    looks again and again
    alerts     what to act on
    lines      a snapshot as plain lines, for a terminal without screens
"""
