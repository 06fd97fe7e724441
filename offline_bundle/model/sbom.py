"""The bundle's bill of materials: CycloneDX 1.6 JSON (https://cyclonedx.org/docs/1.6/json/)."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from offline_bundle.model.manifest import BundleManifest, FileEntry

PATH = "sbom/bom.cdx.json"
_NAMESPACE = uuid.UUID("5d9f4d0e-6d2e-5c1b-9a5e-0b8f3f7d4c21")  # fixed: equal content gets an equal serial number


def make(manifest: BundleManifest, files: Sequence[FileEntry]) -> bytes:
    """One model component with its licence and origin (from `manifest`), and one component a file with its SHA-256."""
    model: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": f"model:{manifest.name}@{manifest.version}",
        "name": manifest.name,
        "version": manifest.version,
        "licenses": [{"expression": manifest.license.spdx}],
        "properties": [
            {"name": "atoll:source:repo", "value": manifest.source.repo},
            {"name": "atoll:source:revision", "value": manifest.source.revision},
        ],
    }
    components = [
        {
            "type": "file",
            "bom-ref": f"file:{f.path}",
            "name": f.path,
            "hashes": [{"alg": "SHA-256", "content": f.sha256}],
            "properties": [{"name": "atoll:role", "value": f.role}],
        }
        for f in files
    ]
    identity = "\n".join([manifest.name, manifest.version, manifest.created, *(f.path + f.sha256 for f in files)])
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, identity)}",
        "version": 1,
        "metadata": {"timestamp": manifest.created, "component": model},
        "components": components,
        "dependencies": [{"ref": model["bom-ref"], "dependsOn": [c["bom-ref"] for c in components]}],
    }
    return (json.dumps(document, indent=2, ensure_ascii=True) + "\n").encode()
