"""Is there a GPU, does its driver answer, and can it run what the bundle brings?"""

import re

from installer.base.i18n import joined, t
from installer.gpu import Gpu, GpuFacts
from installer.preflight.record import PreflightContext, Seen, check, gpu_check

CAPABILITY_MIN = (8, 0)     # Ampere: bfloat16, and the oldest that the kernels are written for
CAPABILITY_TRIED = (12, 1)  # the newest that the kernels are compiled for
# CUDA major → the oldest driver branch that runs it (docs.nvidia.com/deploy/cuda-compatibility).
_DRIVER_FLOORS = {11: 450, 12: 525, 13: 580}
_CPU_INSTEAD = t("To run without a GPU, choose the CPU: --device cpu.")


def selected(context: PreflightContext, facts: GpuFacts) -> tuple[Gpu, ...]:
    """The GPUs that the models are assigned to; all of them if nothing is assigned."""
    wanted = {choice for need in context.needs for choice in need.gpus} | set(context.gpus)
    return tuple(gpu for gpu in facts.gpus if not wanted or any(is_named(gpu, choice) for choice in wanted))


def is_named(gpu: Gpu, choice: str | int) -> bool:
    """Whether an operator's index or UUID (or the beginning of one) means this GPU."""
    text = str(choice)
    return str(gpu.index) == text or bool(gpu.uuid and len(text) >= 8 and gpu.uuid.startswith(text))


@check(
    5, "gpu", t("GPU on the PCI bus"), strict=True, timeout=9.0,
    required=t("at least one NVIDIA GPU"), why=t("The models run on it."),
)  # fmt: skip
def gpu(context: PreflightContext) -> Seen:
    """Reads the PCI bus, so that a GPU without a driver is found too."""
    addresses = context.machine.gpu_addresses()
    reason = context.no_gpu_needed()
    if reason is not None:
        if addresses and context.device == "auto" and context.system:
            fix = t("Use the medium with the CUDA build, or choose the CPU on purpose: --device cpu.")
            return Seen("warn", t("{count} GPU, but {reason}", count=len(addresses), reason=reason), fix)
        return Seen("pass", reason)
    evidence = "/sys/bus/pci/devices: vendor 0x10de"
    facts = context.machine.gpus()
    if not addresses and not facts.gpus:
        fix = t("Check that the card is seated and powered; in a virtual machine, check the pass-through. {else_}",
                else_=_CPU_INSTEAD)  # fmt: skip
        return Seen("fail", t("no NVIDIA GPU"), fix, "lspci -d 10de:", evidence)
    observed = joined([gpu.label for gpu in facts.gpus] or addresses)
    if "nouveau" in context.machine.modules():
        fix = t("Block nouveau, install NVIDIA's driver and restart.")
        command = "echo 'blacklist nouveau' > /etc/modprobe.d/atoll-nouveau.conf && update-initramfs -u && reboot"
        why = t("nouveau holds the GPU, so NVIDIA's driver cannot use it.")
        return Seen("warn", t("{gpus}; nouveau is loaded", gpus=observed), fix, command, "/proc/modules", why=why)
    return Seen("pass", observed, evidence=evidence)


@gpu_check(
    6, "nvml", t("Driver answers"), strict=True,
    required=t("NVML answers; library and kernel module have the same version"),
    why=t("Without the driver there is no GPU, and the service would not start."),
)  # fmt: skip
def nvml(context: PreflightContext) -> Seen:
    """NVML first. nvidia-smi answers through NVML, so its answer proves the same."""
    facts, module = context.machine.gpus(), context.machine.kernel_driver()
    said = "; ".join(error for error in (facts.nvml_error, facts.smi_error) if error)
    evidence = said or "NVML"
    if facts.answered and not ("NVML" in facts.sources and facts.nvml_error):
        if module and facts.driver and module != facts.driver:
            return _mismatch(t("library {library}, kernel module {module}", library=facts.driver, module=module))
        sources = joined(facts.sources, " + ")
        return Seen("pass", t("driver {driver}, by {sources}", driver=facts.driver or "?", sources=sources),
                    evidence=evidence)  # fmt: skip
    if "mismatch" in said.lower():
        return _mismatch(said)
    if "no answer" in said:
        fix = t("Without persistence mode the driver initialises every GPU at each start, which takes seconds: enable "
                "it and run this again. If the check still fails, the driver hangs: look for Xid lines and restart the "
                "machine.")  # fmt: skip
        return Seen("fail", said, fix, "systemctl enable --now nvidia-persistenced; dmesg | grep -i xid", evidence)
    if not module:
        fix = t("Install NVIDIA's driver (R580 or newer) and restart. {else_}", else_=_CPU_INSTEAD)
        return Seen("fail", t("no NVIDIA driver is loaded ({said})", said=said), fix, "modprobe nvidia", evidence)
    fix = t("Look at the driver's messages, then restart the machine.")
    return Seen("fail", said or t("no GPU answered"), fix, "dmesg | grep -iE 'nvrm|xid'; reboot", evidence)


def _mismatch(said: str) -> Seen:
    fix = t("An update replaced the driver while the old one was running. Restart, then keep updates from doing it "
            "again.")
    command = "reboot  # then: apt-mark hold $(dpkg-query -Wf '${Package}\\n' 'nvidia-*' 'libnvidia-*')"
    return Seen("fail", said, fix, command, "/proc/driver/nvidia/version")


@gpu_check(
    7, "driver", t("Driver's age"), strict=True,
    required=t("580 for CUDA 13, 525 for CUDA 12"), why=t("An older driver cannot load the bundled CUDA libraries."),
)  # fmt: skip
def driver(context: PreflightContext) -> Seen:
    """The minimum follows from the CUDA build of the PyTorch that will run, and from the bundle's requirements."""
    facts, build = context.machine.gpus(), context.torch_build()
    version = facts.driver or context.machine.kernel_driver()
    cuda = build.cuda or _numbers(context.cuda) or (13, 0)
    floor = max((_DRIVER_FLOORS.get(cuda[0], max(_DRIVER_FLOORS.values())),), _numbers(context.driver_min) or (0,))
    needed = t("{floor} or newer, for {build}", floor=".".join(map(str, floor)), build=build.label)
    if build.cpu_only:
        fix = t("Use the medium with the CUDA build, or choose the CPU on purpose: --device cpu.")
        return Seen("fail", t("{build} cannot use a GPU", build=build.label), fix, evidence="torch/version.py",
                    required=t("a CUDA build of PyTorch"), why=t("This build runs on the CPU only."))  # fmt: skip
    if not version:
        return Seen("fail", t("unknown"), t("Install NVIDIA's driver and restart."), required=needed)
    speaks = f", CUDA {facts.cuda[0]}.{facts.cuda[1]}" if facts.cuda else ""
    evidence = "nvidia-smi --query-gpu=driver_version --format=csv"
    if tuple(map(int, version.split("."))) < floor:
        fix = t("Install driver {floor} or newer and restart.", floor=floor[0])
        command = f"apt-get install nvidia-driver-{floor[0]}-server"
        return Seen("fail", f"{version}{speaks}", fix, command, evidence, needed)
    asked = _numbers(context.cuda)
    if build.cuda and asked and build.cuda < asked:
        fix = t("Use a medium whose code has the newer CUDA, or ask the bundle's maker for one for this CUDA.")
        needed = t("CUDA {cuda} or newer, as the bundle requires", cuda=".".join(map(str, asked)))
        return Seen("fail", build.label, fix, evidence="torch/version.py", required=needed)
    if cuda[0] not in _DRIVER_FLOORS and not context.driver_min:
        fix = t("Ask the bundle's maker which driver it needs.")
        return Seen("warn", t("{version}; nothing is known about CUDA {cuda}", version=version, cuda=cuda[0]), fix)
    if build.cuda and facts.cuda and facts.cuda[0] == cuda[0] and facts.cuda < cuda:
        why = t("Code that the driver must compile (PTX) may be refused with error 222; the bundled kernels are not "
                "affected.")
        fix = t("Update the driver when you can.")
        needed = t("a driver for CUDA {cuda}", cuda=f"{cuda[0]}.{cuda[1]}")
        return Seen("warn", f"{version}{speaks}", fix, "nvidia-smi", evidence, needed, why)
    return Seen("pass", f"{version}{speaks}", evidence=evidence, required=needed)


@gpu_check(
    8, "compute-capability", t("Compute capability"),
    required=t("{least} or newer", least="8.0"), why=t("The kernels use features that older GPUs lack."),
)  # fmt: skip
def compute_capability(context: PreflightContext) -> Seen:
    """Every assigned GPU must be new enough. Different GPUs are reported, because they cannot share a model."""
    gpus = selected(context, context.machine.gpus())
    least = (_numbers(context.compute_cap) or CAPABILITY_MIN)[:2]
    needed = t("{least} or newer", least=".".join(map(str, least)))
    if not gpus:
        return Seen("fail", t("no GPU answered"), t("See the check '{id}'.", id="nvml"), required=needed)
    observed = joined([f"{gpu.label}: {'.'.join(map(str, gpu.compute_cap or ('?',)))}" for gpu in gpus])
    evidence = "nvidia-smi --query-gpu=compute_cap --format=csv"
    known = [gpu.compute_cap for gpu in gpus if gpu.compute_cap]
    chosen = bool(context.gpus or any(need.gpus for need in context.needs))
    if known and (any if chosen else all)(capability < least for capability in known):
        fix = t("Use a newer GPU (A100, L40S, H100, …), or another one for this model: gpus in the answers file.")
        return Seen("fail", observed, fix, evidence=evidence, required=needed)
    if len({gpu.name for gpu in gpus}) > 1:  # a small old card for the display is no reason to refuse
        best = max(gpus, key=lambda gpu: (gpu.compute_cap or (0, 0), gpu.memory_total or 0))
        fix = t("Give each model its GPU in the answers file: gpus = [\"{uuid}\"].", uuid=best.uuid or best.index)
        return Seen("warn", t("different GPUs: {gpus}", gpus=observed), fix, "nvidia-smi -L", evidence,
                    t("GPUs of one kind"), t("One model cannot be spread over different GPUs."))  # fmt: skip
    if len(known) < len(gpus):
        return Seen("warn", observed, t("Update the driver: it does not report "
                                        "this."), evidence=evidence, required=needed)
    if any(capability > CAPABILITY_TRIED for capability in known):
        fix = t("Run the self-test after the install.")
        why = t("The kernels were never tested on a GPU this new.")
        return Seen("warn", observed, fix, "atoll doctor", evidence, needed, why)
    return Seen("pass", observed, evidence=evidence, required=needed)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    """The first version number in what a vendor wrote: `>=580.65,<600` → (580, 65)."""
    found = re.search(r"\d{1,4}(?:\.\d{1,4}){0,3}", text or "")
    return tuple(map(int, found[0].split("."))) if found else None
