"""Jobs: long work that runs outside of the program that asked for it, and outlives its terminal.

A job is a separate process, on a server in a transient systemd unit. It appends its progress to a file of JSON lines
that any number of readers may follow; one front may be attached to answer its questions, and any front may cancel it.
"""

from appliance.service.jobs.attach import attach, run, watch
from appliance.service.jobs.spool import Job, JobState, find, jobs, newest

__all__ = ["Job", "JobState", "attach", "find", "jobs", "newest", "run", "watch"]
