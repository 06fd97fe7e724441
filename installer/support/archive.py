"""The support bundle: one archive for whoever helps, without keys, prompts or anything that is not on the list.

    allow-list (items.py) → patterns of secrets (redact.py) → addresses, if requested → a last check → tar.gz, 0600

MANIFEST.json in it says for each member what it is, why it is included and what was removed from it; and for what is
missing, why.
"""

import gzip
import hashlib
import io
import json
import os
import socket
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.base.timestamps import compact_timestamp, timestamp
from installer.support import items as support_items
from installer.support.items import Item
from installer.support.redact import Addresses, looks_secret, secrets_out
from installer.tls import certificates
from installer.tls import endpoint as tls_endpoint

ITEM_BYTES = 8 << 20      # of one member; a log loses its beginning
TOTAL_BYTES = 48 << 20    # of all members, before compression
SINCE = "3 days ago"


@dataclass(slots=True)
class Taken:
    """One member, or the reason why it is missing."""

    name: str
    why: str
    bytes: int = 0
    sha256: str = ""
    cut: bool = False
    not_taken: str = ""


@dataclass(slots=True)
class SupportBundle:
    """What was written."""

    path: Path
    bytes: int = 0
    addresses_redacted: bool = False
    members: list[Taken] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def planned(layout: Layout, extra: Sequence[Item] = (), *, since: str = SINCE) -> list[Item]:
    """What would be taken."""
    return [*support_items.items(layout, since), *extra]


def make(
    layout: Layout,
    out: Path,
    *,
    extra: Sequence[Item] = (),
    since: str = SINCE,
    redact_addresses: bool = False,
    said: Callable[[Taken], None] = lambda taken: None,
) -> SupportBundle:
    """Collect the members and write the archive to `out`, which must not exist yet.

    Raises InstallError: nothing installed or `out` exists (2), disk (30).
    """
    if os.path.lexists(out):
        raise InstallError(
            t("{out} already exists.", out=out), exit_code=ExitCode.USAGE, changed=t("Nothing was written."),
            hint=t("Choose another file with --out, or remove that one."),
        )
    if not layout.journal.parent.exists() and not layout.current.is_symlink():
        from installer.operate.lifecycle import history_of

        history_of(layout)
    clean = _cleaner(layout, redact_addresses)
    known = support_items.private_parts(layout)
    bundle = SupportBundle(out, addresses_redacted=redact_addresses)
    contents: list[tuple[str, bytes]] = []
    total = 0
    for item in planned(layout, extra, since=since):
        taken = Taken(item.name, item.why)
        data = _take(item, clean, taken)
        if data is not None and (secret := looks_secret(data, known)):
            data, taken.not_taken = None, t("it still held {secret}", secret=secret)
        if data is not None and total + len(data) > TOTAL_BYTES:
            data, taken.not_taken = None, t("the archive may have {most} MiB", most=TOTAL_BYTES >> 20)
        if data is not None:
            total += len(data)
            taken.bytes, taken.sha256 = len(data), hashlib.sha256(data).hexdigest()
            contents.append((item.name, data))
        bundle.members.append(taken)
        said(taken)
    manifest = {
        "schema_version": 1,
        "made_at": timestamp(),
        "addresses_redacted": redact_addresses,
        "members": [asdict(taken) for taken in bundle.members],
    }
    contents.insert(0, ("MANIFEST.json", (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()))
    archive = _archive(contents, out.name.partition(".")[0])
    fs.write_atomic(out, archive, 0o600)
    bundle.bytes = len(archive)
    return bundle


def default_name() -> str:
    host = "".join(c for c in socket.gethostname() if c.isalnum() or c == "-")[:32] or "host"
    return f"atoll-support-{host}-{compact_timestamp()}.tar.gz"


def _cleaner(layout: Layout, redact_addresses: bool) -> Callable[[str], str]:
    if not redact_addresses:
        return secrets_out
    names = [socket.gethostname(), *certificates.machine_names()]
    for certificate in tls_endpoint.read_public(layout.server_cert)[:1]:
        names += certificates.names_of(certificate)
    addresses = Addresses(names)
    return lambda text: addresses.out(secrets_out(text))


def _take(item: Item, clean: Callable[[str], str], taken: Taken) -> bytes | None:
    """The member's bytes, cleaned and within bounds; None, with the reason noted, if that is not possible."""
    try:
        text = item.take()
    except PermissionError:
        taken.not_taken = t("this user may not read it; root may")
    except FileNotFoundError as error:
        name = Path(error.filename).name if error.filename else t("no file")
        taken.not_taken = t("there is none ({name})", name=name)
    except (OSError, InstallError) as error:
        taken.not_taken = clean(getattr(error, "message", "") or str(error.strerror or error))[:300]  # type: ignore[union-attr]
    except Exception as error:  # one failing part must not cost the others; the error's text could hold anything
        taken.not_taken = t("it failed: {name}", name=type(error).__name__)
    else:
        if len(text) > ITEM_BYTES:
            text, taken.cut = text[-ITEM_BYTES:], True
            text = text[text.index("\n") + 1 :] if "\n" in text else text
        return clean(text).encode(errors="replace")
    return None


def _archive(contents: Sequence[tuple[str, bytes]], folder: str) -> bytes:
    """A tar.gz whose members belong to nobody, and whose owner alone can open them."""
    raw = io.BytesIO()
    now = int(time.time())
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=now) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in contents:
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mtime, info.mode = len(data), now, 0o600
            tar.addfile(info, io.BytesIO(data))
    return raw.getvalue()
