"""The sizing tables of docs/en/sizing.md and docs/ko/sizing.md: what `atoll plan --table` prints.

    python .ci/sizing.py            write them between the markers of both pages
    python .ci/sizing.py --check    exit 1 if a page holds something else
"""

import argparse
import re
import sys
from pathlib import Path

from appliance.service.planning.sizing import table

REPOSITORY = Path(__file__).resolve().parents[1]
MARKERS = "<!-- sizing: written by .ci/sizing.py -->", "<!-- sizing: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for language in ("en", "ko"):
        page = REPOSITORY / f"docs/{language}/sizing.md"
        before = page.read_text("utf-8")
        text = "\n".join(table(language))
        pattern = re.escape(MARKERS[0]) + ".*?" + re.escape(MARKERS[1])
        after = re.sub(pattern, lambda _, text=text: f"{MARKERS[0]}\n\n{text}\n\n{MARKERS[1]}", before, flags=re.S)
        if after == before:
            continue
        stale.append(page.relative_to(REPOSITORY).as_posix())
        if not check:
            page.write_text(after, "utf-8")
    if check and stale:
        print(f"{', '.join(stale)}: the sizing table is not what the planner says. Run: python .ci/sizing.py")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
