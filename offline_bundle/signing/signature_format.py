"""The OpenSSF Model Signing format (v1.0) as text, in our profile: method `files`, SHA-256, ECDSA P-256.

    model.sig = Sigstore bundle JSON { mediaType, verificationMaterial.publicKey.hint, dsseEnvelope }
    dsseEnvelope.payload = base64( in-toto Statement { subject: root digest, predicate.resources: path → SHA-256 } )
    signed bytes = DSSE PAE: "DSSEv1" SP len(type) SP type SP len(payload) SP payload
    root digest = SHA-256( raw digests of the resources, concatenated in their order )

Sources: https://github.com/ossf/model-signing-spec and https://github.com/secure-systems-lab/dsse (protocol.md).

Standard library only, because this is also a part of install.sh. The caller verifies the signature itself between
`read_envelope` and `read_statement`, with `cryptography` (model_signing.py) or in plain Python (medium/p256.py).
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Any

from offline_bundle.errors import CONTENT, UNTRUSTED, BundleError
from offline_bundle.limits import MAX_FILES, MAX_SIGNATURE
from offline_bundle.names import path_problem, show
from offline_bundle.signing.strict_json import canonical, loads
from offline_bundle.text import plain, t

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"

_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, binascii.Error)  # JSON of another shape


def make_statement(resources: Mapping[str, str], model_name: str) -> bytes:
    """The payload to sign for `resources` (path → SHA-256 hex)."""
    ordered = sorted(resources.items())
    return canonical({
        "_type": STATEMENT_TYPE,
        "subject": [{"name": model_name, "digest": {"sha256": _root_digest([d for _, d in ordered])}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False},
            "resources": [{"name": n, "algorithm": "sha256", "digest": d} for n, d in ordered],
        },
    })  # fmt: skip


def make_envelope(payload: bytes, raw_signature: bytes, fingerprint: str) -> bytes:
    """The text of model.sig."""
    return canonical({
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": fingerprint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(raw_signature).decode(), "keyid": ""}],
        },
    })  # fmt: skip


def signed_bytes(payload: bytes) -> bytes:
    """What the signature is computed over."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def read_envelope(signature: bytes) -> tuple[str, bytes, bytes]:
    """(fingerprint of the key that it claims, payload, raw signature) of a model.sig. All of it is still untrusted.

    Raises BundleError (untrusted).
    """
    try:
        if len(signature) > MAX_SIGNATURE:
            raise ValueError(t("it is larger than {most} bytes", most=MAX_SIGNATURE))
        bundle = loads(signature)
        if bundle["mediaType"] != MEDIA_TYPE:
            raise ValueError(t("unknown media type"))
        envelope = bundle["dsseEnvelope"]
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise ValueError(t("unknown payload type"))
        if len(envelope["signatures"]) != 1:
            raise ValueError(t("expected exactly one signature"))
        hint = bundle["verificationMaterial"]["publicKey"]["hint"]
        if not _is_sha256(hint):
            raise ValueError(t("the key hint is not a SHA-256"))
        payload = base64.b64decode(envelope["payload"], validate=True)
        return hint, payload, base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
    except _MALFORMED as e:
        raise BundleError(
            t("model.sig is not a model signature ({why}).", why=show(plain(e)) or t("malformed")),
            t("Do not use this bundle. Get it again from its vendor."),
            UNTRUSTED,
        ) from e


def read_statement(payload: bytes) -> dict[str, str]:
    """Path → SHA-256 hex of a statement whose signature is valid. Raises BundleError (content) outside our profile."""
    try:
        return _resources(loads(payload))
    except _MALFORMED as e:
        raise BundleError(
            t("The signature is valid, but what it signs is outside our profile of the format: {why}.",
              why=show(plain(e))),
            t("Sign with method 'files' and sha256, as 'atoll bundle build' does."),
            CONTENT,
        ) from e


def _resources(statement: Any) -> dict[str, str]:
    _require(statement["_type"] == STATEMENT_TYPE, t("unknown statement type"))
    _require(statement["predicateType"] == PREDICATE_TYPE, t("unknown predicate type"))
    _require(len(statement["subject"]) == 1, t("expected one subject"))
    predicate = statement["predicate"]
    how = predicate["serialization"]
    _require(how["method"] == "files", t("method is not 'files'"))
    _require(how["hash_type"] == "sha256", t("hash_type is not 'sha256'"))
    _require(how.get("allow_symlinks", False) is False, t("symlinks are allowed"))
    # `ignore_paths` may be there (the model_signing command writes it). We ignore no path, whatever it says.
    _require(len(predicate["resources"]) <= MAX_FILES + 1, t("too many files"))
    resources: dict[str, str] = {}
    for item in predicate["resources"]:
        name, digest = item["name"], item["digest"]
        _require(isinstance(name, str) and name not in resources, t("a file is listed twice"))
        if (why := path_problem(name)) is not None:
            raise ValueError(t("the path '{name}' {why}", name=show(name), why=why))
        _require(item["algorithm"] == "sha256" and _is_sha256(digest), t("{name} is not hashed with sha256", name=name))
        resources[name] = digest
    root = _root_digest(list(resources.values()))
    _require(statement["subject"][0]["digest"] == {"sha256": root}, t("the root digest does not match the files"))
    return resources


def _root_digest(digests: list[str]) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(d) for d in digests)).hexdigest()


def _is_sha256(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)
