"""A report as one self-contained HTML page, in both languages, switched without a script."""

from collections.abc import Mapping
from html import escape

_LANGUAGES = (("en", "English"), ("ko", "한국어"))
_STYLE = """
:root { color-scheme: light dark; --fg: #1c2430; --bg: #fff; --soft: #5b6677; --line: #d8dde5; --bar: #2f6fbd;
  --good: #1b7f4b; --bad: #c0392b; --warn: #a86a00; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6eaf0; --bg: #14181f; --soft: #9aa5b5; --line: #333c49;
  --bar: #6aa5ee; --good: #4cc38a; --bad: #ff7b6b; --warn: #e0a94a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .5rem; text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; } td.r { white-space: nowrap; font-weight: 600; }
.pass { color: var(--good); } .fail { color: var(--bad); } .warn, .waived { color: var(--warn); }
.info, .soft { color: var(--soft); }
svg { width: 100%; max-width: 640px; height: auto; font: 11px system-ui, sans-serif; fill: var(--fg); }
svg .name { font-weight: 600; } svg .bar { fill: var(--bar); } svg .axis { stroke: var(--soft); }
svg .line { fill: none; stroke: var(--bar); stroke-width: 1.5; }
input[name=language] { position: absolute; opacity: 0; }
label { cursor: pointer; padding: .2rem .6rem; border: 1px solid var(--line); border-radius: .4rem; }
#en:checked ~ nav label[for=en], #ko:checked ~ nav label[for=ko] { background: var(--bar); color: var(--bg); }
main { display: none; } #en:checked ~ main.en, #ko:checked ~ main.ko { display: block; }
@media print { nav { display: none; } }
"""


def page(title: str, bodies: Mapping[str, str], first: str = "en") -> str:
    """`bodies`: HTML by language. Every text in it must already be escaped."""
    switches = "".join(
        f'<input type="radio" name="language" id="{code}"{" checked" if code == first else ""}>'
        for code, _ in _LANGUAGES
    )
    labels = "".join(f'<label for="{code}">{name}</label> ' for code, name in _LANGUAGES)
    mains = "".join(f'<main class="{code}" lang="{code}">{bodies[code]}</main>' for code, _ in _LANGUAGES)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html>\n<html lang="{first}"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{switches}<nav>{labels}</nav>{mains}</body></html>\n"
    )


def heading(level: int, title: str, word: str, kind: str) -> str:
    """A heading with its verdict in the colour of `kind`; both already escaped."""
    return f'<h{level}>{title}: <span class="{kind}">{word}</span></h{level}>'
