"""`atoll apikey --file`: keys for `atoll serve`, without an installation."""

import json
import stat
import subprocess
import sys
from pathlib import Path

from engine.server.access.auth import KeyFile


def atoll(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance", "apikey", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_key_of_a_file_opens_the_endpoint_until_it_is_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made = json.loads(atoll("new", "--name", "laptop", "--file", file, "--json").stdout)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert made["key"] not in file.read_text()
    keys = KeyFile(file)
    assert keys.check(made["key"]) is not None
    assert keys.check(made["key"][:-1]) is None
    listed = json.loads(atoll("list", "--file", file, "--json").stdout)["keys"]
    assert [(key["id"], key["state"]) for key in listed] == [(made["id"], "active")]
    assert atoll("revoke", "laptop", "--file", file).returncode == 0
    assert KeyFile(file).check(made["key"]) is None


def test_a_file_and_an_installation_are_not_meant_at_once(tmp_path: Path) -> None:
    done = atoll("new", "--name", "x", "--file", tmp_path / "keys.json", "--prefix", tmp_path)
    assert done.returncode == 2
    assert "--file and --prefix" in done.stderr
    assert not (tmp_path / "keys.json").exists()


def test_a_file_that_is_not_ours_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text("a diary")
    assert atoll("new", "--name", "x", "--file", file).returncode == 30
    assert file.read_text() == "a diary"
