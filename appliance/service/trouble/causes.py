"""Why a service does not start: what its last log lines mean, and who holds what it needs."""

import re
from collections.abc import Iterable

from appliance.service.trouble.record import Action, Scene
from installer.base.errors import PORT_IN_USE
from installer.base.i18n import Text, joined, t

_MEMORY = re.compile(r"out of memory|GPU memory|memory (?:of the GPU )?is (?:in use|taken)|does not fit", re.IGNORECASE)
_PORT = re.compile(r"Cannot listen on (\S+?):(\d+)|Address already in use", re.IGNORECASE)
_DISK = re.compile(r"No space left|disk is full", re.IGNORECASE)
_DRIVER = re.compile(r"version mismatch|CUDA driver version is insufficient|no NVIDIA driver", re.IGNORECASE)
_WORDS = re.compile(r"^(?:error|critical|warning): ", re.IGNORECASE)
_LINES = 3
_LINE = 160
_GB = 10**9


def of_log(scene: Scene) -> tuple[str, tuple[Action, ...]]:
    """The likely cause, and what to do about it; the service's own words where nothing else is known."""
    log = "\n".join(scene.log_tail)
    start = f"atoll start{scene.where}"
    found, in_use = _PORT.search(log), scene.error_id == PORT_IN_USE
    if _MEMORY.search(log) and not in_use:
        return _memory(scene, start)
    if found or in_use:
        port = (found and found[2]) or scene.port or "PORT"
        return t("Another program listens on the port of the endpoint."), (
            Action(t("See which"), f"ss -ltnp 'sport = :{port}'"), Action(t("Stop it, then start the service"), start),
        )  # fmt: skip
    if _DISK.search(log):
        return t("The disk is full."), (
            Action(t("Free some space, then start the service"), f"df -h; {start}"),)  # fmt: skip
    if _DRIVER.search(log):
        return t("The GPU driver does not match this release."), (
            Action(t("See what the checks of the GPU say"), f"atoll preflight{scene.where}"),)  # fmt: skip
    if scene.holders:  # no known message, and another process is on the GPU: the usual reason
        return _memory(scene, start)
    again = Action(t("Start it again"), start)
    said = next(iter(evidence(scene.log_tail, 1)), "")
    if _is_error(said):
        return t("Its last message: {said}", said=said), (again,)
    return t("It left no error message: something killed it, often the kernel for a lack of main memory."), (
        Action(t("See whether the kernel did"), "journalctl -k | grep -i 'killed process'"), again,
    )  # fmt: skip


def _memory(scene: Scene, start: str) -> tuple[Text, tuple[Action, ...]]:
    again = Action(t("Start with less memory: a shorter context or a smaller share of the GPU"),
                   f"atoll setup{scene.where}  # Tune")  # fmt: skip
    if not scene.holders:
        return t("The memory of the GPU is not enough for these settings."), (again, Action(t("Start it again"), start))
    most = sorted(scene.holders, key=lambda each: -each.used)[:3]
    held = joined([t("{who} holds {size} GB of {gpu}", who=each.text, size=f"{each.used / _GB:.1f}", gpu=each.gpu)
                   for each in most], "; ")  # fmt: skip
    return t("Another program holds memory of the GPU: {held}.", held=held), (
        Action(t("Ask its owner to stop it"), most[0].stop), Action(t("Then start the service"), start), again,
    )  # fmt: skip


def _is_error(line: str) -> bool:
    return bool(_WORDS.match(line)) or "Error" in line


def evidence(lines: Iterable[str], most: int = _LINES) -> list[str]:
    """The last lines that report an error, or else the last lines."""
    known = [line.strip()[:_LINE] for line in lines if line.strip()]
    errors = [line for line in known if _is_error(line)]
    return (errors or known)[-most:]
