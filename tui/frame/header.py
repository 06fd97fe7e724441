"""The top line: the program, the installation, the language."""

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from appliance.service.desk import Person
from appliance.service.words import t
from tui.frame.front import Told


class Header(Told, Widget):
    language = reactive("en")
    title = reactive("")
    mark = reactive("")   # a Text: who else works here

    def show_operator(self, other: Person | None) -> None:
        """Who is in control, if that is somebody else."""
        self.mark = "" if other is None else t("{user} ({origin}) works here", user=other.user, origin=other.origin)

    def render(self) -> RenderResult:
        left = f" Atoll  {self.title}"
        mark = f"[{self.say(self.mark)}]  " if self.mark else ""
        right = f"{mark}F2 {'EN' if self.language == 'en' else '한국어'} "
        room = max(0, self.size.width - cell_len(right))
        if cell_len(left) > room:
            left = " Atoll  ..." + self.title[-max(0, room - 12) :]
        return Text(set_cell_size(left, room) + right, no_wrap=True, end="")
