"""The keys that this installation trusts: `etc/atoll/trust/<fingerprint>.pub`."""

from pathlib import Path

from installer import audit, fs
from installer.layout import Layout
from offline_bundle.keys import load_public


def installed_keys(layout: Layout) -> list[Path]:
    return sorted(path for path in layout.trust.glob("*.pub") if path.is_file() and not path.is_symlink())


def key_name(path: Path) -> str:
    """The file name that a key gets: the head of its fingerprint, so that the same key is one file."""
    return f"{load_public(path).fingerprint[:16]}.pub"


def trust(layout: Layout, source: Path) -> bool:
    """Add a key that the operator named; returns whether it is new. Audited."""
    key = load_public(source)
    path = layout.trust / key_name(source)
    if path.exists():
        return False
    audit.append(layout.audit, "key-trusted", fingerprint=key.fingerprint, file=str(source))
    fs.write_atomic(path, source.read_bytes(), 0o644)
    return True
