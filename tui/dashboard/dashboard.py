"""Reads the service in a separate thread and shows its latest state: models, speed, GPUs, alerts, end of the log."""

import threading
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import Static

from appliance.service.dashboard import cells, control, history
from appliance.service.dashboard.snapshot import Alert, Snapshot
from appliance.service.dashboard.watcher import Watcher
from appliance.service.desk import InstallError
from appliance.service.words import t
from tui.dashboard.columns import columns
from tui.dashboard.trends import trends
from tui.dialogs.ask import Ask, Read
from tui.dialogs.form import Pick
from tui.frame.front import Front, Key, Told
from tui.frame.header import Header
from tui.frame.key_bar import KeyBar, NoteLine
from tui.look import TOO_SMALL, is_too_small
from tui.parts.plot import Plot
from tui.texts import long_time

LOOK_SECONDS, PLAIN_SECONDS = 2.0, 5.0
FRESH = 15.0           # seconds that figures may be old
LOG_LINES = 400
MOST_ALERTS = 3
MOST_ACTIVE = 8        # requests in the dashboard itself
ROOM_FOR_THE_REST = 32  # lines of the screen that the rest takes
FOR_TRENDS = 32        # lines of the screen
FEW_GPUS, MANY_GPUS = 2, 8   # below the chart, on a screen of 24 lines and of more
WIDE = 110             # columns, for the GPUs beside the chart

HELP = t(
    "One line for each model. USERS: requests that are answered now, of how many at once. WAIT: requests in the queue. "
    "FIRST: time to the first token. BETWEEN: time between two tokens. 95 % of the last minute's requests were faster "
    "than these. KV: how full the KV cache is. PREFIX: share of the prompts that the cache knew. A dash: no traffic.\n"
    "A taller terminal also shows how latencies, the queue and the KV cache moved in the last 15 minutes.\n\n"
    "F5     read everything again now\n"
    "Space  hold the screen; again: continue\n"
    "3      details: medians, KV pages, API keys, all alerts\n"
    "4      all active requests: key, age, tokens; never their content\n"
    "F8     the end of the log, in full lines\n"
    "/      show only the lines of the log with this word\n"
    "F9     start, stop, drain, restart or roll back the service; asks first\n"
    "Esc    back to the checklist\n"
    "F10    leave"
)


class Dashboard(Told, Screen[None]):
    """`seen` is the latest snapshot; `held` pauses the screen."""

    BINDINGS: ClassVar = [
        Binding("escape", "close"), Binding("f1,question_mark", "help"), Binding("f5", "look"), Binding("f8", "log"),
        Binding("slash", "filter"), Binding("f9", "control"), Binding("space", "hold"), Binding("3", "details"),
        Binding("4", "active"), Binding("enter", "look"),
        *(Binding(key, "nothing") for key in (*"012567", "f12")), Binding("left,right", "nothing"),
    ]  # fmt: skip
    CSS = """
    #headline { height: 1; margin: 1 1 0 1; text-style: bold; }
    #models { height: auto; max-height: 8; margin: 1 1 0 1; }
    #middle { height: auto; margin: 0 1; }
    #middle Plot { height: 7; width: 1fr; }
    #gpus { height: auto; max-height: 9; width: auto; margin: 1 0 0 2; }
    #gpus-below, #trends { height: auto; margin: 0 1; }
    #trends { margin: 1 1 0 1; }
    #active { height: auto; max-height: 11; margin: 1 1 0 1; }
    #alerts { height: auto; max-height: 6; margin: 1 1 0 1; }
    #log { height: 1fr; margin: 1 1 0 1; text-wrap: nowrap; }
    """
    PARTS: ClassVar = ("headline", "models", "middle", "gpus-below", "trends", "active", "alerts", "log")
    AUTO_FOCUS: ClassVar[str | None] = ""

    seen: reactive[Snapshot | None] = reactive(None, init=False)
    held = reactive(False, init=False)

    def __init__(self, front: Front) -> None:
        super().__init__()
        self._layout_of_service = front.desk.layout
        self._seconds = PLAIN_SECONDS if front.plain else LOOK_SECONDS
        self._left, self._look_now = threading.Event(), threading.Event()
        self._log: list[str] = []
        self._word = ""
        self._note = ""

    def compose(self) -> ComposeResult:
        yield Header()
        yield Static("", id="headline", markup=False)
        yield Static("", id="models", markup=False)
        with Horizontal(id="middle"):
            yield Plot()
            yield Static("", id="gpus", markup=False)
        yield Static("", id="gpus-below", markup=False)
        yield Static("", id="trends", markup=False)
        yield Static("", id="active", markup=False)
        yield Static("", id="alerts", markup=False)
        yield Static("", id="log", markup=False)
        yield NoteLine()
        yield KeyBar()
        yield Static("", id="small", markup=False)

    def on_mount(self) -> None:
        self.query_one(Header).title = self._layout_of_service.name
        self.query_one(Plot).title = t("tokens/s")
        self.watch(self.app, "language", self._speaks)
        self.watch(self.app, "note", self._news, init=False)
        self.watch(self.app, "watched", self._seat)
        threading.Thread(target=self._read, name="dashboard", daemon=True).start()
        self.draw()

    def on_unmount(self) -> None:
        self._left.set()
        self._look_now.set()

    # -- reading, in the thread

    def _read(self) -> None:
        with Watcher(self._layout_of_service, self._seconds) as watcher:
            while not self._left.is_set():
                self._look_now.clear()
                try:
                    seen, log = watcher.look(), self._read_log()
                except InstallError as error:
                    self._hand_over(None, [], error.message)
                else:
                    self._hand_over(seen, log, "")
                self._look_now.wait(self._seconds)

    def _read_log(self) -> list[str]:
        try:
            return control.log_lines(self._layout_of_service, LOG_LINES)
        except InstallError:
            return []

    def _hand_over(self, seen: Snapshot | None, log: list[str], note: str) -> None:
        if not self._left.is_set():
            self.app.call_from_thread(self._take, seen, log, note)

    def _take(self, seen: Snapshot | None, log: list[str], note: str) -> None:
        if self.held or not self.is_mounted:
            return
        self._log, self._note = log, note or self._note
        self.seen = seen or self.seen

    # -- drawing

    def watch_seen(self) -> None:
        self.draw()

    def watch_held(self) -> None:
        self.draw()

    def _speaks(self, language: str) -> None:
        for widget in (self.query_one(Header), self.query_one(NoteLine), self.query_one(KeyBar), self.query_one(Plot)):
            widget.language = language
        self.draw()

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        if not self.is_mounted:
            return
        small = is_too_small(self.size)
        self.set_class(small, "small")
        self._put("small", Text(self.say(TOO_SMALL)))
        self.query_one(KeyBar).keys = self._keys()
        self.query_one(NoteLine).note = self._note
        seen = self.seen
        for name in self.PARTS:
            self.query_one(f"#{name}").display = not small and (seen is not None or name == "headline")
        if small:
            return
        if seen is None:
            self._put("headline", Text(self.say(t("Looking at the service ..."))))
            return
        room = self.size.width - 2
        headline = self.say(cells.headline(seen))
        self._put("headline", Text(f"{headline}  {self.say(t('HELD'))}" if self.held else headline))
        self._put("models", self._models(seen, room))
        self._gpus(seen)
        self._active(seen, room)
        self._put("alerts", self._alerts(seen))
        self._charts(seen, room)
        self.call_after_refresh(self._draw_log)

    def _draw_log(self) -> None:
        """It fills what the rest leaves, which is known once that is laid out."""
        if self.is_mounted:
            self._put("log", self._log_text())

    def _put(self, name: str, text: Text) -> None:
        self.query_one(f"#{name}", Static).update(text)

    def _models(self, seen: Snapshot, room: int) -> Text:
        if not seen.models:
            return Text(self.say(t("Nothing is installed here. Esc opens the checklist, which installs it.")))
        heads = [self.say(head) for head in cells.MODEL_HEADS]
        rows = [[self.say(cell) for cell in cells.model_cells(model)] for model in seen.models]
        return columns(heads, rows, room, 6)

    def _gpus(self, seen: Snapshot) -> None:
        """Beside the chart, or below it."""
        wide = self.size.width >= WIDE
        beside, below = self.query_one("#gpus", Static), self.query_one("#gpus-below", Static)
        beside.display, below.display = bool(seen.gpus) and wide, bool(seen.gpus) and not wide
        if wide:
            heads = [self.say(head) for head in cells.GPU_HEADS]
            rows = [[self.say(cell) for cell in cells.gpu_cells(gpu)] for gpu in seen.gpus]
            beside.update(columns(heads, rows, self.size.width * 6 // 10, 7))
        else:
            rows = [[self.say(cell) for cell in cells.gpu_line_cells(gpu)] for gpu in seen.gpus]
            below.update(columns((), rows, self.size.width - 2, FEW_GPUS if self.size.height < 30 else MANY_GPUS))

    def _charts(self, seen: Snapshot, room: int) -> None:
        plot, points = self.query_one(Plot), seen.history.get(history.TOKENS, ())
        plot.display = len(points) > 1
        if points:
            plot.ends = (self._ago(seen.at - points[0][0]), self._ago(seen.at - points[-1][0]))
        plot.points = tuple((at - seen.at, rate) for at, rate in points)
        shown = self.query_one("#trends").display = self.size.height >= FOR_TRENDS and plot.display
        if shown:
            self._put("trends", trends(seen.history, self.say, room, plain=self.front.plain))

    def _ago(self, seconds: float) -> str:
        if seconds < FRESH:
            return t("now")
        return t("{time} ago", time=long_time(60 * round(seconds / 60) if seconds >= 60 else seconds))

    def _active(self, seen: Snapshot, room: int) -> None:
        """The oldest active requests, where the screen is tall enough; all of them behind a key."""
        rows = (self.size.height - ROOM_FOR_THE_REST) // 2
        shown = self.query_one("#active").display = bool(seen.active) and rows > 0
        if shown:
            table = self._active_table(seen, room, min(rows, MOST_ACTIVE))
            self._put("active", Text(self.say(cells.active_line(seen)) + "\n", end="").append_text(table))

    def _active_table(self, seen: Snapshot, room: int, most: int) -> Text:
        heads = [self.say(head) for head in cells.ACTIVE_HEADS]
        return columns(heads, [[self.say(cell) for cell in cells.active_cells(row)] for row in seen.active], room, most)

    def _alerts(self, seen: Snapshot) -> Text:
        text = Text(end="")
        if seen.why_not:
            text.append(self.say(seen.why_not), "yellow")
        for alert in seen.alerts[:MOST_ALERTS]:
            text.append("\n" if text else "").append_text(self._alert(alert))
        if len(seen.alerts) > MOST_ALERTS:
            text.append("\n" + self.say(t("{count} more: 3", count=len(seen.alerts) - MOST_ALERTS)), "dim")
        if not text:
            text.append(self.say(t("No alerts.")), "dim")
        return text

    def _alert(self, alert: Alert) -> Text:
        text = Text().append("! ", "red" if alert.severity == "error" else "yellow").append(self.say(alert.what))
        return text.append(f"  {self.say(t('next: {command}', command=alert.next))}", "dim") if alert.next else text

    def _log_text(self) -> Text:
        wanted = [line for line in self._log if self._word.lower() in line.lower()]
        height = max(1, self.query_one("#log", Static).size.height)
        shown = wanted[-height:]
        if self._word:
            found = t("{count} lines with '{word}'", count=len(wanted), word=self._word)
            shown = [self.say(found), *shown[-(height - 1):]] if height > 1 else shown
        room = self.size.width - 2
        text = "\n".join(set_cell_size(line, room) if cell_len(line) > room else line for line in shown)
        if self.front.plain:  # a log may say anything
            text = text.encode("ascii", "replace").decode()
        return Text(text, "dim", no_wrap=True, end="")

    def _keys(self) -> tuple[Key, ...]:
        hold = t("Continue") if self.held else t("Hold")
        return (Key("Esc", t("Back"), "screen.close"), Key("F1", t("Help"), "screen.help"),
                Key("3", t("Details"), "screen.details"), Key("F8", t("Log"), "screen.log"),
                Key("/", t("Filter"), "screen.filter"), Key("F9", t("Service"), "screen.control"),
                Key("4", t("Active"), "screen.active"), Key("Space", hold, "screen.hold"),
                Key("F10", t("Leave"), "app.leave"))  # fmt: skip

    # -- keys

    def action_nothing(self) -> None:
        """A key of the checklist behind it."""

    def action_close(self) -> None:
        if self._word:
            self._word = ""
            self.draw()
        else:
            self.dismiss(None)

    def action_help(self) -> None:
        self.app.push_screen(Read(self.say, t("Help"), self.say(HELP)))

    def action_look(self) -> None:
        self._look_now.set()

    def action_hold(self) -> None:
        self.held = not self.held

    def action_log(self) -> None:
        text = "\n".join(self._log) or self.say(t("There are no messages."))
        self.app.push_screen(Read(self.say, t("The end of the log"), text, at_its_end=True))

    def action_filter(self) -> None:
        def take(word: str | None) -> None:
            if word is not None:
                self._word = word
                self.draw()

        self.app.push_screen(Ask(self.say, t("Show only lines of the log with this word:")), take)

    def action_details(self) -> None:
        seen = self.seen
        if seen is None:
            return
        told = [self.say(line) for model in seen.models for line in cells.model_details(model)]
        told += [self.say(cells.requests_line(seen))]
        told += ["  ".join(self.say(cell) for cell in cells.gpu_line_cells(gpu)) for gpu in seen.gpus]
        told += [self.say(line) for line in cells.key_lines(seen)]
        told += [self._alert(alert).plain for alert in seen.alerts]
        self.app.push_screen(Read(self.say, t("Details"), "\n".join(told)))

    def action_active(self) -> None:
        if (seen := self.seen) is None:
            return
        text = self.say(cells.active_line(seen) or t("The gateway does not report its active requests."))
        if seen.active:
            text += "\n" + self._active_table(seen, self.size.width - 8, len(seen.active)).plain
        self.app.push_screen(Read(self.say, t("Active requests"), text))

    def action_control(self) -> None:
        if self.front.desk.somebody_else() is not None:
            self.call_later(self.app.run_action, "seat")
            return

        def take(chosen: str | None) -> None:
            for action in control.ACTIONS:
                if action == chosen:
                    self._confirm(action)

        choices = {str(action): text for action, text in control.ACTIONS.items()}
        self.app.push_screen(Pick(self.say, t("What do you want to do with the service?"), choices), take)

    def _confirm(self, action: control.Action) -> None:
        def take(agreed: bool | None) -> None:
            if agreed:
                self._note = t("Running: {what}", what=control.ACTIONS[action])
                self.draw()
                threading.Thread(target=self._do, args=(action,), name=f"dashboard-{action}", daemon=True).start()

        about = t("{what}.\nThis affects everybody who uses the service. Continue?", what=control.ACTIONS[action])
        agree = t("Enter does it. Esc leaves it.")
        self.app.push_screen(Read(self.say, t("Are you sure?"), self.say(about), agree), take)

    def _do(self, action: control.Action) -> None:
        """In a thread: the screen stays responsive, and Esc does not stop a running command."""
        try:
            said = self.front.desk.control(action)
        except InstallError as error:
            said = error.message
        self._look_now.set()
        if not self._left.is_set():
            self.app.call_from_thread(self._done, said)

    def _seat(self) -> None:
        self.query_one(Header).show_operator(self.front.watched)

    def _news(self, note: str) -> None:
        """What the program has to say, such as who works here."""
        if note:
            self._done(note)

    def _done(self, said: str) -> None:
        self._note = said
        self.draw()
