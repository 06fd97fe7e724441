"""The state of the GPUs: memory, health, modes, device nodes, and the fabric that joins them."""

import os
import re
from collections.abc import Iterable

from installer.base.i18n import Text, joined, t
from installer.gpu import Gpu, GpuProcess
from installer.gpu.command import run
from installer.preflight.gpu import is_named, selected
from installer.preflight.host import tables_in_main_memory
from installer.preflight.machine import Machine
from installer.preflight.owners import Owner
from installer.preflight.record import ModelNeed, PreflightContext, Seen, gib, gpu_check

KV_LEAST = 1 << 30     # room for conversations: a tenth of the weights, at least this
FOREIGN = 0.05         # share of a GPU that others may hold without a warning
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
_XIDS_OF_PROGRAMS = {13, 31, 43, 45, 68, 69}  # caused by programs, not by the card
_SEE_NVML = t("See the check '{id}'.", id="nvml")


def _foreign(context: PreflightContext, gpu: Gpu) -> list[GpuProcess]:
    return [process for process in gpu.processes if process.pid not in context.own_pids]


def _free(context: PreflightContext, gpu: Gpu) -> int:
    """Free bytes, including what our running service will release."""
    total, ours = gpu.memory_total or 0, [p for p in gpu.processes if p.pid in context.own_pids]
    if any(p.used is None for p in ours):  # the driver does not say how much: everything that nobody else holds
        return total - sum(p.used or 0 for p in _foreign(context, gpu))
    return min((gpu.memory_free or 0) + sum(p.used or 0 for p in ours), total)


@gpu_check(
    9, "vram", t("GPU memory"), strict=True,
    required=t("room for weights and conversations"),
    why=t("A model that does not fit is not served, or only with short contexts."),
)  # fmt: skip
def vram(context: PreflightContext) -> Seen:
    """Compare each model with its GPUs together, or with the best one; models without assigned GPUs share the best
    one."""
    gpus = context.machine.gpus().gpus
    if not any(gpu.memory_total for gpu in gpus):
        return Seen("fail", t("no GPU reported its memory"), _SEE_NVML)
    groups: dict[tuple[str | int, ...], list[ModelNeed]] = {}
    for need in context.needs:
        groups.setdefault(tuple(need.gpus or context.gpus), []).append(need)
    seen = [_group(context, gpus, choices, needs) for choices, needs in groups.items()]
    order = ("fail", "warn", "pass")
    return min(seen, key=lambda one: order.index(one.status))


def _group(
    context: PreflightContext, gpus: tuple[Gpu, ...], choices: tuple[str | int, ...], needs: list[ModelNeed]
) -> Seen:
    missing = [choice for choice in choices if not any(is_named(gpu, choice) for gpu in gpus)]
    if missing:
        fix = t("Name GPUs that exist.")
        return Seen("fail", t("there is no GPU {name}", name=missing[0]), fix, "nvidia-smi -L")
    mine = [gpu for gpu in gpus if any(is_named(gpu, choice) for choice in choices)]
    mine = mine or [max(gpus, key=lambda gpu: (_free(context, gpu), gpu.memory_total or 0))]
    tables = tables_in_main_memory(needs, context.machine.memory()[0])
    weights = sum(need.weight_bytes for need in needs) - tables
    asked = sum(need.vram_gib or 0 for need in needs) << 30
    least = int(weights * 1.1)
    need = max(int((weights + max(weights // 10, KV_LEAST)) * 1.1), asked)
    total, free = sum(gpu.memory_total or 0 for gpu in mine), sum(_free(context, gpu) for gpu in mine)
    names = joined([gpu.label for gpu in mine])
    observed = t("{gpus}: {total} in all, {free} free", gpus=names, total=gib(total), free=gib(free))
    required = t("{need} free: weights, conversations and 10 %", need=gib(need))
    if tables:
        required = t("{need} free: weights without the {tables} in main memory, conversations and 10 %",
                     need=gib(need), tables=gib(tables))
    evidence = "nvidia-smi --query-gpu=memory.total,memory.free --format=csv"
    if total < max(least, asked):
        fix = t("Use a GPU with more memory, a smaller or a quantised model, or more GPUs for it.")
        required = t("{need} in all", need=gib(max(least, asked)))
        return Seen("fail", observed, fix, evidence=evidence, required=required)
    others = [(gpu, process) for gpu in mine for process in _foreign(context, gpu)]
    held = sum(process.used or 0 for _, process in others)
    unexplained = total - free - held  # of processes in other containers, whose names are hidden
    if held > FOREIGN * total or (others and free < need):
        return _held(context, observed, [process for _, process in others], required, evidence)
    if unexplained > FOREIGN * total:
        seen = t("{observed}; {used} held by processes that are not shown", observed=observed, used=gib(unexplained))
        fix = t("Find out who holds it; programs in containers may not be listed.")
        return Seen("warn", seen, fix, "fuser -v /dev/nvidia*", evidence, required)
    if free < need:
        fix = t("Expect short contexts or few conversations at once, or take a smaller model.")
        return Seen("warn", observed, fix, "atoll serve --help  # --max-model-len", evidence, required)
    return Seen("pass", observed, evidence=evidence, required=required)


def _held(context: PreflightContext, observed: Text, others: list[GpuProcess], required: Text, evidence: str) -> Seen:
    """The processes that hold memory, by name, largest first."""
    others = sorted(others, key=lambda process: -(process.used or 0))
    owners = {p.pid: Owner.of(context.machine, p.pid, p.name) for p in others}
    who = joined([t("{who} holds {used}", who=owners[p.pid].text, used=gib(p.used or 0)) for p in others[:6]], "; ")
    fix = t("Stop it, if it is not needed.")
    seen = t("{observed}; {who}", observed=observed, who=who)
    return Seen("warn", seen, fix, owners[others[0].pid].stop_command, evidence, required)


@gpu_check(
    10, "gpu-health", t("GPU health"),
    required=t("no memory errors, no Xid since the start"), why=t("A GPU with bad memory gives wrong answers, or "
                                                                  "stops."),
)  # fmt: skip
def gpu_health(context: PreflightContext) -> Seen:
    """ECC counters since the driver was loaded, remapped rows, and Xid lines of the kernel's log."""
    gpus = selected(context, context.machine.gpus())
    bad: list[Text] = []
    doubtful: list[Text] = []
    for gpu in gpus:
        if gpu.ecc_uncorrected:
            bad.append(t("{gpu}: {count} uncorrected memory errors", gpu=gpu.label, count=gpu.ecc_uncorrected))
        if gpu.remap_failed:
            bad.append(t("{gpu}: a bad row of memory could not be replaced", gpu=gpu.label))
        if gpu.ecc_corrected:
            doubtful.append(t("{gpu}: {count} corrected memory errors", gpu=gpu.label, count=gpu.ecc_corrected))
        if gpu.remap_pending:
            doubtful.append(t("{gpu}: a bad row of memory waits for a restart to be replaced", gpu=gpu.label))
    xids = xids_of(kernel_log(context.machine))
    doubtful += [t("Xid {code} on {pci}", code=code, pci=address) for address, code in sorted(xids)]
    command = "nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg | grep -i xid"
    evidence = "ECC, remapped rows, kernel log"
    if bad:
        fix = t("Restart. If the errors come back, have the GPU replaced; do not serve with it.")
        return Seen("fail", joined([*bad, *doubtful], "; "), fix, command, evidence)
    if doubtful:
        fix = t("Restart when you can, and watch whether it happens again.")
        return Seen("warn", joined(doubtful, "; "), fix, command, evidence)
    if not gpus:
        return Seen("warn", t("no GPU answered"), _SEE_NVML)
    if all(gpu.ecc is False for gpu in gpus):
        return Seen("pass", t("clean (ECC is off or not there)"), evidence=evidence)
    return Seen("pass", t("clean"), evidence=evidence)


def kernel_log(machine: Machine, most: int = 20_000) -> list[str]:
    """Lines since boot; empty for users who may not read them. Each read of /dev/kmsg returns one record."""
    lines: list[str] = []
    try:
        fd = os.open(machine.at("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return lines
    try:
        while len(lines) < most:
            try:
                record = os.read(fd, 8192)
            except BrokenPipeError:  # this record was overwritten in the meantime
                continue
            if not record:
                break
            lines += record.decode("utf-8", "replace").splitlines()
    except OSError:  # EAGAIN: that was the last one
        pass
    finally:
        os.close(fd)
    return lines


def xids_of(lines: Iterable[str]) -> set[tuple[str, int]]:
    """(PCI address, code) of errors of the card itself, not of a program on it."""
    found = {(m[1].lower(), int(m[2])) for line in lines if (m := _XID.search(line))}
    return {(address, code) for address, code in found if code not in _XIDS_OF_PROGRAMS}


@gpu_check(
    11, "gpu-modes", t("GPU modes"),
    required=t("MIG off, compute mode Default, persistence on, full PCIe width and power"),
    why=t("The engine needs whole GPUs that nobody else has claimed."),
)  # fmt: skip
def gpu_modes(context: PreflightContext) -> Seen:
    """Modes that an administrator may have set, and signs of a badly seated card."""
    hard: list[tuple[Text, str]] = []
    soft: list[tuple[Text, str]] = []
    gpus = selected(context, context.machine.gpus())
    for gpu in gpus:
        at, label = f"nvidia-smi -i {gpu.uuid or gpu.index}", gpu.label
        if gpu.mig:
            hard.append((t("{gpu}: MIG is on", gpu=label), f"{at} -mig 0"))
        taken = gpu.compute_mode == "exclusive" and _foreign(context, gpu)
        if gpu.compute_mode == "prohibited" or taken:
            what = t("{gpu}: compute mode {mode}, and in use", gpu=label, mode=gpu.compute_mode)
            hard.append((what if taken else t("{gpu}: compute mode prohibited", gpu=label), f"{at} -c DEFAULT"))
        elif gpu.compute_mode == "exclusive":
            soft.append((t("{gpu}: compute mode exclusive", gpu=label), f"{at} -c DEFAULT"))
        if gpu.persistence is False:
            soft.append((t("{gpu}: persistence is off", gpu=label), "systemctl enable --now nvidia-persistenced"))
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            what = t("{gpu}: PCIe x{now} instead of x{most}", gpu=label, now=gpu.pcie_width, most=gpu.pcie_width_max)
            soft.append((what, f"{at} -q -d PCIE  # seat the card anew, or use another slot"))
        if gpu.power_limit and gpu.power_default and gpu.power_limit < gpu.power_default - 0.5:
            what = t("{gpu}: power cap {now} W instead of {most} W", gpu=label, now=f"{gpu.power_limit:.0f}",
                     most=f"{gpu.power_default:.0f}")  # fmt: skip
            soft.append((what, f"{at} -pl {gpu.power_default:.0f}"))
    found = hard or soft
    if found:
        commands = "; ".join(dict.fromkeys(command for _, command in found))
        fix = t("Undo this setting when you can: it costs speed.")
        if hard:
            fix = t("Undo this setting. Changing MIG needs an idle GPU.")
        return Seen("fail" if hard else "warn", joined([what for what, _ in hard + soft], "; "), fix, commands,
                    "nvidia-smi -q")  # fmt: skip
    if not gpus:
        return Seen("warn", t("no GPU answered"), _SEE_NVML)
    return Seen("pass", t("as they should be"), evidence="nvidia-smi -q")


@gpu_check(
    12, "gpu-nodes", t("GPU device nodes"), strict=True,
    required="/dev/nvidiactl, /dev/nvidia0, /dev/nvidia-uvm: 0666",
    why=t("The engine opens them as its own user, which cannot create them."),
)  # fmt: skip
def gpu_nodes(context: PreflightContext) -> Seen:
    """The nodes that CUDA opens, and whether they will exist after the next boot."""
    gpus = selected(context, context.machine.gpus())
    minors = [gpu.minor if gpu.minor is not None else gpu.index or 0 for gpu in gpus] or [0]
    names = ["/dev/nvidiactl", *(f"/dev/nvidia{minor}" for minor in minors), "/dev/nvidia-uvm"]
    nodes = {name: context.machine.at(name) for name in names}
    make = "nvidia-modprobe -u -c0"
    evidence = "ls -l /dev/nvidia*"
    if missing := [name for name, path in nodes.items() if not path.exists()]:
        fix = t("Load the modules and make the nodes.")
        return Seen("fail", t("missing: {names}", names=", ".join(missing)), fix, make, evidence)
    if context.system:
        closed = [name for name, path in nodes.items() if path.stat().st_mode & 0o006 != 0o006]
    else:
        closed = [name for name, path in nodes.items() if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        fix = t("Let the driver make them with mode 0666, then restart.")
        command = "echo 'options nvidia NVreg_DeviceFileMode=0666' > /etc/modprobe.d/atoll-nodes.conf; reboot"
        return Seen("fail", t("not open to all: {names}", names=", ".join(closed)), fix, command, evidence)
    observed = ", ".join(names)
    if not _loaded_at_start(context.machine):
        if context.system:
            return Seen("pass", t("{names}; the install adds nvidia-uvm to modules-load.d", names=observed),
                        evidence=evidence)  # fmt: skip
        command = "echo nvidia-uvm > /etc/modules-load.d/nvidia-uvm.conf"
        why = t("After a reboot the node may be missing until some program creates it.")
        seen = t("{names}; nvidia-uvm is not in modules-load.d", names=observed)
        return Seen("warn", seen, t("Have it loaded at boot."), command, evidence, why=why)
    return Seen("pass", observed, evidence=evidence)


def _loaded_at_start(machine: Machine) -> bool:
    places = ("/etc/modules-load.d", "/run/modules-load.d", "/usr/lib/modules-load.d", "/lib/modules-load.d")
    files = [path for place in places for path in machine.at(place).glob("*.conf")]
    texts = [machine.read("/etc/modules"), *(path.read_text("utf-8", "replace") for path in files if path.is_file())]
    lines = {line.strip().replace("-", "_") for text in texts for line in text.splitlines()}
    return "nvidia_uvm" in lines


@gpu_check(
    13, "fabric-manager", t("Fabric manager"),
    required=t("on servers with NVSwitch: nvidia-fabricmanager active, of the driver's version"),
    why=t("Without it, CUDA does not start on GPUs that are joined by NVSwitch."),
)  # fmt: skip
def fabric_manager(context: PreflightContext) -> Seen:
    """Needed if NVSwitches are on the bus, or if a GPU reports that it waits for the fabric."""
    facts = context.machine.gpus()
    switches = [address for address, kind in context.machine.pci().items() if kind.startswith("0680")]
    waiting = [gpu.label for gpu in facts.gpus if (gpu.fabric_state or "").lower() in ("in progress", "not started")]
    if not switches and not waiting:
        return Seen("pass", t("not needed: no NVSwitch"), evidence="/sys/bus/pci/devices")
    start = "systemctl enable --now nvidia-fabricmanager"
    active = run(["systemctl", "is-active", "nvidia-fabricmanager"], 3).stdout.strip()
    if active != "active" or waiting:
        seen = t("{count} NVSwitch, nvidia-fabricmanager: {state}", count=len(switches), state=active or "?")
        return Seen("fail", seen, t("Start it; install it in the driver's version if it is missing."), start,
                    "systemctl is-active nvidia-fabricmanager")  # fmt: skip
    said = re.search(r"\d+\.\d+[.\d]*", run(["nv-fabricmanager", "--version"], 3).stdout)
    version = said[0].rstrip(".") if said else ""
    driver = facts.driver or context.machine.kernel_driver()
    if version and driver and version != driver:
        seen = t("fabric manager {version}, driver {driver}", version=version, driver=driver)
        fix = t("Install the fabric manager of exactly the driver's version.")
        return Seen("fail", seen, fix, f"apt-get install nvidia-fabricmanager-{driver.split('.')[0]}",
                    "nv-fabricmanager --version")  # fmt: skip
    return Seen("pass", t("active, version {version}", version=version or "?"), evidence="nv-fabricmanager --version")
