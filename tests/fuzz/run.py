"""Real fuzzers: `python tests/fuzz/run.py [--seconds 600] [--seed N] [--case N] [http] [parsers] [ipc]`.

Prints a JSON line for each target; the exit status is 1 if one of them shows a defect. A defect names its seed and
case; `--case` tries that one alone.
"""

import argparse
import json
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), *(str(TESTS / name) for name in
                ("fuzz", "engine/server", "engine/text/parsers"))]


def main() -> int:
    import targets
    from fuzzing import Defect, fuzz

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None, help="another one each time if it is left out")
    parser.add_argument("--case", type=int, default=None)
    options = parser.parse_args()
    failed = False
    for name in options.targets or list(targets.TARGETS):
        seed = options.seed if options.seed is not None else time.time_ns() % 10**9
        row: dict[str, object] = {"target": name, "seed": seed, "seconds": options.seconds}
        try:
            row["cases"] = fuzz(targets.TARGETS[name], seconds=options.seconds, seed=seed, first=options.case or 0,
                                most=1 if options.case is not None else None)
        except Defect as defect:
            failed, row["defect"] = True, str(defect)
        print(json.dumps(row), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
