"""What is already here and could get in the way."""

import os
from pathlib import Path

import psutil

from installer.preflight.record import CheckRecord, PreflightContext

_OTHER_SERVERS = {"ollama", "vllm", "llama-server", "text-generation-launcher", "tritonserver"}


def leftovers(context: PreflightContext) -> CheckRecord:
    """Directories with our names that no journal of ours speaks of must not be taken over."""
    required = "no directories of an unknown installation"
    why = "Uninstall removes only what the journal says was made here."
    if context.layout.journal.exists():
        return CheckRecord("leftovers", "pass", "an installation with its journal", required, why, strict=True)
    foreign = [str(root) for root in context.layout.roots if root.is_dir() and has_files(root)]
    if not foreign:
        return CheckRecord("leftovers", "pass", "nothing", required, why, strict=True)
    fix = f"Move them away (mv {foreign[0]} {foreign[0]}.old), or choose another --prefix."
    observed = f"{', '.join(foreign)} without a journal"
    return CheckRecord("leftovers", "fail", observed, required, why, fix, "ls -la", strict=True)


def other_servers(context: PreflightContext) -> CheckRecord:
    """Other model servers compete for memory and accelerators."""
    found = sorted(
        {process.info["name"] for process in psutil.process_iter(["name"]) if process.info["name"] in _OTHER_SERVERS}
    )
    required = "no other model server running"
    why = "They would compete for memory and processors."
    if found:
        fix = f"Stop them if they are not needed: systemctl stop {found[0]}"
        return CheckRecord("other-servers", "warn", f"{', '.join(found)} is running", required, why, fix, "ps -e")
    return CheckRecord("other-servers", "pass", "none", required, why, evidence="ps -e")


def has_files(root: Path) -> bool:
    """Whether anything but empty directories is below: empty ones are what an uninstall may leave."""
    return any(files for _, _, files in os.walk(root))
