"""Every link, anchor and path that a document names leads somewhere. Part of `make lint`; asks no network.

    python .ci/links.py [ROOT]      exit 1 and one line for each that does not

- relative links of every Markdown file, and their `#anchors`, as GitHub makes them of headings;
- paths in `backticks` that begin with a room, and in a table's row about a folder the files named after it;
- files named in the drawings of docs/architecture.md;
- the other way round: docs/architecture.md names every folder of code, README leads to every English page,
  and docs/performance.md to every page of measurements.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("appliance", "engine", "installer", "offline_bundle", "systemd", "tui", "tests", "docs", ".ci")
CODE = ("appliance", "engine", "installer", "offline_bundle", "tui")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
QUOTED = re.compile(r"`([^`\n]+)`")
OUTSIDE = re.compile(r"[a-z]+:")  # https:, mailto:
MAP = "docs/architecture.md"


def pages(root: Path) -> list[Path]:
    places = [root / "README.md", *(root / "docs").rglob("*.md"), root / "systemd/README.md"]
    return sorted({*places, *(root / "installer").rglob("*.md")})


def slugs(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in plain}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", text)):
        if OUTSIDE.match(target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"links to {target}, which does not exist"
        elif anchor and anchor not in slugs(file.read_text("utf-8")):
            yield f"links to {target}, which has no such heading"


def missing_paths(root: Path, text: str) -> Iterator[str]:
    prose = FENCE.sub("", text)
    for quoted in QUOTED.findall(prose):
        path = quoted.partition(":")[0]
        ours = path.startswith(tuple(f"{room}/" for room in ROOMS)) and re.fullmatch(r"[\w./@-]+", path)
        if ours and not (root / path).exists():
            yield f"names {path}, which does not exist"
    for row in re.findall(r"^\| `([\w./]+/)` \|(.*)$", prose, re.MULTILINE):
        folder, rest = row
        for name in QUOTED.findall(rest):
            if re.fullmatch(r"\w+\.py", name) and not (root / folder / name).exists():
                yield f"names {name} of {folder}, which does not exist"


def missing_in_drawings(root: Path, text: str) -> Iterator[str]:
    files = {f"/{path.relative_to(root).as_posix()}" for room in CODE for path in (root / room).rglob("*.py")}
    for language, drawing in FENCE.findall(text):
        if language == "text":
            for name in re.findall(r"[\w/]*\w\.py\b", drawing):
                if not any(file.endswith(f"/{name}") for file in files):
                    yield f"draws {name}, which does not exist"


def unmapped(root: Path, text: str) -> Iterator[str]:
    folders = {path.parent for room in CODE for path in (root / room).rglob("*.py")}
    for folder in sorted(folders):
        name = folder.relative_to(root).as_posix() + "/"
        if "__pycache__" not in name and f"`{name}`" not in text:
            yield f"does not name {name}"


def complaints(root: Path) -> Iterator[str]:
    for page in pages(root):
        text, name = page.read_text("utf-8"), page.relative_to(root).as_posix()
        found = [*broken_links(page, text), *missing_paths(root, text)]
        if name == MAP:
            found += [*missing_in_drawings(root, text), *unmapped(root, text)]
        if name == "README.md":
            english = [other.relative_to(root).as_posix() for other in sorted((root / "docs/en").glob("*.md"))]
            found += [f"leads nowhere to {other}" for other in english if f"({other}" not in text]
        if name == "docs/performance.md":
            measured = [f"performance/{other.name}" for other in sorted((root / "docs/performance").glob("*.md"))]
            found += [f"leads nowhere to {other}" for other in measured if f"({other})" not in text]
        yield from (f"{name}: {what}" for what in found)


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    found = list(complaints(root))
    print("\n".join(found) or f"Links and paths of {len(pages(root))} documents hold.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
