"""No compiler is needed: the tools that compile the kernels come with the runtime, and must run on this machine."""

import errno
import importlib.util
import os
import sys
from itertools import islice
from pathlib import Path

from installer.base.i18n import t
from installer.gpu.command import run
from installer.preflight.record import PreflightContext, Seen, check
from installer.preflight.storage import mount_of
from installer.preflight.torch_build import MAX_FILES

_SECONDS = 4.0  # for a program of 50 MB on a cold disk
_DAMAGED = t("The installation is damaged: install it again.")


@check(
    23, "compiler", t("C compiler"),
    required=t("none needed: everything is prebuilt"),
    why=t("A closed server has no compiler; whatever is built must come with the runtime."), timeout=9.0,
)  # fmt: skip
def compiler(context: PreflightContext) -> Seen:
    """Triton compiles kernels with the assembler that it brings, and starts them through the driver: no C is built.

    So Triton for exactly this Python, and its assembler, must be there.
    """
    reason = context.no_gpu_needed()
    if reason is not None:
        return Seen("pass", reason)
    if context.torch_build().cpu_only:  # the driver's check reports it; there is nothing to compile
        return Seen("pass", t("not needed: this build of PyTorch runs on the CPU"))
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}"
    other = t("Use the Python that the runtime was built for, or another medium.")
    wheels = [path.name for path in islice(context.runtime.rglob("triton-*.whl"), MAX_FILES)] if context.runtime else []
    if wheels:
        evidence = ", ".join(wheels[:3])
        if any(f"-{abi}-" in name for name in wheels):
            return Seen("pass", t("not needed: Triton is prebuilt for {abi}", abi=abi), evidence=evidence)
        seen = t("Triton is prebuilt for another Python, this one is {abi}", abi=abi)
        return Seen("fail", seen, other, "sudo sh install.sh --python /path/to/python3", evidence)
    home = triton_home()
    if home is None:
        return Seen("fail", t("Triton is missing from the runtime"), other, "sudo sh install.sh", "triton")
    library, assemblers = home / "_C/libtriton.so", sorted((home / "backends/nvidia/bin").glob("ptxas*"))
    for part in [library, *(assemblers or [home / "backends/nvidia/bin/ptxas"])]:
        if not part.is_file():
            return Seen("fail", t("{part} is missing", part=part), _DAMAGED, "sudo sh install.sh", str(part))
    for program in assemblers:
        if (problem := _does_not_run(program)) is not None:
            return problem
    return Seen("pass", t("not needed: Triton brings its assembler"), evidence=f"{assemblers[0]} --version")


def _does_not_run(program: Path) -> Seen | None:
    """Whether the assembler starts here, and if not, what prevents it."""
    done = run([str(program), "--version"], _SECONDS)
    if done.ok and "ptx" in done.stdout.lower():
        return None
    evidence = f"{program} --version"
    if not program.stat().st_mode & 0o111:
        seen = t("{program} may not be executed", program=program)
        return Seen("fail", seen, t("Make it executable again."), f"chmod 0755 {program}", evidence)
    if os.statvfs(program).f_flag & os.ST_NOEXEC:
        mount = mount_of(program)
        where = mount.mountpoint if mount else str(program.parent)
        seen = t("{program} cannot be started: {where} is mounted noexec", program=program, where=where)
        return Seen("fail", seen, t("Mount it with exec."), f"mount -o remount,exec {where}", evidence)
    seen = t("{program} does not run: {said}", program=program, said=done.said)
    if done.problem == os.strerror(errno.EACCES):
        fix = t("A security policy forbids it: see the check '{id}'.", id="security-policy")
        return Seen("fail", seen, fix, evidence=evidence)
    if done.problem.startswith("no answer"):
        return Seen("fail", seen, t("Run it by hand; a disk that hangs shows in the kernel's log."), evidence, evidence)
    return Seen("fail", seen, _DAMAGED, "sudo sh install.sh", evidence)


def triton_home() -> Path | None:
    """The directory of the Triton that this interpreter would import. It is not imported."""
    try:
        spec = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None
