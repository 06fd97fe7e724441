"""`make lock`: resolve every package anew, for development and for what ships, and write their exact versions.

pip resolves in a dry run, by its own settings, as for an empty environment. Local versions (`2.13.0+cpu`) are cut to
the public one: which build of PyTorch a machine gets is not the lock's business.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

_HEADER = """\
# The exact versions of all packages, for development (make setup) and for what a medium carries. Renew: make lock
# Which packages there are, and why, stands in pyproject.toml.
"""


def main() -> int:
    target = Path(sys.argv[1])
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--ignore-installed",
        "--quiet", "--report", "-", "-e", ".[dev]",
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    versions = {}
    for item in json.loads(done.stdout)["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        versions[name] = item["metadata"]["version"].partition("+")[0]
    del versions["atoll"]
    before = set(target.read_text("utf-8").splitlines()) if target.exists() else set()
    lines = [f"{name}=={version}" for name, version in sorted(versions.items())]
    target.write_text(_HEADER + "".join(f"{line}\n" for line in lines), "utf-8")
    for line in sorted(set(lines) - before):
        print(f"now {line}")
    print(f"{len(lines)} packages in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
