"""From facts to troubles. Pure: everything is in the scene."""

import errno
import os
import re
from collections.abc import Iterator

from appliance.service.trouble import causes
from appliance.service.trouble.record import Action, Scene, Trouble
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.preflight.record import CheckRecord
from installer.tls.endpoint import RENEW_DAYS

MOST = 5            # more at once help nobody
FEW_BYTES = 2 << 30
_LOADED = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)\s*GB")
_AS_BEFORE = t("The release, the settings and the keys are as before.")


def derive(scene: Scene) -> list[Trouble]:
    found = [*_nothing(scene), *_gpu(scene), *_medium(scene), *_service(scene), *_certificate(scene), *_disk(scene)]
    return sorted(found, key=lambda each: not each.stops)[:MOST]


def _nothing(scene: Scene) -> Iterator[Trouble]:
    if scene.status is None or scene.status["state"] == "not-installed":
        yield Trouble(
            "nothing-installed", t("nothing is installed"), t("No release is installed here."),
            t("The checklist was not started, or has not reached the step Install."),
            actions=(Action(t("Open the checklist; it leads from the GPU to the pilot."), f"atoll setup{scene.where}"),
                     Action(t("The same steps without screens"), f"atoll checklist show{scene.where}")),
            stops=False,
        )  # fmt: skip


def _gpu(scene: Scene) -> Iterator[Trouble]:
    for record in scene.gpu:
        yield of_check(record, scene.where, installed=bool(scene.status))


def of_check(record: CheckRecord, where: str = "", *, installed: bool = False) -> Trouble:
    """A GPU check that failed."""
    said = f"{record.observed} {record.evidence}".lower()
    version = record.id == "driver" or "mismatch" in said or record.evidence == "/proc/driver/nvidia/version"
    name, title = ("driver-mismatch", t("the GPU driver does not match")) if version else (
        "no-gpu", t("no GPU can be used"))  # fmt: skip
    return Trouble(
        name, title, t("{check}: {seen}", check=record.title, seen=record.observed), record.why,
        _AS_BEFORE if installed else t("Nothing was installed or changed."),
        (Action(record.fix, record.command), Action(t("Then look again"), f"atoll preflight{where}")),
        (record.evidence,) if record.evidence else (), stops=installed or name == "driver-mismatch",
    )  # fmt: skip


def _medium(scene: Scene) -> Iterator[Trouble]:
    if scene.media:
        yield Trouble(
            "medium-missing", t("the medium is not there"),
            t("There is nothing at {path}.", path=joined(map(str, scene.media))),
            t("The medium was taken out, or is mounted somewhere else."),
            t("The installed service runs without the medium."), _medium_actions(scene.where), stops=False,
        )  # fmt: skip


def _medium_actions(where: str) -> tuple[Action, ...]:
    return (
        Action(t("Insert it and see where it is mounted"), "lsblk -o NAME,SIZE,LABEL,MOUNTPOINTS"),
        Action(t("Mount it, read-only"), "mount -o ro /dev/sdX1 /media/usb"),
        Action(t("Then name that place at the start (key 0) and run the step again"), f"atoll setup{where}"),
    )


def _service(scene: Scene) -> Iterator[Trouble]:
    facts = scene.status or {"state": "not-installed"}
    if facts["state"] not in ("draining", "starting", "failed", "stopped"):
        return
    where, service = scene.where, facts["service"]
    if facts["state"] == "stopped":
        yield Trouble(
            "stopped", t("the service is stopped"), t("The service is installed but not running."),
            t("Somebody stopped it: a crash would be reported as one."), _AS_BEFORE,
            (Action(t("Start it"), f"atoll start{where}"),),
        )  # fmt: skip
    elif facts["state"] == "draining":
        yield Trouble(
            "draining", t("the service is draining"), t("New requests are refused, running ones may finish."),
            t("Somebody requested it, to let running requests finish before maintenance."), _AS_BEFORE,
            (Action(t("Accept requests again"), f"atoll drain --off{where}"),),
        )  # fmt: skip
    elif facts["state"] == "starting" and not service["restarts"]:
        yield loading(facts["health"]["said"], where)
    else:
        yield _failed(scene)


def loading(said: str, where: str = "") -> Trouble:
    """An engine that is loading. `said`: its own progress report ("chat weights 12.10/60.30 GB")."""
    found = _LOADED.search(said)
    progress = None
    if found and float(found[2]) > 0:
        progress = min(1.0, float(found[1]) / float(found[2]))
    return Trouble(
        "engine-loading", t("the engine is loading"),
        t("The service is starting and not ready yet: {said}.", said=said),
        t("A model of tens of GB takes minutes from a slow disk; the first start also compiles kernels."), _AS_BEFORE,
        (Action(t("Wait. If the number does not change for 10 minutes, read the log"), f"atoll logs{where}"),),
        progress=progress,
    )  # fmt: skip


def _failed(scene: Scene) -> Trouble:
    assert scene.status is not None
    service = scene.status["service"]
    happened = t("The service has ended, and nothing is known about its exit.")
    if service["restarts"]:
        happened = t("The service ended while it started, and was restarted {count} times.", count=service["restarts"])
    elif service["last_exit"] is not None:
        happened = t("The service has ended (exit status {code}).", code=service["last_exit"])
    cause, actions = causes.of_log(scene)
    return Trouble(
        "engine-failed", t("the service does not start"), happened, cause, _AS_BEFORE,
        (*actions, Action(t("Read the whole log"), f"atoll logs{scene.where}")),
        tuple(causes.evidence(scene.log_tail)),
    )  # fmt: skip


def _certificate(scene: Scene) -> Iterator[Trouble]:
    facts = (scene.status or {}).get("certificate")
    if not facts or facts["days_left"] >= RENEW_DAYS:
        return
    days, local, over = facts["days_left"], facts["source"] == "local", facts["days_left"] < 0
    happened = t("The certificate ends in {days} days, at {at}.", days=days, at=facts["not_after"])
    if over:
        happened = t("The certificate expired at {at}: clients refuse it.", at=facts["not_after"])
    renew = Action(t("Renew it; the clients know its authority already"), f"atoll tls renew{scene.where}")
    if not local:
        renew = Action(t("Ask your authority for a new one and import it"),
                       f"atoll tls import --cert FILE --key FILE{scene.where}")
    yield Trouble(
        "certificate-expiring", t("the certificate has expired") if over else t("the certificate ends soon"), happened,
        t("Certificates expire, and nobody has renewed this one."), t("Until it expires, everything works as before."),
        (renew, Action(t("Look at it"), f"atoll tls show{scene.where}")), stops=over,
    )  # fmt: skip


def _disk(scene: Scene) -> Iterator[Trouble]:
    facts = (scene.status or {}).get("disk")
    if facts and facts["free_bytes"] < FEW_BYTES:
        where = str(scene.status["prefix"]) if scene.status else "/"
        yield disk_full(t("Only {free} GiB are free below {path}.", free=f"{facts['free_bytes'] / 2**30:.1f}",
                          path=where), where, stops=facts["free_bytes"] < FEW_BYTES // 16)  # fmt: skip


def disk_full(happened: str, where: str, *, stops: bool = True) -> Trouble:
    return Trouble(
        "disk-full", t("the disk is nearly full"), happened,
        t("Logs, older releases or other programs' files take the space."),
        t("The installation is intact. No file is left half written on a full disk."),
        (Action(t("See what takes the space"), f"du -xh --max-depth=2 {where} | sort -h | tail"),
         Action(t("The journal of the system often takes several GB"), "journalctl --vacuum-size=500M"),
         Action(t("Then run the same step again; it continues from there"))),
        (f"df -h {where}",), stops=stops,
    )  # fmt: skip


def of_error(error: InstallError, scene: Scene | None = None) -> Trouble | None:
    """The trouble behind an error that work ended with, where there is more to say than the error says itself."""
    where = scene.where if scene else ""
    why = f"{error.message} {error.why}"
    if error.exit_code == ExitCode.MEDIA:
        return Trouble(
            "medium-missing", t("the medium is not there"), error.message,
            error.why or t("The medium was taken out, or is mounted somewhere else."),
            error.changed or t("Nothing was changed."), _medium_actions(where), stops=True,
        )  # fmt: skip
    if error.exit_code == ExitCode.IO and (os.strerror(errno.ENOSPC) in why or "disk is full" in why):
        return disk_full(error.message, "/")
    if error.exit_code in (ExitCode.UNHEALTHY, ExitCode.ROLLBACK_FAILED):
        told = Scene(where=where, holders=scene.holders if scene else (),
                     log_tail=tuple(error.log_tail) or (scene.log_tail if scene else ()),
                     error_id=error.error_id, port=scene.port if scene else None)  # fmt: skip
        cause, actions = causes.of_log(told)
        hint = (Action(error.hint),) if error.hint else ()
        return Trouble(
            "engine-failed", t("the service does not start"), error.message, cause or error.why,
            error.changed or _AS_BEFORE, (*actions, *hint, Action(t("Read the whole log"), f"atoll logs{told.where}")),
            tuple(causes.evidence(told.log_tail)),
        )  # fmt: skip
    return None
