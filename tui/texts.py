"""What the steps and keys say of themselves, and how plans and work are put into lines."""

from collections.abc import Callable
from typing import Any

from appliance.service.findings import Finding
from appliance.service.words import t
from tui.following import Following
from tui.look import PLAIN_MARKS

Say = Callable[[str], str]

LEADS = {
    "start": t("Where the medium is, and who decides. Esc and the arrows lose nothing."),
    "gpu": t("Can this machine run what was brought?"),
    "model": t("What runs here, and under which licence. Each text is read to its end."),
    "install": t("First the plan, then the work. It goes on if this terminal is lost."),
    "tune": t("The settings that serve your users best, found by measuring."),
    "verify": t("Does it keep its promises? Every number beside its target."),
    "pilot": t("First a few users, then all, with a way back."),
}  # fmt: skip

HELP = t(
    "Enter   goes on: runs this step, or opens the next one when it is done.\n"
    "Up, Down   choose a check; what it means and what to do stands below it.\n"
    "0 to 9, Left, Right   open a step. Esc goes back one step.\n"
    "F2   language        F4   colours        F5   run this step again\n"
    "F6   write the answers to a file, for the next server\n"
    "F8   messages of the work        F9   go on although this check fails, with a reason\n"
    "F10 or Ctrl-C   leave. Work that was begun goes on; `atoll` shows it again."
)


def detail_of(finding: Finding, say: Say) -> str:
    """Why, what is needed, what to do, and what was seen."""
    rows = [(t("Needed"), finding.required), (t("Why"), finding.why), (t("Fix"), finding.fix),
            (t("Command"), finding.command), (t("Evidence"), finding.evidence)]  # fmt: skip
    if finding.waiver is not None:
        said = t("{by}: {reason}", by=finding.waiver.by, reason=finding.waiver.reason)
        rows.insert(0, (t("Waived"), said))
    return "\n".join(f"{say(label)}: {say(text)}" for label, text in rows if text)


def plan_lines(plan: Any, say: Say) -> str:
    """Everything that is new or changes; what stays is counted."""
    lines = [say(t("Release {release}", release=plan.release)), ""]
    for item in plan.items:
        if item.deed != "keep":
            size = human(item.bytes) if item.bytes else ""
            lines.append(f"{item.deed:8} {item.kind:10} {size:>9}  {item.what}  {say(item.note)}".rstrip())
    kept = sum(1 for item in plan.items if item.deed == "keep")
    said = t("{size} to write; {kept} more stay as they are.", size=human(plan.bytes), kept=kept)
    return "\n".join([*lines, "", say(said)])


def work_lines(work: Following, say: Say) -> str:
    """The tasks, how far the running one is, and the end of the messages."""
    lines = []
    for name, (status, detail) in list(work.tasks.items())[-5:]:
        mark = {"done": PLAIN_MARKS["green"], "failed": PLAIN_MARKS["failed"], "begin": ">"}.get(status, "-")
        lines.append(f"{mark} {say(name)}  {say(detail)}".rstrip())
    if work.progressed is not None:
        lines.append(_progress(work, say))
    return "\n".join([*lines, *(say(line) for line in list(work.lines)[-2:])])


def _progress(work: Following, say: Say) -> str:
    assert work.progressed is not None
    label, done, total = work.progressed
    if not total:
        return say(t("{what}: {seconds} s", what=say(label), seconds=done))
    left = f"{(total - done) / work.rate:.0f}" if work.rate > 0 else "?"
    return say(t("{what}: {done} of {total}, {rate}/s, {left} s left", what=say(label), done=human(done),
                 total=human(total), rate=human(work.rate), left=left))  # fmt: skip


def human(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
