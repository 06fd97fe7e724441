"""An operator walks the whole checklist at a real terminal, by keyboard alone, and loses the terminal on the way."""

import re
import time
from collections.abc import Callable

from terminals import Terminal

AGREES = r"Enter accepts it as|Enter starts\. Esc|I have kept it"
GREEN = "[✓v]"


class Walk:
    """`lose`: how the terminal is lost in the middle of each step; then `atoll` is started anew in a fresh one.
    `look` is called with every screen that matters."""

    def __init__(self, terminal: Terminal, *, lose: list[Callable[[], None]] | None = None,
                 look: Callable[[], None] = lambda: None) -> None:  # fmt: skip
        self.terminal, self._lose, self._look = terminal, lose or [], look
        self.until, self.press, self.type = terminal.until, terminal.press, terminal.type
        self.lost = 0
        self.agreed: list[str] = []   # the titles of what was read to its end and agreed to
        self.key = ""                 # of the endpoint, as it was shown

    def lose(self) -> None:
        if self._lose:
            self._look()
            self._lose[self.lost % len(self._lose)]()
            self.lost += 1
            self.terminal.start()
            self.until("F10 Leave|Read to the end|Enter (accepts|starts)|I have kept it")

    def is_green(self, number: int) -> bool:
        return re.search(f"{GREEN} {number} ", self.terminal.text()) is not None

    def open(self, number: int) -> None:
        self.press(str(number))
        self.until(f">. {number} ")

    def green(self, number: int, seconds: float = 300.0) -> None:
        """Wait for this step's mark, reading on the way what is to be read."""
        end = time.monotonic() + seconds
        while not self.is_green(number):
            self._read_what_is_open()
            text = self.terminal.text()
            assert time.monotonic() < end, text
            assert not re.search(f"x{number} |✗{number} ", text), text
            time.sleep(0.1)
        self._look()

    def _read_what_is_open(self) -> None:
        text = self.terminal.text()
        if "Read to the end first" in text:
            self.press("pagedown")
        elif re.search(AGREES, text):
            self._look()
            self.agreed.append(self._title(text))
            if shown := re.search(r"endpoint is.*?\b(sk-[\w-]+)", text, re.DOTALL):
                self.key = shown[1]
            self.press("enter")
            time.sleep(0.3)

    def _title(self, text: str) -> str:
        found = re.search("Licence [^ ]+ of [^ ]+|What will be done|API key", text)
        assert found, text
        return found[0]

    def read(self, title: str) -> None:
        """Read the text of this title to its end, and agree, and so with what comes before it."""
        end = time.monotonic() + 120
        while title not in self.agreed[-1:]:
            assert time.monotonic() < end, self.terminal.text()
            self._read_what_is_open()
            time.sleep(0.1)

    # -- the steps

    def start(self, answers: str) -> None:
        self.until("where the medium is", "This machine has")
        self._look()
        self.press("tab", "tab", "tab")
        self.type(answers)
        self.press("enter")
        self.until(">. 1 GPU")

    def gpu(self) -> None:
        self.press("enter")
        self.until(f"running|{GREEN} 1 ")
        self.lose()
        self.green(1)

    def model(self, fits: str = "fits") -> None:
        self.open(2)
        self.until(fits)
        self._look()
        self.press("enter")
        self.until("Licence ")
        self.lose()
        self.green(2)
        assert sum(title.startswith("Licence ") for title in self.agreed) == 2, self.agreed

    def install(self, at_work: str = "copying|staging|Copy|smollm2") -> None:
        self.open(3)
        self.until("Make the plan")
        self.press("enter")
        self.until("What will be done")
        self.lose()
        self.read("What will be done")
        self.until("It continues without this terminal")
        self.lose()
        self.green(3, 600)
        if "API key" not in self.agreed:
            if "Nobody has seen the key" in self.until("Nobody has seen the key|I have kept it"):
                self.press("f5")  # it was made while the terminal was away
            self.read("API key")
            self.green(3)
        assert "Nobody has seen" not in self.terminal.text()

    def tune(self, target: str) -> None:
        self.open(4)
        self.until("computes on the CPU")
        self._look()
        self.press("enter")
        self.until("Enter continues, Esc leaves")
        self._look()
        self.type(target)
        self.press("enter", "enter", "enter")
        self.until("Requests/s", seconds=180)
        self.lose()
        self.green(4)

    def verify(self, ttft: str) -> None:
        self.open(5)
        self.press("g")
        self.until("Enter continues, Esc leaves")
        self._look()
        self.type(ttft)
        self.press("enter", "enter", "enter", "enter", "enter")
        self.until(f"first token {int(ttft):,} ms")
        self.press("enter")
        self.until("throughput", seconds=300)
        self.lose()
        self.green(5)

    def pilot(self, name: str) -> None:
        self.open(6)
        self.until("everybody", "stops at")
        self._look()
        self.press("enter")
        self.until("(?i)running", "everybody")
        self.lose()
        self.until("Sign it", seconds=120)
        self._look()
        self.press("enter")
        self.until("Sign the pilot")
        self.press("enter")
        self.type(name)
        self.press("enter", "enter")
        self.until(f"signed by {name}", f"{GREEN} 6 ", seconds=120)
        self._look()
