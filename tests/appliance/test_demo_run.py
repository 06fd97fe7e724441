"""`make demo` as a newcomer runs it: killed, interrupted, completed, repeated, stopped. Real model, real processes."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Place:
    """A prefix of its own, and what each run in it printed."""

    prefix: Path

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "appliance.demo", "--prefix", str(self.prefix)],
            cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self) -> str:
        with self.start() as process:
            output = process.communicate(timeout=280)[0]
        assert process.returncode == 0, output
        return output

    def end_at(self, mark: str, number: int) -> int:
        """Start a run, send it signal `number` at the line that contains `mark`; returns its exit status."""
        with self.start() as process:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                if mark in line:
                    break
            else:
                pytest.fail("".join(seen))
            os.killpg(process.pid, number)
            process.stdout.read()
        return process.returncode

    def atoll(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "appliance.cli", *arguments, "--prefix", str(self.prefix)]
        return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("demo") / "here")
    yield place
    place.atoll("stop")


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int | None]:
    """Somebody else listens on the demonstration's first choice."""
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            stranger.bind(("127.0.0.1", 8000))
            stranger.listen()
        except OSError:
            pass  # somebody does already
        yield 8000


@pytest.fixture(scope="module")
def first_run(place: Place, taken_port: int) -> str:
    """Two broken runs and the one that completes them."""
    assert place.end_at("[3/7]", signal.SIGKILL) == -signal.SIGKILL
    assert place.end_at("stage:", signal.SIGINT) == 130
    return place.run()


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


@pytest.mark.timeout(600)
def test_interrupted_runs_are_completed(place: Place, first_run: str):
    assert "Paris" in found(r"Answer: +(.*)", first_run)
    assert float(found(r"([\d.]+) tokens/s, first token", first_run)) > 0
    assert (place.prefix / "opt/atoll/current").is_symlink()


def test_a_taken_port_is_avoided(first_run: str, taken_port: int):
    assert f"127.0.0.1:{taken_port}/" not in first_run
    assert re.search(r"Endpoint +http://127\.0\.0\.1:\d+/v1", first_run)


def test_what_is_secret_is_private(place: Place, first_run: str):
    key = found(r"API key +(sk-\S+)", first_run)
    for path in (place.prefix / "api-key", place.prefix / "publisher/demo.key"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert place.prefix.stat().st_mode & 0o777 == 0o700
    log = (place.prefix / "var/log/atoll/serve.log").read_text()
    assert key not in log
    assert "city of Paris" not in log


def test_the_printed_endpoint_and_key_work(first_run: str):
    url, key = found(r"Endpoint +(\S+)", first_run), found(r"API key +(\S+)", first_run)
    with httpx.Client(trust_env=False) as client:
        assert client.get(f"{url}/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert client.get(f"{url}/models", headers={"Authorization": "Bearer sk-wrong"}).status_code == 401


ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}


def test_the_printed_python_runs(place: Place, first_run: str):
    python = first_run[first_run.index("    from openai") : first_run.index("  Verify the bundle")]
    program = "\n".join(line[4:] for line in python.splitlines())
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 5


def test_the_printed_pilot_plan_fits_and_the_end_is_the_checklist(place: Place, first_run: str):
    plan = found(r"atoll pilot start --plan (\S+)", first_run)
    checked = subprocess.run([sys.executable, "-m", "appliance.cli", "pilot", "plan", plan], capture_output=True,
                             text=True, cwd=REPOSITORY)  # fmt: skip
    assert checked.returncode == 0, checked.stderr
    assert "everybody" in checked.stdout
    assert "pilot is yours" in first_run
    steps = first_run[first_run.index("Look at it") :]
    assert re.findall(r"^  (\d)  ", steps, re.MULTILINE) == list("123456"), steps


@pytest.mark.skipif(not shutil.which("curl"), reason="this machine has no curl")
def test_the_printed_curl_line_runs(place: Place, first_run: str):
    curl = first_run[first_run.index("    curl") : first_run.index("  or with Python")]
    result = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, env=ENVIRONMENT)
    assert result.stdout.rstrip().endswith("data: [DONE]"), result.stdout + result.stderr


def test_a_second_run_recognises_everything(place: Place, first_run: str):
    again = place.run()
    # Model, publisher, bundle and install; verify and ask always run. A service older than its code is restarted.
    assert again.count("· already done ·") == (4 if "the code has changed" in again else 5), again
    for pattern in (r"Endpoint +(\S+)", r"API key +(\S+)"):
        assert found(pattern, again) == found(pattern, first_run)


def test_a_changed_bundle_is_refused(place: Place, first_run: str):
    bundle = next((place.prefix / "bundles").iterdir())
    weights = bundle / "model/model.safetensors"
    with weights.open("r+b") as file:
        file.seek(200_000_000)
        byte = file.read(1)
        file.seek(200_000_000)
        file.write(bytes([byte[0] ^ 1]))
    try:
        with place.start() as process:
            output = process.communicate(timeout=120)[0]
        assert process.returncode == 11, output
        assert "model.safetensors" in output
        assert "rm -r" in output
    finally:
        with weights.open("r+b") as file:
            file.seek(200_000_000)
            file.write(byte)


def test_two_at_once_are_refused(place: Place, first_run: str):
    import fcntl

    with (place.prefix / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with place.start() as process:
            output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output
    assert "Another demonstration is at work" in output


def test_stopped_it_starts_again(place: Place, first_run: str):
    assert place.atoll("stop").returncode == 0
    assert place.atoll("status").returncode != 0
    again = place.run()
    assert found(r"API key +(\S+)", again) == found(r"API key +(\S+)", first_run)
    assert place.atoll("status").returncode == 0
