"""Marks and colours; the styles are in tui/sheets. A state is a word or a sign first; its colour only repeats it."""

from rich.terminal_theme import TerminalTheme
from textual.geometry import Size
from textual.theme import Theme

from appliance.service.findings import Finding
from appliance.service.words import t

WIDTH, HEIGHT = 80, 24  # the smallest terminal
TOO_SMALL = t("This terminal is too small: it needs {width} columns and {height} lines.", width=WIDTH, height=HEIGHT)

THEMES = (
    Theme("atoll-dark", primary="#4fb3bf", background="#101418", surface="#101418", panel="#1c242b",
          foreground="#d8dee4", success="#7fc97f", warning="#e0b050", error="#ef6b6b", dark=True),
    Theme("atoll-light", primary="#00626f", background="#ffffff", surface="#ffffff", panel="#e8eef0",
          foreground="#1a1d20", success="#1b6e1b", warning="#8a5a00", error="#a31515", dark=False),
    Theme("atoll-contrast", primary="#ffff00", background="#000000", surface="#000000", panel="#202020",
          foreground="#ffffff", success="#00ff00", warning="#ffff00", error="#ff8080", dark=True),
)  # fmt: skip
# The RGB values of "red", "green" and so on: readable on each background, and on a selected line.
DARK_COLOURS = TerminalTheme(
    (16, 20, 24), (216, 222, 228),
    [(16, 20, 24), (239, 107, 107), (127, 201, 127), (224, 176, 80), (111, 163, 230), (200, 140, 220), (79, 179, 191),
     (216, 222, 228)],
)  # fmt: skip
LIGHT_COLOURS = TerminalTheme(
    (255, 255, 255), (26, 29, 32),
    [(26, 29, 32), (163, 21, 21), (27, 110, 27), (138, 90, 0), (0, 70, 160), (120, 30, 140), (0, 98, 111),
     (216, 222, 228)],
)  # fmt: skip
PLAIN_THEME = "ansi-dark"
THEME_NAMES = (*(theme.name for theme in THEMES), PLAIN_THEME)

# Signs that every font has: none of them is wide in a terminal that draws ambiguous characters wide.
MARKS = {"green": "✓", "failed": "✗", "running": ">", "stale": "~", "interrupted": "!", "open": " "}
PLAIN_MARKS = {**MARKS, "green": "v", "failed": "x"}
PLAIN_SIGNS = str.maketrans({"≥": ">=", "≤": "<=", "→": "->", "×": "x", "–": "-", "…": "...", "°": "", "·": ",",
                             "“": '"', "”": '"', "’": "'"})  # fmt: skip
SHORT = {"gpu": t("GPU"), "model": t("Model"), "install": t("Install"), "tune": t("Tune"), "verify": t("Verify"),
         "pilot": t("Pilot")}  # fmt: skip
COLOURS = {"green": "green", "failed": "red", "stale": "yellow", "interrupted": "yellow", "running": "cyan",
           "open": ""}  # fmt: skip
VERDICTS = {"pass": (t("PASS"), "green"), "info": (t("INFO"), ""), "warn": (t("WARN"), "yellow"),
            "fail": (t("FAIL"), "red"), "waived": (t("WAIV"), "magenta")}  # fmt: skip


def is_too_small(size: Size) -> bool:
    return size.width < WIDTH or size.height < HEIGHT


def verdict(finding: Finding) -> str:
    if finding.waiver is not None:
        return "waived"
    if finding.ok:
        return "pass"
    return finding.severity if finding.severity in ("warn", "info") else "fail"


FITS = {"fits": (t("fits"), "green"), "tight": (t("tight"), "yellow"), "no": (t("too large"), "red"),
        "unknown": (t("unknown"), "yellow")}  # fmt: skip
