"""Start: where the medium is, who decides, and which work is already running."""

import os
from collections.abc import Iterator

from rich.text import Text
from textual.containers import Horizontal, Vertical
from textual.widget import Widget
from textual.widgets import Input, Label, Static

from appliance.service.desk import InstallError
from appliance.service.words import human_bytes, t
from tui.frame.front import Forward, Key
from tui.steps.body import Body

FIELDS = {
    "medium": t("Medium: where it is mounted, or a bundle"),
    "key": t("Vendor's public key (a file; not from the medium)"),
    "by": t("Your name, recorded with what you accept or waive"),
    "answers": t("Answers file, if you have one"),
    "port": t("Port"),
}
OPTIONAL = ("answers", "port")   # side by side, so that the facts of the machine have room below
PORT_DIGITS = 5
PORTS = range(1, 65536)


class StartBody(Body):
    LEAD = t("Say where the medium is, and who you are.")
    HELP = t(
        "Say where the medium is mounted, which file holds the vendor's public key, and your name.\n"
        "The key must reach you through a separate channel, not on the medium.\n"
        "An answers file of another server fills in everything that it contains.\n"
        "The port is where the endpoint listens; leave it empty to keep the one in its label.\n"
        "If work is already running here, you see it. Nobody can start other work meanwhile."
    )

    def parts(self) -> Iterator[Widget]:
        with Vertical(classes="place"):
            for name in FIELDS:
                if name not in OPTIONAL:
                    yield from self._field(name)
            with Horizontal(classes="side-by-side"):
                for name in OPTIONAL:
                    with Vertical(id=f"{name}-field"):
                        yield from self._field(name)
        yield Static("", id="machine", classes="facts", markup=False)

    def _field(self, name: str) -> Iterator[Widget]:
        yield Label("", id=f"{name}-label", markup=False)
        if name == "port":
            yield Input(id=name, restrict="[0-9]*", max_length=PORT_DIGITS)
        else:
            yield Input(id=name, max_length=255)

    def on_mount(self) -> None:
        super().on_mount()
        self.fill()

    def fill(self) -> None:
        """From the answers as they stand."""
        answers = self.front.desk.answers
        self.query_one("#medium", Input).value = str(next(iter(answers.medium), answers.bundle or ""))
        self.query_one("#key", Input).value = str(next(iter(answers.trust_keys), ""))
        self.query_one("#by", Input).value = self.front.desk.by
        self.query_one("#port", Input).value = str(answers.port or "")

    def focus_first(self) -> None:
        self.query_one("#medium", Input).focus()

    def draw(self) -> None:
        super().draw()
        for name, text in FIELDS.items():
            self.query_one(f"#{name}-label", Label).update(Text(self.say(text)))
        standing = self.front.desk.standing_port()
        if standing is not None:
            said = t("Port; empty: {port}", port=standing)
            self.query_one("#port-label", Label).update(Text(self.say(said)))
        self.query_one("#machine", Static).update(Text("\n".join(self._machine())))

    def _machine(self) -> list[str]:
        following, machine = self.front.following, self.front.machine
        if following is not None:
            said = t("Work is running here. Enter shows it.")
            if following.is_watcher:
                said = t("Somebody else works here. You see it, and cannot change it. Enter shows it.")
            return [self.say(said)]
        if self.front.trouble is not None:
            error = self.front.trouble
            return [self.say(each) for each in (error.message, error.hint) if each]
        if machine is None:
            return [self.say(t("Checking this machine ..."))]
        rows = [self.say(t("This machine has {memory} of memory.", memory=human_bytes(machine.memory_bytes)))]
        rows += [f"GPU {gpu.index}  {gpu.name}  {human_bytes(gpu.memory_bytes or 0)}" for gpu in machine.gpus]
        if not machine.gpus:
            rows.append(self.say(t("No GPU was found; models would compute on the CPU.")))
        return rows

    def forward(self) -> Forward:
        if self.front.following is not None:
            return Forward(t("Show it"))
        return Forward(t("Next field") if self._next_empty() else t("Continue"))

    def keys(self) -> list[Key]:
        return [Key("Tab", t("Next field"), "app.focus_next")]

    def _next_empty(self) -> Input | None:
        """The first field behind the focused one that must be said and is not."""
        names = list(FIELDS)
        at = next((n for n, name in enumerate(names) if self.query_one(f"#{name}", Input).has_focus), len(names))
        left = [self.query_one(f"#{name}", Input) for name in names[at + 1 :] if name not in OPTIONAL]
        return next((each for each in left if not each.value.strip()), None)

    def on_descendant_focus(self) -> None:
        self.post_message(self.Changed())

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.has_focus:
            self.front.note = ""  # it was about what stood here before
        self.post_message(self.Changed())

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        empty = self._next_empty() if self.front.following is None else None
        if empty is not None and event.input.id not in OPTIONAL:
            empty.focus()
        else:
            self.go()

    def go(self) -> None:
        following, standing = self.front.following, self.front.standing
        if following is not None:
            names = [step.id for step in standing.steps] if standing else []
            self.front.open_step(names.index(following.at_step) + 1 if following.at_step in names else 1)
            return
        said = {name: self.query_one(f"#{name}", Input).value.strip() for name in FIELDS}
        wrong = next((name for name in ("medium", "key", "answers")
                      if said[name] and not os.path.exists(os.path.expanduser(said[name]))), None)  # fmt: skip
        if wrong is not None:
            self.query_one(f"#{wrong}", Input).focus()  # whose path it is
            nothing = t("There is nothing at {path}. Correct the path.", path=said[wrong])
            if wrong == "medium":
                nothing = t("There is nothing at {path}. Mount the medium, or correct the path.", path=said[wrong])
            self.front.note = nothing
            return
        desk, self.front.trouble = self.front.desk, None
        untouched = said["port"] == str(desk.answers.port or "")
        if not self._is_port(said["port"]):
            return
        if said["answers"]:
            try:
                desk.load(said["answers"])
            except InstallError as error:
                self.front.trouble = error  # more than a line
                self.front.note = t("The answers file cannot be used.")
                return
            self.query_one("#answers", Input).value = ""
            said["medium"] = said["medium"] or str(next(iter(desk.answers.medium), desk.answers.bundle or ""))
            said["key"] = said["key"] or str(next(iter(desk.answers.trust_keys), ""))
            if untouched and desk.answers.port is not None:
                said["port"] = str(desk.answers.port)
        desk.place(said["medium"], said["key"], said["by"])
        desk.listen(int(said["port"]) if said["port"] else None)
        self.fill()
        self.front.look_again()
        super().go()

    def _is_port(self, said: str) -> bool:
        """Whether an endpoint may listen there; else the field is shown with what it takes."""
        if not said or int(said) in PORTS:
            return True
        self.query_one("#port", Input).focus()
        self.front.note = t("{port} is not a port. Enter one from 1 to 65535, or leave the field empty.", port=said)
        return False
