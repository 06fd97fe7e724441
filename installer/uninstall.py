"""Uninstall: by default everything that can be made again goes and everything that cannot stays; `purge` takes all.

Only what the journal says was made here is removed, and no symlink is ever followed on the way.
"""

from dataclasses import dataclass, field
from pathlib import Path

from installer import audit, fs
from installer.errors import ExitCode, InstallError, io_error
from installer.journal import History, Journal, replay
from installer.layout import Layout
from installer.lifecycle import history_of
from installer.lock import InstallLock
from installer.service import PrefixService, ServiceManager


@dataclass(slots=True)
class UninstallPlan:
    """What goes and what stays, with the bytes of each."""

    purge: bool
    remove: list[tuple[Path, int]] = field(default_factory=list)
    keep: list[tuple[Path, int]] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return {
            "purge": self.purge,
            "remove": [{"path": str(path), "bytes": size} for path, size in self.remove],
            "keep": [{"path": str(path), "bytes": size} for path, size in self.keep],
        }


def plan_uninstall(layout: Layout, *, purge: bool) -> UninstallPlan:
    """Raises InstallError (usage) when the prefix is not ours, or a symlink stands where a directory of ours was."""
    history_of(layout)
    for root in layout.roots:
        if link := fs.symlink_on_the_way(layout.prefix, root):
            raise InstallError(
                f"{link} is a symlink, and was not made by Atoll.",
                exit_code=ExitCode.USAGE,
                why="Removing through it could delete something else.",
                changed="Nothing was changed.",
                hint=f"Look where it leads (ls -l {link}); remove the link itself, then run this again.",
            )
    plan = UninstallPlan(purge)
    for path in (layout.opt, layout.run, layout.cache):
        plan.remove.append((path, fs.tree_size(path)))
    for path in (layout.models, layout.state, layout.etc, layout.log_dir):
        (plan.remove if purge else plan.keep).append((path, fs.tree_size(path)))
    return plan


def uninstall(layout: Layout, *, purge: bool, service: ServiceManager | None = None) -> UninstallPlan:
    """Stop the service and remove what `plan_uninstall` lists. Whoever asks has confirmed. Killed half-way, run again.

    Raises InstallError: not ours (2), another command at work (75), a file that cannot be removed (30).
    """
    service = service or PrefixService(layout)
    plan = plan_uninstall(layout, purge=purge)
    with InstallLock(layout.lock, "uninstall"):
        records = replay(layout.journal).records
        journal = Journal("uninstall", records)
        journal.open(layout.journal)
        try:
            journal.add("uninstall", purge=purge)
            audit.append(layout.audit, "uninstall", purge=purge)
            service.stop()
            # `current` first: from then on nothing can be started from what is half gone.
            fs.remove_file(layout.current)
            for root in (layout.opt, layout.run, layout.cache):
                fs.remove_tree(layout.prefix, root)
            journal.add("uninstalled", purge=purge)
            if purge:
                _purge(layout, History(records))
        except OSError as error:
            raise io_error("remove the installation", error) from error
        finally:
            journal.close()
    return plan


def _purge(layout: Layout, history: History) -> None:
    """The rest, the journal last, so that a purge that was cut off can be told from a stranger's directory."""
    for root in (layout.etc, layout.log_dir, layout.models):
        fs.remove_tree(layout.prefix, root)
    for entry in layout.state.iterdir():
        if entry != layout.journal:
            fs.remove_tree(layout.prefix, entry)
    fs.remove_file(layout.journal)
    fs.remove_tree(layout.prefix, layout.lib)
    made = {Path(path) for path in history.created}
    for parent in sorted({parent for root in layout.roots for parent in root.parents} & made, reverse=True):
        try:
            parent.rmdir()
        except OSError:
            continue  # something of somebody else is in it, or it is gone
