"""Uninstall: by default, removes what can be created again and keeps what cannot; `purge` removes everything.

Only what the journal says was made here is removed, and no symlink is ever followed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from installer.audit import anchor, log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError, io_error
from installer.base.i18n import t
from installer.base.journal import History, Journal, intact
from installer.base.layout import Layout
from installer.base.lock import InstallLock
from installer.operate.lifecycle import history_of
from installer.service import units
from installer.service.choice import service_for
from installer.service.manager import ServiceManager


@dataclass(slots=True)
class UninstallPlan:
    """What is removed and what stays, with the bytes of each. `units` and `users` exist only in the system form."""

    purge: bool
    remove: list[tuple[Path, int]] = field(default_factory=list)
    keep: list[tuple[Path, int]] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return {
            "purge": self.purge,
            "remove": [{"path": str(path), "bytes": size} for path, size in self.remove],
            "keep": [{"path": str(path), "bytes": size} for path, size in self.keep],
            "units": self.units,
            "users": self.users,
        }


def plan_uninstall(layout: Layout, *, purge: bool) -> UninstallPlan:
    """Raises InstallError (usage) if the prefix is not ours, or if a symlink stands in place of a directory of ours."""
    history = history_of(layout)
    for root in layout.roots:
        if link := fs.symlink_on_the_way(layout.prefix, root):
            raise InstallError(
                t("{link} is a symlink, and was not made by Atoll.", link=link),
                exit_code=ExitCode.USAGE,
                why=t("Removing through it could delete something else."),
                changed=t("Nothing was changed."),
                hint=t("Look where it leads (ls -l {link}); remove the link itself, then run this again.", link=link),
            )
    plan = UninstallPlan(purge)
    gone, stays = (layout.opt, layout.run, layout.cache), [layout.models, layout.state, layout.etc]
    if layout.series.is_dir():
        stays.append(layout.series)
    if not layout.system:
        stays.append(layout.log_dir)
    for path in (*gone, *_system_files(layout, purge=purge)):
        plan.remove.append((path, fs.tree_size(path) or _size(path)))
    for path in stays:
        (plan.remove if purge else plan.keep).append((path, fs.tree_size(path)))
    if purge and layout.system:
        plan.remove += [(path, fs.tree_size(path)) for path in _drop_ins(layout)]
    if layout.system:
        bundles = (history.committed or {}).get("bundles", [])
        plan.units = units.enabled(facts["instance"] for facts in bundles)
        if not purge and layout.sysusers.exists():
            plan.keep.append((layout.sysusers, _size(layout.sysusers)))
        plan.users = list(units.USERS) if purge else []
    return plan


def uninstall(layout: Layout, *, purge: bool, service: ServiceManager | None = None) -> UninstallPlan:
    """Stop the service and remove what `plan_uninstall` lists. The caller has asked for confirmation. If killed
    half-way, run it again.

    Raises InstallError: not ours (2), another command is running (75), a file that cannot be removed (30).
    """
    service = service or service_for(layout)
    plan = plan_uninstall(layout, purge=purge)
    with InstallLock(layout.lock, "uninstall"):
        records = intact(layout.journal)
        journal = Journal("uninstall", records)
        journal.open(layout.journal)
        try:
            journal.add("uninstall", purge=purge)
            log.append(layout.audit, "uninstall", purge=purge)
            service.remove_units()
            # `current` next: from then on nobody can start a half-removed release.
            fs.remove_file(layout.current)
            units.remove(_system_files(layout, purge=purge))
            service.reload()
            for root in (layout.opt, layout.run, layout.cache):
                fs.remove_tree(layout.prefix, root)
            if purge:
                service.remove_users()
            journal.add("uninstalled", purge=purge)
            if purge:
                _purge(layout, History(records))
                anchor.send(layout.audit, log.Head(0, log.GENESIS), "purge")  # the next log starts empty
                service.reload()
        except OSError as error:
            raise io_error(t("remove the installation"), error) from error
        finally:
            journal.close()
    return plan


def _system_files(layout: Layout, *, purge: bool) -> Sequence[Path]:
    """Our files outside of our directories. The operator's drop-ins and the users are removed only by a purge."""
    if not layout.system:
        return ()
    users = {layout.sysusers}
    found = [path for path in units.owned_files(layout) if path.exists() and (purge or path not in users)]
    if layout.command.is_symlink() and "opt/atoll/" in str(layout.command.readlink()):
        found.append(layout.command)
    return found


def _drop_ins(layout: Layout) -> list[Path]:
    """Drop-ins that an operator has added to our units."""
    return sorted(path for path in layout.units.glob("atoll*.d") if path.is_dir() and not path.is_symlink())


def _size(path: Path) -> int:
    """Of a file or link; 0 if an interrupted uninstall has removed it already."""
    return path.lstat().st_size if path.is_symlink() or path.is_file() else 0


def _purge(layout: Layout, history: History) -> None:
    """Remove the rest, the journal last: until then, a second run recognises the directory as ours."""
    drop_ins = _drop_ins(layout) if layout.system else []
    stamp = layout.prefix / "var/lib/systemd/timers" / f"stamp-{units.TIMER}"
    for root in (layout.etc, layout.log_dir, layout.models, *drop_ins, stamp):
        fs.remove_tree(layout.prefix, root)
    for entry in layout.state.iterdir():
        if entry != layout.journal:
            fs.remove_tree(layout.prefix, entry)
    fs.remove_file(layout.journal)
    fs.remove_tree(layout.prefix, layout.lib)
    made = {Path(path) for path in history.created}
    parents = {parent for root in layout.roots for parent in root.parents}
    if layout.system:
        parents |= {path.parent for path in (*units.owned_files(layout), layout.command)}
    for parent in sorted(parents & made, reverse=True):
        try:
            parent.rmdir()
        except OSError:
            continue  # it is gone, or holds a file that is not ours
