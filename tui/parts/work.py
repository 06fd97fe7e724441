"""A running job: its tasks, progress and speed of the current one, and its last messages."""

from rich.cells import cell_len
from rich.text import Text
from textual.app import RenderResult
from textual.widget import Widget

from appliance.service.install_words import STEPS
from appliance.service.words import human_bytes, t
from tui.following import Following
from tui.frame.front import Say, Told
from tui.look import COLOURS, MARKS, PLAIN_MARKS
from tui.parts.bar import bar
from tui.texts import duration


class Work(Told, Widget):
    """Takes what room there is: half for tasks, the rest for messages. `update` draws what has come."""

    def __init__(self) -> None:
        super().__init__()
        self.following: Following | None = None

    def show(self, following: Following | None) -> None:
        self.following = following
        self.refresh()

    def render(self) -> RenderResult:
        work = self.following
        if work is None:
            return ""
        lines = self._tasks(work, max(2, self.size.height // 2 - 1))
        if work.progressed is not None:
            lines.append(Text(progress_line(work, self.say, self.size.width, plain=self.front.plain)))
        if not lines:
            lines.append(Text(self.say(t("Starting ..."))))
        room = self.size.height - len(lines) - 1
        if room > 0 and work.lines:
            lines.append(Text(""))
            lines += [Text(self.say(line), "dim") for line in list(work.lines)[-room:]]
        for line in lines:
            line.no_wrap, line.overflow = True, "crop" if self.front.plain else "ellipsis"
        return Text("\n").join(lines)

    def _tasks(self, work: Following, most: int) -> list[Text]:
        marks = PLAIN_MARKS if self.front.plain else MARKS
        lines = []
        for name, task in list(work.tasks.items())[-most:]:
            state = {"done": "green", "failed": "failed", "begin": "running"}.get(task.status, "open")
            line = Text().append(f"{marks[state]} ", COLOURS[state]).append(self.say(STEPS.get(name, name)))
            if task.seconds is not None and task.seconds >= 1:
                line.append(f"  {duration(task.seconds)}", "dim")
            lines.append(line.append(f"  {self.say(task.detail)}" if task.detail else ""))
        return lines


def progress_line(work: Following, say: Say, width: int, *, plain: bool) -> str:
    """`copying chat ████░░░░  12.1 of 27.4 GiB  1.1 GiB/s  0:14 left`"""
    assert work.progressed is not None
    label, done, total = work.progressed
    if not total:
        return say(t("{what}: {time}", what=label, time=duration(done)) if done else label)
    if not work.in_bytes:
        return f"{say(label)}  {bar(min(30, width // 3), done / total, plain=plain)}  {done:,} / {total:,}"
    left = duration((total - done) / work.rate) if work.rate > 0 else "?"
    said = say(t("{done} of {total}, {rate}/s, {left} left", done=human_bytes(done), total=human_bytes(total),
                 rate=human_bytes(work.rate), left=left))  # fmt: skip
    room = width - cell_len(f"{say(label)}    {said}")
    return f"{say(label)}  {bar(max(6, min(24, room)), done / total, plain=plain)}  {said}"
