"""The menu of everything that a key does, by its name: the command palette, in a fixed order and one line each."""

from typing import cast

from rich.cells import cell_len
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from appliance.service.words import t
from tui.frame import places
from tui.frame.front import Front, Key

_KEY = 8   # cells of a key's name


def commands(front: Front) -> list[Key]:
    """In the order in which an operator needs them."""
    steps = front.standing.steps if front.standing else ()
    return [
        Key("", t("What is wrong, and what to do"), "trouble"),
        *([Key("F12", t("Dashboard"), "dashboard")] if places.has_dashboard() else []),
        Key("0", t("Open the start"), "open(0)"),
        *(Key(str(number), t("Open step: {title}", title=step.title), f"open({number})")
          for number, step in enumerate(steps, 1)),
        Key("F5", t("Run this step again"), "again"),
        Key("F8", t("Messages of the work"), "messages"),
        Key("F7", t("Write the report of all steps"), "report"),
        Key("F6", t("Write the answers to a file"), "export"),
        *([Key("F11", t("Ask to work here"), "seat")] if front.watched is not None else []),
        Key("F2", t("Language: English or Korean"), "language"),
        Key("F4", t("Other colours"), "colours"),
        Key("F1", t("Help"), "help"),
        Key("Ctrl-L", t("Draw the screen again"), "redraw"),
        Key("F10", t("Leave; running work continues"), "leave"),
    ]  # fmt: skip


class Menu(Provider):
    async def discover(self) -> Hits:
        for key in self._commands():
            said = self._said(key)
            yield DiscoveryHit(_line(key, Content(said)), self._doing(key), text=said)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for key in self._commands():
            said = self._said(key)
            if (score := matcher.match(said)) > 0:
                yield Hit(score, _line(key, matcher.highlight(said)), self._doing(key), text=said)

    def _commands(self) -> list[Key]:
        return commands(cast(Front, self.app))

    def _said(self, key: Key) -> str:
        return cast(Front, self.app).say(key.text)

    def _doing(self, key: Key):
        return lambda: self.app.call_later(self.app.run_action, key.action)


def _line(key: Key, said: Content) -> Content:
    return Content.assemble((key.name + " " * (_KEY - cell_len(key.name)), "dim"), said)
