"""What else is on this machine: security policies, and things in the way."""

import os
import re
from pathlib import Path

import psutil

from installer.base.i18n import joined, t
from installer.preflight.owners import Owner
from installer.preflight.record import PreflightContext, Seen, check

_OTHER_SERVERS = {"ollama", "vllm", "llama-server", "text-generation-launcher", "text-generation-server",
                  "tritonserver", "sglang", "lmdeploy"}  # fmt: skip


@check(
    22, "security-policy", t("SELinux, AppArmor, fapolicyd"),
    required=t("nothing that forbids programs below {place}", place="/opt/atoll"),
    why=t("A policy that does not know Atoll stops it from starting."),
)  # fmt: skip
def security_policy(context: PreflightContext) -> Seen:
    """Which policies are enforced, and whether they know our directories."""
    machine, place = context.machine, str(context.layout.opt)
    if _fapolicyd(context):
        fix = t("Trust Atoll's files.")
        command = f"fapolicyd-cli --file add {place} --trust-file atoll && fapolicyd-cli --update"
        seen = t("fapolicyd is active and does not know {place}", place=place)
        return Seen("fail", seen, fix, command, "/etc/fapolicyd/{rules.d,trust.d}, fapolicyd.trust")
    enforce = machine.read("/sys/fs/selinux/enforce").strip()
    if enforce == "1":
        seen, why = t("SELinux enforces"), t("Files copied from a disk may keep a label that services may not read.")
        return Seen("warn", seen, t("Set the labels after the install."), f"restorecon -RF {place}",
                    "/sys/fs/selinux/enforce", why=why)  # fmt: skip
    found = [t("SELinux is permissive")] if enforce == "0" else []
    if machine.read("/sys/module/apparmor/parameters/enabled").strip() == "Y":
        found.append(t("AppArmor is on, without a profile for Atoll"))
    return Seen("pass", joined(found) or t("none"), evidence="/sys/fs/selinux, /sys/module/apparmor")


def _fapolicyd(context: PreflightContext) -> bool:
    """Whether fapolicyd runs, enforces, and has no rule or trusted file that names our directory."""
    machine = context.machine
    if not any(process.info["name"] == "fapolicyd" for process in psutil.process_iter(["name"])):
        return False
    if re.search(r"^\s*permissive\s*=\s*1", machine.read("/etc/fapolicyd/fapolicyd.conf"), re.MULTILINE):
        return False
    known = [machine.at("/etc/fapolicyd/fapolicyd.trust"), machine.at("/etc/fapolicyd/compiled.rules")]
    for directory in ("rules.d", "trust.d"):
        known += machine.at(f"/etc/fapolicyd/{directory}").glob("*")
    place = str(context.layout.opt)
    return not any(place in machine.read(f"/{path.relative_to(machine.root)}", 64 << 20) for path in known)


@check(
    25, "conflicts", t("Other installations and servers"),
    required=t("no unknown installation of Atoll, no other model server"),
    why=t("Uninstall removes only what the journal says was made here; other servers compete for the GPU."),
)  # fmt: skip
def conflicts(context: PreflightContext) -> Seen:
    """Our directories without our journal must not be taken over; other model servers compete for resources."""
    if not context.layout.journal.exists():
        unknown = [root for root in context.layout.roots if root.is_dir() and _is_strange(context, root)]
        if unknown:
            fix = t("Move it away, or choose another --prefix.")
            seen = t("{places} without a journal", places=", ".join(map(str, unknown)))
            return Seen("fail", seen, fix, f"mv {unknown[0]} {unknown[0]}.old", f"ls -la {unknown[0]}")
    found = _other_servers(context)
    if found:
        seen = joined([owner.text for owner in found[:6]], "; ")
        why = t("They would compete for memory and GPU.")
        fix = t("Stop it, if it is not needed.")
        return Seen("warn", seen, fix, found[0].stop_command, "ps -e; nvidia-smi", why=why)
    return Seen("pass", t("none"), evidence="ps -e")


def _other_servers(context: PreflightContext) -> list[Owner]:
    """Known model servers by name, and containers that hold GPU memory."""
    found: dict[int, Owner] = {}
    for process in psutil.process_iter(["name"]):
        if process.info["name"] in _OTHER_SERVERS and process.pid not in context.own_pids:
            found[process.pid] = Owner.of(context.machine, process.pid, process.info["name"])
    if context.no_gpu_needed() is None:
        for gpu in context.machine.gpus().gpus:
            for used in gpu.processes:
                owner = Owner.of(context.machine, used.pid, used.name)
                if owner.container and used.pid not in context.own_pids:
                    found[used.pid] = owner
    return list(found.values())


def _is_strange(context: PreflightContext, root: Path) -> bool:
    """Whether it holds more than what may be there without a journal: empty directories, which an uninstall may leave,
    code that install.sh unpacks, and the lock, if an install was cut off before it began its journal."""
    if root == context.layout.opt:
        return any(not child.is_dir() or _files(child) for child in root.iterdir() if child.name != "code")
    return bool(_files(root) - {context.layout.lock})


def _files(root: Path) -> set[Path]:
    """Everything below but directories."""
    return {Path(directory, name) for directory, _, names in os.walk(root) for name in names}
