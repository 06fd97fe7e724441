"""Who a process belongs to: its name, and the unit or container that runs it."""

import re
from dataclasses import dataclass

from installer.base.i18n import Text, t
from installer.gpu.command import clean
from installer.preflight.machine import Machine

_CONTAINER = re.compile(r"(docker|libpod|cri-containerd|crio)[-/]([0-9a-f]{12})[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process as an operator knows it."""

    pid: int
    name: str
    unit: str = ""       # sshd.service, user@1000.service, …
    container: str = ""  # first twelve digits of its id

    @classmethod
    def of(cls, machine: Machine, pid: int, name: str = "") -> "Owner":
        """From /proc. A process that is gone, or in another container, keeps the name that was given."""
        comm = clean(machine.read(f"/proc/{pid}/comm"))
        group = machine.read(f"/proc/{pid}/cgroup")
        container = _CONTAINER.search(group)
        units = re.findall(r"([^/\n]+\.(?:service|scope))(?=[/\n]|$)", group)
        unit = "" if container or not units else clean(units[-1])
        return cls(pid, comm or clean(name) or "?", unit, container[2] if container else "")

    @property
    def text(self) -> Text:
        if self.container:
            return t("process {pid} ({name}) in container {id}", pid=self.pid, name=self.name, id=self.container)
        if self.unit:
            return t("process {pid} ({name}) of {unit}", pid=self.pid, name=self.name, unit=self.unit)
        return t("process {pid} ({name})", pid=self.pid, name=self.name)

    @property
    def stop_command(self) -> str:
        """The command that stops it for good; a killed process of a unit would be restarted."""
        if self.container:
            return f"docker stop {self.container}"
        if self.unit.endswith(".service") and not self.unit.startswith("user@"):
            return f"systemctl stop {self.unit}"
        return f"kill {self.pid}"
