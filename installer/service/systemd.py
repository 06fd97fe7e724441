"""The service of a server installation: the interface of installer/service/manager.py on top of systemctl.

Every call has a time limit, and a failure carries systemd's reason and the end of the unit's journal. If the layout's
root is not the running system (a tree seen from outside), files are enabled and nothing is started.
"""

import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.service import model_reload, units
from installer.service.log_file import error_id
from installer.service.manager import ServiceState, Switched, stop_and_start
from installer.service.systemctl import Runner, journal, parse_show, run
from installer.service.unit_properties import PROPERTIES, UP, is_queued, service_state

_START_SECONDS = 30.0    # for systemd to accept the jobs; loading goes on after that
_STOP_SECONDS = 180.0    # above TimeoutStopSec= of all units, one after another
_RELOAD_SECONDS = 60.0
_WARM_SECONDS = 120.0    # to read the code of a release from a cold disk
_RECALL_SECONDS = 10.0
_POLL_SECONDS = 0.05
# The engines' slice, its parent, and the slice of releases before atoll-engines.slice. systemd creates the last two by
# itself, and keeps all three when they are empty.
_SLICES = (units.ENGINES, "atoll.slice", r"system-atoll\x2dengine.slice")


class SystemdService:
    """The units of one server."""

    def __init__(self, layout: Layout, runner: Runner = run) -> None:
        self.layout = layout
        self._run = runner
        self.booted = layout.prefix == Path("/") and Path("/run/systemd/system").is_dir()
        """Whether this root is the one that runs: only then are there services to start or ask."""

    # -- what is installed

    def models(self) -> list[str]:
        """Instances that start at boot, from the links that `enable` made: correct even if systemd is not running."""
        wanted = self.layout.units / f"{units.TARGET}.wants"
        return sorted(name[1] for link in wanted.glob("atoll-engine@*.service")
                      if (name := re.fullmatch(r"atoll-engine@(.+)\.service", link.name)))  # fmt: skip

    def apply_units(self, models: Sequence[str]) -> None:
        """Take over changed unit files: make users and directories, reload, enable exactly these instances."""
        root = [] if self.booted else [f"--root={self.layout.prefix}"]
        users = self.layout.sysusers.name  # by name: even with --root, a path would be one of the running system
        self._do(["systemd-sysusers", *root, users], t("create the services' users"))
        if self.booted:
            self._do(["systemd-tmpfiles", "--create", self._inside(self.layout.tmpfiles)], "create /run/atoll")
            self._systemctl(["daemon-reload"], t("read the new units"))
        gone = [units.engine_unit(model) for model in self.models() if model not in models]
        if gone:
            self.stop([model for model in self.models() if model not in models])
            self._systemctl(["disable", "--quiet", *root, *gone], t("disable the engines that were removed"))
        wanted = units.enabled(models)
        if not self._installed(units.SAMPLER):  # rollback to a release from before it
            wanted.remove(units.SAMPLER)
            fs.remove_file(self.layout.units / f"{units.TARGET}.wants" / units.SAMPLER)
            if self.booted:
                self._run(["systemctl", "stop", units.SAMPLER], 30.0)
        self._systemctl(["enable", "--quiet", *root, *wanted], t("enable the services"))
        if self.booted:
            self._systemctl(["start", "--no-block", units.TIMER], t("start the weekly verification"))

    def remove_units(self) -> None:
        """Stop and disable everything, before the unit files are removed."""
        self.stop()
        root = [] if self.booted else [f"--root={self.layout.prefix}"]
        known = [name for name in units.enabled(self.models()) if self._installed(name)]
        if self.booted:
            rest = self._loaded(units.TIMER, units.VERIFY, units.GPU_READY, units.SETTLE, units.SAMPLER)
            self._systemctl(["stop", *rest], t("stop the remaining units"), timeout=_STOP_SECONDS)
            self._run(["systemctl", "stop", *_SLICES], 30.0)  # fails if one does not exist, and stops the others
        if known:
            self._systemctl(["disable", "--quiet", *root, *known], t("disable the services"))

    def reload(self) -> None:
        """Make systemd forget unit files that no longer exist."""
        if self.booted:
            self._systemctl(["daemon-reload"], t("forget the units"))
            self._run(["systemctl", "reset-failed", "atoll*"], 30.0)  # fails if there is nothing to forget

    def remove_users(self) -> None:
        """Remove the users and the group that `apply_units` made."""
        root = [] if self.layout.prefix == Path("/") else ["--root", str(self.layout.prefix)]
        names = {file: _names(self.layout.prefix / "etc" / file) for file in ("passwd", "group")}
        for user in units.USERS:
            if user in names["passwd"]:
                self._do(["userdel", *root, user], t("remove the user {user}", user=user))
        left = _names(self.layout.prefix / "etc/group")  # userdel takes a group of the same name with it
        for group in (units.GROUP, *units.USERS):
            if group in left:
                self._do(["groupdel", *root, group], t("remove the group {group}", group=group))

    # -- what runs

    def start(self) -> None:
        """Start whatever of the installed units does not run. Returns when systemd has accepted the jobs, not when it
        is ready."""
        if not self.booted:
            return
        self._run(["systemctl", "reset-failed", units.SOCKET], 30.0)
        self._systemctl(["start", units.SOCKET], t("open the port"), units.SOCKET, timeout=_START_SECONDS)
        self._begin([units.SOCKET, units.TARGET, units.GATEWAY, *map(units.engine_unit, self.models())])
        self._begin_sampler()

    def stop(self, names: Collection[str] | None = None) -> bool:
        """Stop everything, the port too, or only these parts (instances, "gateway"); whether anything ran."""
        if not self.booted:
            return False
        if names is None:
            wanted = [units.SOCKET, units.TARGET, units.GATEWAY, *self._engines()]
        else:
            wanted = [units.GATEWAY if name == "gateway" else units.engine_unit(name) for name in sorted(names)]
        wanted = self._loaded(*wanted)
        ran = any(facts["ActiveState"] in UP for facts in self._show(wanted).values())
        if wanted:
            self._systemctl(["stop", *wanted], t("stop the services"), *wanted, timeout=_STOP_SECONDS)
        return ran

    def restart(self, names: Collection[str]) -> None:
        """Restart these parts (instances, "gateway"); the port stays open meanwhile."""
        self.stop(names)
        self.start()

    def reopen(self) -> None:
        """The address has changed: open the port there. Does not wait."""
        if self.booted:
            self._systemctl(["try-restart", "--no-block", units.SOCKET], t("open the port"), units.SOCKET)

    def switch(self, names: Collection[str] | None, timeout: float, *, hand_over: bool = True) -> Switched:
        """Running engines hand over to successors that have everything ready but the device (the engine's ExecReload=).
        Meanwhile the gateway restarts, and its clients wait at the socket."""
        if not self.booted:
            return stop_and_start(self, names)
        heirs = self._heirs(names) if hand_over else set[str]()
        self._warm({"gateway", *self.models()} - heirs if names is None else set(names) - heirs)
        if names is None or not heirs:
            return stop_and_start(self, names)
        began = time.monotonic()
        silent_from, old = self._take_over(heirs, timeout)
        rest = set(names) - heirs
        self.stop(rest)
        # Not the target: starting a unit that still takes over would be merged into a second reload of it.
        self._begin([units.GATEWAY])
        self._begin_sampler()
        self._await_end(old)  # a new engine may need the GPU memory that the old ones held
        if fresh := [units.engine_unit(model) for model in self.models() if model not in heirs]:
            self._begin(fresh)
        return Switched(silent_from, began)

    def reload_keys(self) -> None:
        """API keys, the certificate or its key have changed: the gateway uses them when this returns."""
        if self.booted and self._show([units.GATEWAY])[units.GATEWAY]["ActiveState"] in UP:
            self._systemctl(["reload", units.GATEWAY], t("have the gateway read the changed keys"), units.GATEWAY,
                            timeout=_RELOAD_SECONDS)  # fmt: skip

    def reload_models(self, drain: float) -> bool:
        if not self.booted or self._show([units.GATEWAY])[units.GATEWAY]["ActiveState"] not in UP:
            return False
        return model_reload.reload_models(self.layout, drain)

    def state(self) -> ServiceState:
        """All parts as one: the worst phase, the restarts of all, the exit status of what failed."""
        parts = self.instance_states()
        if self._installed(units.GPU_READY):  # without it no engine starts, and none would say why
            parts["gpu-ready"] = service_state(self._show([units.GPU_READY])[units.GPU_READY], None)
        phases = [part.phase for part in parts.values()]
        for phase in ("failed", "restarting", "running"):
            if phase in phases:
                break
        else:
            phase = "stopped"
        told = next((part for part in parts.values() if part.phase == phase), ServiceState("stopped"))
        return ServiceState(
            phase=phase,
            pid=parts["gateway"].pid,
            release=self._release() if phase in ("running", "restarting") else None,
            since=max((part.since or 0.0 for part in parts.values()), default=0.0) or None,
            restarts=sum(part.restarts for part in parts.values()),
            last_exit=told.last_exit,
        )

    def instance_states(self) -> dict[str, ServiceState]:
        """Each engine by its model's name, and "gateway"."""
        names = {"gateway": units.GATEWAY, **{model: units.engine_unit(model) for model in self.models()}}
        shown = self._show(names.values())
        return {name: service_state(shown[unit], self._release()) for name, unit in names.items()}

    def serving(self) -> dict[str, str]:
        """The identifier is the start of the unit plus its main process: a reload passes the same start on to another
        process."""
        names = {units.GATEWAY: "gateway", **{units.engine_unit(model): model for model in self.models()}}
        shown = self._show(names).items()
        return {names[unit]: f"{facts['InvocationID']}/{facts['MainPID']}"
                for unit, facts in shown if facts["ActiveState"] == "active" and not is_queued(facts)}

    def is_ready(self, name: str) -> bool:
        """An engine that has produced a token, or a gateway whose port answers: their units report it themselves."""
        unit = units.GATEWAY if name == "gateway" else units.engine_unit(name)
        return self._show([unit])[unit]["ActiveState"] == "active"

    def status_text(self, name: str) -> str:
        """The status text of a unit, such as "weights 12.10/60.30 GB"."""
        unit = units.GATEWAY if name == "gateway" else units.engine_unit(name)
        return self._show([unit])[unit]["StatusText"]

    def pids(self) -> frozenset[int]:
        """Every live process of the service, including process 1 while it holds our port."""
        wanted = [units.GATEWAY, *self._engines(), units.SOCKET] if self.booted else []
        found: set[int] = set()
        for unit, facts in self._show(wanted).items():
            if unit == units.SOCKET:
                found |= {1} if facts["ActiveState"] == "active" else set()
                continue
            found |= _processes(facts["ControlGroup"])
            found |= {int(facts["MainPID"])} - {0}
        return frozenset(found)

    def log_tail(self, lines: int) -> list[str]:
        if not self.booted:
            return []
        return journal(self._run, ["atoll-engine@*.service", units.GATEWAY, units.SOCKET, units.GPU_READY], lines)

    # -- inside

    def _begin(self, names: Sequence[str]) -> None:
        self._run(["systemctl", "reset-failed", *names], 30.0)  # the limit on restarts is not for operators
        self._systemctl(["start", "--no-block", *names], t("start the services"), timeout=_START_SECONDS)

    def _begin_sampler(self) -> None:
        """Start the sampler with the current code. The service does not depend on its history, so a failure is
        ignored."""
        if self._installed(units.SAMPLER):
            self._run(["systemctl", "restart", "--no-block", units.SAMPLER], 30.0)

    def _heirs(self, names: Collection[str] | None) -> set[str]:
        """Those of these engines that are running and whose units support a handover."""
        wanted = {units.engine_unit(name): name for name in names or () if name in self.models()}
        shown = self._show(wanted)
        return {name for unit, name in wanted.items()
                if shown[unit]["ActiveState"] == "active" and shown[unit].get("CanReload") == "yes"}

    def _warm(self, names: Collection[str]) -> None:
        """Read the files that these will read at their start, while the old ones serve: a cold disk costs seconds.

        This does not judge whether they would start. A release without --check exits at once, which does no harm.
        """
        for name in sorted(names):
            words = ["gateway"] if name == "gateway" else ["engine", "--model", name]
            self._run([str(self.layout.current / "bin/atoll"), *words, "--config", str(self.layout.config), "--check"],
                      _WARM_SECONDS)  # fmt: skip

    def _take_over(self, names: Collection[str], timeout: float) -> tuple[float, set[int]]:
        """Wait until every one of these engines has a new main process. Returns since when the first may have had it,
        and the old processes.

        Raises InstallError (40) if a successor could not be prepared; the old engine keeps serving.
        """
        old = {unit: facts["MainPID"] for unit, facts in self._show([units.engine_unit(n) for n in names]).items()}
        end = time.monotonic() + timeout
        self._systemctl(["reload", "--no-block", *sorted(old)], t("have new engines take over"), *sorted(old))
        pending, silent_from = set(old), None
        last = now = time.monotonic()
        while pending:
            last, now = now, time.monotonic()
            for unit, facts in self._show(sorted(pending)).items():
                if facts["MainPID"] != old[unit] or facts["ActiveState"] not in ("active", "reloading"):
                    pending.discard(unit)
                    silent_from = silent_from or last
                elif facts["ActiveState"] == "active" and not is_queued(facts):
                    raise self._not_prepared(unit, pending)
            if pending and now > end:
                raise self._not_prepared(min(pending), pending)
            time.sleep(_POLL_SECONDS if pending else 0)
        return silent_from or now, {int(pid) for pid in old.values()}

    def _not_prepared(self, unit: str, pending: Collection[str]) -> InstallError:
        self._recall(pending)
        lines = journal(self._run, [unit], 20)
        return InstallError(
            t("The new {unit} could not prepare to take over.", unit=unit),
            exit_code=ExitCode.UNHEALTHY,
            hint=t("The whole log: {command}", command=f"journalctl -b -u {unit}"),
            log_tail=lines,
            error_id=error_id(lines),
        )

    def _recall(self, names: Collection[str]) -> None:
        """End successors that are still preparing: none may take over once the rollback has begun."""
        # --kill-whom= exists since systemd 252, which accepts the older spelling too.
        self._run(["systemctl", "kill", "--kill-who=control", "--signal=KILL", *sorted(names)], 30.0)
        end = time.monotonic() + _RECALL_SECONDS
        while any(facts["ActiveState"] == "reloading" or is_queued(facts) for facts in self._show(names).values()):
            if time.monotonic() > end:
                break  # then it is not counted as serving, and is stopped
            time.sleep(_POLL_SECONDS)

    def _await_end(self, pids: Collection[int]) -> None:
        """Wait until the engines that handed over have finished their last answers and are gone."""
        end = time.monotonic() + _STOP_SECONDS
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
            time.sleep(0.01)

    def _release(self) -> str | None:
        current = self.layout.current
        return Path(current.readlink()).name if current.is_symlink() else None

    def _inside(self, path: Path) -> str:
        return str(Path("/") / path.relative_to(self.layout.prefix))

    def _installed(self, unit: str) -> bool:
        name = re.sub(r"@.+\.", "@.", unit)
        return (self.layout.units / name).exists()

    def _engines(self) -> list[str]:
        """Units of every engine that systemd knows, including one that was disabled while it ran."""
        words = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "atoll-engine@*.service"]
        listed = self._run(words, 30.0)
        known = {line.split()[0] for line in listed.out.splitlines() if line.strip()}
        return sorted(known | {units.engine_unit(model) for model in self.models()})

    def _loaded(self, *names: str) -> list[str]:
        """Those that systemd has a file for or that still run: stopping any other would be an error."""
        shown = self._show(names)
        return [name for name in names
                if shown[name]["LoadState"] == "loaded" or shown[name]["ActiveState"] in UP]

    def _show(self, names: Collection[str]) -> Mapping[str, dict[str, str]]:
        """Properties of each unit; units that systemd does not know count as inactive."""
        unknown = {**dict.fromkeys(PROPERTIES, ""), "ActiveState": "inactive", "MainPID": "0", "NRestarts": "0"}
        if not names or not self.booted:
            return {name: {**unknown, "Id": name} for name in names}
        done = self._run(["systemctl", "show", "--timestamp=unix", f"--property={','.join(PROPERTIES)}", *names], 30.0)
        shown = parse_show(done.out)
        return {name: {**unknown, **shown.get(name, {})} for name in names}

    def _systemctl(self, words: Sequence[str], action: str, *about: str, timeout: float = 60.0) -> None:
        self._do(["systemctl", "--no-ask-password", *words], action, *about, timeout=timeout)

    def _do(self, words: Sequence[str], action: str, *about: str, timeout: float = 60.0) -> None:
        """Run it. Raises InstallError with its output and the journal of the units concerned."""
        done = self._run(words, timeout)
        if done.code == 0:
            return
        if done.code is None:
            said = t("it had not ended after {timeout:.0f} s", timeout=timeout)
        else:
            said = " ".join(done.err.split()) or t("exit status {code}", code=done.code)
        lines = journal(self._run, about or ["atoll*"], 20) if self.booted else []
        raise InstallError(
            t("Could not {action}: {said}", action=action, said=said),
            exit_code=ExitCode.UNHEALTHY,
            why=t("The command was: {command}", command=" ".join(words)),
            hint=t("The whole log: {command}", command=f"journalctl -b -u {about[0] if about else 'atoll*'}"),
            log_tail=lines,
            error_id=error_id(lines),
        )


def _processes(group: str) -> set[int]:
    """Processes of a control group and of the groups below it."""
    found: set[int] = set()
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/systemd")):
        if group not in ("", "/") and (root / group.lstrip("/")).is_dir():
            for file in (root / group.lstrip("/")).rglob("cgroup.procs"):
                try:
                    found |= {int(word) for word in file.read_text().split()}
                except (OSError, ValueError):  # it ended in the meantime
                    continue
    return found


def _names(path: Path) -> set[str]:
    """First fields of passwd or group."""
    try:
        return {line.partition(":")[0] for line in path.read_text(errors="replace").splitlines()}
    except OSError:
        return set()
