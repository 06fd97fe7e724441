"""The licences of every package of a runtime, and its bill of materials (CycloneDX 1.6)."""

import json
import re
import uuid
import zipfile
from collections.abc import Iterator, Sequence

from offline_bundle.names import path_problem
from offline_bundle.runtime.wheels import Wheel

_NAMES = ("license", "licence", "copying", "notice", "copyright", "authors")
_NAMESPACE = uuid.UUID("0f7cf1c1-86a5-5b7a-8f5c-7d2f4c8b9a63")  # fixed: equal content gets an equal serial number
_MAX_TEXT = 8 << 20


def license_texts(wheel: Wheel) -> Iterator[tuple[str, bytes]]:
    """(file name, text) of each licence in the wheel; a note if there is none."""
    with zipfile.ZipFile(wheel.path) as archive:
        found = 0
        for item in sorted(archive.infolist(), key=lambda i: i.filename):
            place, _, rest = item.filename.partition(".dist-info/")
            if not rest or "/" in place or item.is_dir() or item.file_size > _MAX_TEXT:
                continue
            if rest.startswith(("licenses/", "license_files/")) or rest.lower().startswith(_NAMES):
                found += 1
                yield _plain_name(rest.removeprefix("licenses/")), archive.read(item)
    if not found:
        told = wheel.licence or "no licence"
        note = f"{wheel.name} {wheel.version} carries no licence text. Its metadata says: {told}. {wheel.homepage}\n"
        yield "NO-TEXT.txt", note.encode()


def overview(wheels: Sequence[Wheel]) -> bytes:
    """A table with a line for each package and its licence."""
    lines = [f"{w.name} {w.version}\t{w.licence or 'see the text'}\t{w.homepage}" for w in wheels]
    return ("package\tlicence\thomepage\n" + "\n".join(lines) + "\n").encode()


def _plain_name(path: str) -> str:
    """Any path as one plain ASCII file name."""
    name = re.sub(r"[^A-Za-z0-9._+=@,-]+", "-", path).strip("-.")[-100:].lstrip("-.")
    return name if name and path_problem(name) is None else f"text-{name.replace('.', '-') or 'x'}.txt"


def sbom(version: str, created: str, wheels: Sequence[Wheel]) -> bytes:
    """Every wheel as a component with its hash, its origin as a package URL, and its licence."""
    root = f"pkg:pypi/atoll@{version}"
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{w.name}@{w.version}#{w.path.name}",
            "name": w.name,
            "version": w.version,
            "purl": f"pkg:pypi/{w.name}@{w.version.replace('+', '%2B')}?file_name={w.path.name.replace('+', '%2B')}",
            "hashes": [{"alg": "SHA-256", "content": w.sha256}],
            **({"licenses": [{"license": {"name": w.licence}}]} if w.licence else {}),
        }
        for w in wheels
    ]
    identity = "\n".join([version, created, *(w.path.name + w.sha256 for w in wheels)])
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, identity)}",
        "version": 1,
        "metadata": {
            "timestamp": created,
            "component": {"type": "application", "bom-ref": root, "name": "atoll", "version": version},
        },
        "components": components,
        "dependencies": [{"ref": root, "dependsOn": [c["bom-ref"] for c in components]}],
    }
    return (json.dumps(document, indent=2, ensure_ascii=True) + "\n").encode()
