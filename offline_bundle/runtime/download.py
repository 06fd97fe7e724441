"""Brings the chosen wheels to this disk: several at a time, each going on where an earlier run stopped, each hashed.

What the index serves openly is read by HTTP with a Range, through the proxy and the certificates that pip is set to.
What it gives to nobody but pip (an index with a password) pip fetches, one wheel at a time.
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
_TIMEOUT = 60.0  # seconds of silence
_TRIES = 6  # in a row without a byte
_OWN = ("file", "http", "https")


@dataclass(frozen=True, slots=True)
class Parcel:
    """A wheel to bring: its size in bytes, and how."""

    pick: Pick
    size: int | None  # None: only pip gets it, and it does not say
    kept: int  # bytes that an earlier run left

    @property
    def local(self) -> bool:
        return self.pick.url.startswith("file:")

    @property
    def weight(self) -> int:
        """Its part in a progress."""
        return self.size or 1


@dataclass(frozen=True, slots=True)
class Load:
    """All that is to be brought, in bytes."""

    parcels: tuple[Parcel, ...]

    @property
    def total(self) -> int:
        return sum(p.size or 0 for p in self.parcels)

    @property
    def to_fetch(self) -> int:
        """From the network, less what an earlier run left."""
        return sum((p.size or 0) - p.kept for p in self.parcels if not p.local)

    @property
    def kept(self) -> int:
        return sum(p.kept for p in self.parcels)

    @property
    def unknown(self) -> int:
        """Wheels whose size nobody says."""
        return sum(p.size is None for p in self.parcels)


class Downloads:
    """A directory of wheels on their way; it outlives a run that was stopped."""

    def __init__(self, directory: Path, pip: Pip) -> None:
        self.directory, self._pip = directory, pip
        self._opener = _opener(pip)

    def plan(self, picks: Sequence[Pick]) -> Load:
        """Ask for the size of each wheel; nothing is fetched."""
        with ThreadPoolExecutor(2 * _CONNECTIONS) as pool:
            return Load(tuple(pool.map(self._parcel, picks)))

    def fetch(self, load: Load, source: Source, progress: Progress) -> None:
        """Bring all of it into the directory. Progress stage: ``download``, in bytes.

        Raises BundleError: 11 if a wheel is not what the index names, 13 if the network fails, 30 for the disk.
        """
        self._check_space(load)
        self.directory.mkdir(exist_ok=True)
        largest_first = sorted(load.parcels, key=lambda p: -p.weight)
        parallel.run(
            largest_first, lambda parcel, tick: self._bring(parcel, source, tick), stage="download",
            total=sum(p.weight for p in load.parcels), progress=progress, workers=_CONNECTIONS,
        )  # fmt: skip

    def path(self, pick: Pick) -> Path:
        return self.directory / pick.file

    def _parcel(self, pick: Pick) -> Parcel:
        part, whole = self._partial(pick), self.path(pick)
        kept = whole.stat().st_size if whole.exists() else part.stat().st_size if part.exists() else 0
        scheme = urlsplit(pick.url).scheme
        try:
            if scheme == "file":
                return Parcel(pick, _local(pick).stat().st_size, 0)
            if scheme in _OWN and pick.sha256 is not None:
                request = Request(pick.url, method="HEAD")  # noqa: S310  the scheme was looked at
                with self._opener.open(request, timeout=_TIMEOUT) as answer:
                    size = int(answer.headers["Content-Length"])
                return Parcel(pick, size, min(kept, size))
        except (OSError, http.client.HTTPException, TypeError, ValueError):
            pass  # pip will know how
        return Parcel(pick, None, 0)

    def _check_space(self, load: Load) -> None:
        need = load.total - load.kept + 64 * limits.MIB
        if shutil.disk_usage(self.directory.parent).free < need:
            raise BundleError(
                t("The packages take {need} MiB, and {where} has only {free} MiB free.", need=need >> 20,
                  where=self.directory.parent, free=shutil.disk_usage(self.directory.parent).free >> 20),
                t("Free space or choose another disk, then run the same command again."),
                SPACE_IO,
            )

    def _partial(self, pick: Pick) -> Path:
        return self.directory / f".{(pick.sha256 or 'any')[:16]}-{pick.file}.partial"[-200:]

    def _bring(self, parcel: Parcel, source: Source, tick: Tick) -> None:
        pick, target = parcel.pick, self.path(parcel.pick)
        if target.exists() and pick.sha256 is not None and _digest(target) == pick.sha256:
            tick(parcel.weight)
        elif parcel.size is None:
            self._by_pip(pick, source)
            tick(parcel.weight)
        elif parcel.local:
            self._copy(pick, tick)
        else:
            self._fetch(parcel, parcel.size, tick)

    def _copy(self, pick: Pick, tick: Tick) -> None:
        partial = self._partial(pick)
        with _local(pick).open("rb") as source, partial.open("wb") as out:
            digest = hashlib.sha256()
            while block := source.read(2 * limits.MIB):
                out.write(block)
                digest.update(block)
                tick(len(block))
        self._keep(pick, digest.hexdigest())

    def _fetch(self, parcel: Parcel, size: int, tick: Tick) -> None:
        """By HTTP. A connection that breaks is made again, and goes on from the byte where it broke."""
        pick, idle, from_the_start = parcel.pick, 0, False
        so_far = _SoFar(self._partial(pick), tick)
        while True:
            before, error = so_far.size, self._read_on(pick, so_far) if so_far.size < size else None
            if so_far.size >= size:
                if so_far.sha256 == pick.sha256 or from_the_start:
                    return self._keep(pick, so_far.sha256)
                so_far.restart()  # what an earlier run left may be of another file, or spoilt
                from_the_start = True
                continue
            idle = 0 if so_far.size > before else idle + 1
            if idle >= _TRIES:
                raise _network(pick, error)
            for _ in range(min(2**idle, 60)):
                time.sleep(0.25)
                tick(0)  # stops here when the run is being cancelled

    def _read_on(self, pick: Pick, so_far: "_SoFar") -> Exception | None:
        """One connection's worth; what ended it, if anything did."""
        headers = {"Range": f"bytes={so_far.size}-"} if so_far.size else {}
        request = Request(pick.url, headers=headers)  # noqa: S310  the scheme was looked at
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as answer:
                if answer.status != 206:  # all of it: the server knows no ranges
                    so_far.restart()
                so_far.add(answer)
            return None
        except urllib.error.HTTPError as e:
            if e.code < 500 and e.code not in (408, 425, 429):
                raise _network(pick, e) from e
            return e
        except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as e:
            return e

    def _keep(self, pick: Pick, digest: str) -> None:
        if pick.sha256 not in (None, digest):
            self._partial(pick).unlink()
            raise _changed(pick)
        self._partial(pick).replace(self.path(pick))

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


class _SoFar:
    """What is there of a file: its bytes on disk, and their hash."""

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
        """All that the connection still gives."""
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
        t("Run the same command again: it goes on where it stopped."),
        MISSING,
    )


def _opener(pip: Pip) -> OpenerDirector:
    """What opens addresses with the proxy and the certificates of pip's settings; no other scheme than HTTP."""
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
    """Forget the downloads."""
    shutil.rmtree(directory, ignore_errors=True)


def link(source: Path, target: Path) -> None:
    """`source` under another name as well; under that name only, where the disk knows no hard links."""
    try:
        os.link(source, target)
    except OSError:
        source.replace(target)
