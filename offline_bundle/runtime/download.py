"""Download the chosen wheels: several at a time, each resumed where an earlier run stopped, each checked by its hash.

Wheels that the index serves without a password are read by HTTP with Range requests, through the proxy and certificates
of pip's settings. For the others (an index with a password) pip is run, one wheel at a time.

pip's own downloads do not replace this module: pip resumes a broken connection, but a run that was stopped starts its
unfinished wheel again from the first byte, its cache is a second copy of gigabytes, and it does not report sizes in
advance.
"""

import hashlib
import http.client
import os
import re
import shutil
import ssl
import time
import urllib.error
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    url2pathname,
)

from offline_bundle import limits, parallel
from offline_bundle.errors import CONTENT, MISSING, SPACE_IO, BundleError
from offline_bundle.parallel import Tick
from offline_bundle.progress import Progress
from offline_bundle.runtime.resolve import Pick, Pip, Source
from offline_bundle.text import t

_CONNECTIONS = 4
_TIMEOUT = 60.0  # seconds without a byte
_TRIES = 6  # connections in a row that deliver nothing
_OWN = ("file", "http", "https")


@dataclass(frozen=True, slots=True)
class WheelDownload:
    """A wheel to download."""

    pick: Pick
    size: int | None  # bytes; None: only pip can fetch it, and pip does not say
    already_here: int  # bytes that an earlier run left

    @property
    def local(self) -> bool:
        return self.pick.url.startswith("file:")

    @property
    def progress_bytes(self) -> int:
        """Its share of the progress bar."""
        return self.size or 1


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """All wheels to download; sizes are in bytes."""

    wheels: tuple[WheelDownload, ...]

    @property
    def total(self) -> int:
        return sum(p.size or 0 for p in self.wheels)

    @property
    def to_fetch(self) -> int:
        """From the network, without the bytes that an earlier run left."""
        return sum((p.size or 0) - p.already_here for p in self.wheels if not p.local)

    @property
    def already_here(self) -> int:
        return sum(p.already_here for p in self.wheels)

    @property
    def unknown(self) -> int:
        """Number of wheels whose size is unknown."""
        return sum(p.size is None for p in self.wheels)


class Downloader:
    """Downloads wheels into a directory that survives an interrupted run."""

    def __init__(self, directory: Path, pip: Pip) -> None:
        self.directory, self._pip = directory, pip
        self._opener = _opener(pip)

    def plan(self, picks: Sequence[Pick]) -> DownloadPlan:
        """Ask for the size of each wheel; nothing is fetched."""
        with ThreadPoolExecutor(2 * _CONNECTIONS) as pool:
            return DownloadPlan(tuple(pool.map(self._look_up, picks)))

    def fetch(self, plan: DownloadPlan, source: Source, progress: Progress) -> None:
        """Download all of it into the directory. Progress stage: ``download``, in bytes.

        Raises BundleError: 11 if a wheel is not what the index names, 13 if the network fails, 30 for the disk.
        """
        self._check_space(plan)
        self.directory.mkdir(exist_ok=True)
        largest_first = sorted(plan.wheels, key=lambda p: -p.progress_bytes)
        parallel.run(
            largest_first, lambda wheel, tick: self._get(wheel, source, tick), stage="download",
            total=sum(p.progress_bytes for p in plan.wheels), progress=progress, workers=_CONNECTIONS,
        )  # fmt: skip

    def path(self, pick: Pick) -> Path:
        return self.directory / pick.file

    def _look_up(self, pick: Pick) -> WheelDownload:
        part, whole = self._partial_path(pick), self.path(pick)
        here = whole.stat().st_size if whole.exists() else part.stat().st_size if part.exists() else 0
        scheme = urlsplit(pick.url).scheme
        try:
            if scheme == "file":
                return WheelDownload(pick, _local(pick).stat().st_size, 0)
            if scheme in _OWN and pick.sha256 is not None:
                request = Request(pick.url, method="HEAD")  # noqa: S310  the scheme was checked
                with self._opener.open(request, timeout=_TIMEOUT) as answer:
                    size = int(answer.headers["Content-Length"])
                return WheelDownload(pick, size, min(here, size))
        except (OSError, http.client.HTTPException, TypeError, ValueError):
            pass  # pip may be able to
        return WheelDownload(pick, None, 0)

    def _check_space(self, plan: DownloadPlan) -> None:
        need = plan.total - plan.already_here + 64 * limits.MIB
        if shutil.disk_usage(self.directory.parent).free < need:
            raise BundleError(
                t("The packages take {need} MiB, and {where} has only {free} MiB free.", need=need >> 20,
                  where=self.directory.parent, free=shutil.disk_usage(self.directory.parent).free >> 20),
                t("Free space or choose another disk, then run the same command again."),
                SPACE_IO,
            )

    def _partial_path(self, pick: Pick) -> Path:
        return self.directory / f".{(pick.sha256 or 'any')[:16]}-{pick.file}.partial"[-200:]

    def _get(self, wheel: WheelDownload, source: Source, tick: Tick) -> None:
        pick, target = wheel.pick, self.path(wheel.pick)
        if target.exists() and pick.sha256 is not None and _digest(target) == pick.sha256:
            tick(wheel.progress_bytes)
        elif wheel.size is None:
            self._by_pip(pick, source)
            tick(wheel.progress_bytes)
        elif wheel.local:
            self._copy(pick, tick)
        else:
            self._fetch(wheel, wheel.size, tick)

    def _copy(self, pick: Pick, tick: Tick) -> None:
        partial = self._partial_path(pick)
        with _local(pick).open("rb") as source, partial.open("wb") as out:
            digest = hashlib.sha256()
            while block := source.read(2 * limits.MIB):
                out.write(block)
                digest.update(block)
                tick(len(block))
        self._keep(pick, digest.hexdigest())

    def _fetch(self, wheel: WheelDownload, size: int, tick: Tick) -> None:
        """Download by HTTP. After a broken connection, a new one resumes at the first missing byte."""
        pick, idle, from_the_start = wheel.pick, 0, False
        partial = _PartialFile(self._partial_path(pick), tick)
        while True:
            before, error = partial.size, self._read_on(pick, partial) if partial.size < size else None
            if partial.size >= size:
                if partial.sha256 == pick.sha256 or from_the_start:
                    return self._keep(pick, partial.sha256)
                partial.restart()  # what an earlier run left may be damaged, or part of another file
                from_the_start = True
                continue
            idle = 0 if partial.size > before else idle + 1
            if idle >= _TRIES:
                raise _network(pick, error)
            for _ in range(min(2**idle, 60)):
                time.sleep(0.25)
                tick(0)  # raises if the run is being cancelled

    def _read_on(self, pick: Pick, partial: "_PartialFile") -> Exception | None:
        """Read from one connection until it ends; returns the error that ended it, if any."""
        headers = {"Range": f"bytes={partial.size}-"} if partial.size else {}
        request = Request(pick.url, headers=headers)  # noqa: S310  the scheme was checked
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as answer:
                if answer.status != 206:  # the whole file: the server does not support ranges
                    partial.restart()
                partial.add(answer)
            return None
        except urllib.error.HTTPError as e:
            if e.code < 500 and e.code not in (408, 425, 429):
                raise _network(pick, e) from e
            return e
        except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as e:
            return e

    def _keep(self, pick: Pick, digest: str) -> None:
        if pick.sha256 not in (None, digest):
            self._partial_path(pick).unlink()
            raise _changed(pick)
        self._partial_path(pick).replace(self.path(pick))

    def _by_pip(self, pick: Pick, source: Source) -> None:
        pinned = [f"{pick.name}=={pick.version}"]
        self._pip.run(
            "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(self.directory),
            *source.arguments, *pinned, deed=t("download {file}", file=pick.file),
        )  # fmt: skip
        path = self.path(pick)
        if not path.exists() or pick.sha256 not in (None, _digest(path)):
            path.unlink(missing_ok=True)
            raise _changed(pick)


class _PartialFile:
    """A partly downloaded file: its size so far, and the hash of those bytes."""

    def __init__(self, path: Path, tick: Tick) -> None:
        self._path, self._tick = path, tick
        self.size, self._hash = 0, hashlib.sha256()
        if path.exists():
            with path.open("rb") as file:
                while block := file.read(2 * limits.MIB):
                    self._count(block)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def add(self, answer: IO[bytes]) -> None:
        """Append all that the connection still delivers."""
        with self._path.open("r+b" if self.size else "wb") as out:
            out.seek(self.size)
            while block := answer.read(limits.MIB):
                out.write(block)
                self._count(block)

    def restart(self) -> None:
        self._tick(-self.size)
        self.size, self._hash = 0, hashlib.sha256()

    def _count(self, block: bytes) -> None:
        self._hash.update(block)
        self.size += len(block)
        self._tick(len(block))


def _local(pick: Pick) -> Path:
    return Path(url2pathname(urlsplit(pick.url).path))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _changed(pick: Pick) -> BundleError:
    return BundleError(
        t("{file} is not the file that the package index names: its hash differs.", file=pick.file),
        t("A proxy or a mirror may have changed it. Run the same command again."),
        CONTENT,
    )


def _network(pick: Pick, error: Exception | None) -> BundleError:
    why = getattr(error, "reason", None) or error or t("the connection ended early")
    return BundleError(
        t("{file} could not be downloaded: {why}.", file=pick.file, why=why),
        t("Run the same command again: it resumes where it stopped."),
        MISSING,
    )


def _opener(pip: Pip) -> OpenerDirector:
    """Opens HTTP and HTTPS addresses, and no others, with the proxy and certificates of pip's settings."""
    told: dict[str, str] = {}
    for line in pip.run("config", "list", deed=t("read pip's settings")).splitlines():
        if match := re.fullmatch(r"(global|download|install|:env:)\.(proxy|cert|client-cert)='(.*)'", line):
            told[match[2]] = match[3]
    context = ssl.create_default_context(cafile=told.get("cert") or None)
    if "client-cert" in told:
        context.load_cert_chain(told["client-cert"])
    proxies = {"http": told["proxy"], "https": told["proxy"]} if "proxy" in told else None
    opener = OpenerDirector()
    for handler in (
        ProxyHandler(proxies), HTTPHandler(), HTTPSHandler(context=context), HTTPDefaultErrorHandler(),
        HTTPRedirectHandler(), HTTPErrorProcessor(),
    ):  # fmt: skip
        opener.add_handler(handler)
    opener.addheaders = [("User-Agent", "atoll"), ("Accept-Encoding", "identity")]
    return opener


def remove(directory: Path) -> None:
    """Delete the downloads."""
    shutil.rmtree(directory, ignore_errors=True)


def link(source: Path, target: Path) -> None:
    """Give `source` a second name; on a disk without hard links, move it there."""
    try:
        os.link(source, target)
    except OSError:
        source.replace(target)
