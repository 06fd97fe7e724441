"""Maps the kind in a job's spec to the work that its process does: a unit's process cannot inherit it from the
front."""

import os
from pathlib import Path

from appliance.service.jobs.process import Work, run_process
from appliance.service.jobs.spool import Job
from installer.base.layout import Layout


def run_spec(path: Path) -> int:
    """Run the job whose directory is `path` in this process; its exit code."""
    job = Job(path)
    os.umask(0o022)
    return run_process(job, work_of(job.spec, layout_of(job)))


def layout_of(job: Job) -> Layout:
    """The installation that a job works on."""
    prefix = Path(job.spec["prefix"])
    return Layout.server(prefix) if job.spec["system"] else Layout.at(prefix)


def work_of(spec: dict, layout: Layout) -> Work:
    """The work of a kind; imported when it is asked for."""
    if spec["kind"] == "install":
        from appliance.service.installing import decode_options, install_work

        return install_work(decode_options(spec["given"]), layout)
    if spec["kind"] in ("tune", "tune-reset"):
        from appliance.service.tuning.work import work_of_spec

        return work_of_spec(spec["kind"], spec["given"], layout)
    if spec["kind"] == "pilot":
        from appliance.service.pilot.run import PilotRequest, pilot_work

        return pilot_work(PilotRequest.model_validate(spec["given"]), layout)
    from appliance.service.checklist import checklist_work
    from appliance.service.run_request import RunRequest

    return checklist_work(RunRequest.model_validate(spec["given"]), layout)
