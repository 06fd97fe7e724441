"""Preflight: what must be true of this machine before anything is written to it. One check, one function.

A check inspects the machine and changes nothing. To add one, write a function with the decorator `@check` and name it
in CHECKS. All checks run side by side and are done within ten seconds, whatever hangs.
"""

from collections.abc import Mapping

from installer.preflight import compiler, gpu, gpu_state, host, network, read_speed, storage, surroundings
from installer.preflight.record import Check, CheckRecord, ModelNeed, PreflightContext
from installer.preflight.runner import judge, known_waivers, run_all

CHECKS: tuple[Check, ...] = (
    host.rights,
    host.cpu,
    host.systemd,
    host.glibc,
    gpu.gpu,
    gpu.nvml,
    gpu.driver,
    gpu.compute_capability,
    gpu_state.vram,
    gpu_state.gpu_health,
    gpu_state.gpu_modes,
    gpu_state.gpu_nodes,
    gpu_state.fabric_manager,
    host.memory,
    storage.disk,
    storage.filesystem,
    read_speed.read_speed,
    network.port,
    network.address,
    host.clock,
    network.hostname,
    surroundings.security_policy,
    compiler.compiler,
    network.egress,
    surroundings.conflicts,
    host.python,
    network.exposure,
)

GPU_CHECKS = ("gpu", "nvml", "driver", "compute-capability", "vram", "gpu-health", "gpu-modes", "gpu-nodes",
              "fabric-manager", "memory", "compiler")  # fmt: skip


def run_checks(context: PreflightContext, waivers: Mapping[str, str] | None = None) -> list[CheckRecord]:
    """Run every check. `waivers` maps a check's id or number to the operator's reason for continuing despite its
    failure."""
    return run_all(CHECKS, context, waivers)


def gpu_problems(context: PreflightContext) -> list[CheckRecord]:
    """What keeps the GPU of this machine from being used; empty if it can be used, or if there is none."""
    if context.no_gpu_needed() is not None:
        return []
    checks = [each for each in CHECKS if each.id in GPU_CHECKS]
    return [record for record in run_all(checks, context) if record.status == "fail"]


__all__ = [
    "CHECKS", "CheckRecord", "ModelNeed", "PreflightContext", "gpu_problems", "judge", "known_waivers", "run_checks",
]  # fmt: skip
