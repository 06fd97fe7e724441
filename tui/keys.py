"""The keys that work everywhere, and the help that lists them. tui/app.py has the action of each, `action_NAME`."""

from textual.binding import Binding, BindingType

from appliance.service.words import t

_JAMO = {"e": "ㄷㄸ", "g": "ㅎ", "k": "ㅏ", "l": "ㅣ", "m": "ㅡ", "n": "ㅜ", "p": "ㅔㅖ", "r": "ㄱㄲ", "s": "ㄴ",
         "u": "ㅕ", "x": "ㅌ"}  # fmt: skip


def letter(key: str, action: str) -> Binding:
    """A key that is a letter: with Shift or Caps Lock too, and with the Korean keyboard layout."""
    return Binding(",".join((key, key.upper(), *_JAMO[key])), action)


BINDINGS: list[BindingType] = [
    Binding("enter", "forward"), Binding("escape", "back"),
    Binding("f1,question_mark", "help"), Binding("f2", "language"), Binding("f4", "colours"),
    Binding("f5", "again"), Binding("f6", "export"), Binding("f7", "report"), Binding("f8", "messages"),
    Binding("f9", "waive"), Binding("f12", "dashboard"), Binding("7", "dashboard"), Binding("ctrl+l", "redraw"),
    Binding("f11", "seat"),
    Binding("f10,ctrl+q", "leave", priority=True), Binding("ctrl+c", "leave", priority=True),
    Binding("left", "move(-1)"), Binding("right", "move(1)"),
    *(Binding(str(number), f"open({number})") for number in range(7)),
]  # fmt: skip

HELP = t(
    "Enter        continue: run this step, or open the next one\n"
    "Up, Down     choose a line; its meaning is shown below\n"
    "0 to 6       open a step, as Left and Right do\n"
    "Esc          one step back\n"
    "Tab          next field\n"
    "F2, F4       language; colours\n"
    "F3           menu of everything that you can do\n"
    "F5           run this step again\n"
    "F6           write the answers to a file, for the next server\n"
    "F7           write the report of all steps to files\n"
    "F8           messages of the running work\n"
    "F9           waive this failed check, with a reason\n"
    "F12 or 7     the dashboard\n"
    "F10, Ctrl-C  leave. Running work continues; `atoll` shows it"
)
