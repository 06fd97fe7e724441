"""Sign and verify in the OpenSSF Model Signing format (v1.0), profile: method `files`, SHA-256, ECDSA P-256.

    model.sig = Sigstore bundle JSON { mediaType, verificationMaterial.publicKey.hint, dsseEnvelope }
    dsseEnvelope.payload = base64( in-toto Statement { subject: root digest, predicate.resources: path → SHA-256 } )
    signed bytes = DSSE PAE: "DSSEv1" SP len(type) SP type SP len(payload) SP payload
    root digest = SHA-256( raw digests of the resources, concatenated in their order )

Sources: https://github.com/ossf/model-signing-spec and https://github.com/secure-systems-lab/dsse (protocol.md).
Only the envelope is parsed before the signature holds; the statement inside is parsed after.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from offline_bundle import limits, names
from offline_bundle.errors import CONTENT, UNTRUSTED, BundleError
from offline_bundle.signing.keys import PublicKey, TrustedKeys, public_of
from offline_bundle.signing.strict_json import StrictJSONError, canonical, loads
from offline_bundle.text import joined, plain, t

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"

_ECDSA_SHA256 = ec.ECDSA(hashes.SHA256())


def sign(resources: Mapping[str, str], model_name: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    """The text of model.sig over `resources` (path → SHA-256 hex)."""
    ordered = sorted(resources.items())
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": model_name, "digest": {"sha256": _root_digest([d for _, d in ordered])}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False},
            "resources": [{"name": n, "algorithm": "sha256", "digest": d} for n, d in ordered],
        },
    }
    payload = canonical(statement)
    envelope = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": public_of(key).fingerprint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(key.sign(_pae(payload), _ECDSA_SHA256)).decode(), "keyid": ""}],
        },
    }
    text = canonical(envelope)
    if len(text) > limits.MAX_SIGNATURE:
        raise BundleError(
            t("{count} files are too many for one signature.", count=len(resources)), t("Bundle fewer files."), CONTENT
        )
    return text


def verify(signature: bytes, trusted: Mapping[str, PublicKey]) -> tuple[dict[str, str], PublicKey]:
    """Check model.sig against the pinned keys; return the signed resources (path → SHA-256 hex) and the key used.

    Raises BundleError: untrusted (10) for the envelope, a key that is unknown or revoked, or the signature; content
    (11) for a signed statement that is outside our profile.
    """
    hint, payload, raw_signature = _open_envelope(signature)
    revoked: Mapping[str, str] = trusted.revoked if isinstance(trusted, TrustedKeys) else {}
    if hint in revoked:
        raise BundleError(
            t("It is signed by the key {hint}, which was revoked here: {why}.", hint=hint, why=revoked[hint]),
            t("Do not use it. Ask the vendor for one that is signed by his new key."),
            UNTRUSTED,
        )
    key = next((k for f, k in trusted.items() if hmac.compare_digest(f.encode(), hint.encode())), None)
    if key is None:
        raise BundleError(
            t("The bundle is signed by the key {hint}, which is not trusted here.", hint=names.show(hint)),
            t("Trusted: {names}. Compare fingerprints with the vendor; do not trust a key because it came with the "
              "bundle.", names=joined(trusted)),
            UNTRUSTED,
        )
    try:
        key.key.verify(raw_signature, _pae(payload), _ECDSA_SHA256)
    except InvalidSignature as e:
        raise BundleError(
            t("The signature is not valid: model.sig was changed, or was not made by the trusted key."),
            t("Do not use this bundle. Get it again from its vendor."),
            UNTRUSTED,
        ) from e
    try:
        return _resources(loads(payload)), key
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise BundleError(
            t("The signature is valid, but what it signs is outside our profile of the format: {why}.",
              why=names.show(plain(e))),
            t("Sign with method 'files' and sha256, as 'atoll bundle build' does."),
            CONTENT,
        ) from e


def claimed_fingerprint(signature: bytes) -> str:
    """The fingerprint that model.sig claims to be signed by. Proves nothing."""
    return _open_envelope(signature)[0]


def _pae(payload: bytes) -> bytes:
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _root_digest(digests: list[str]) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(d) for d in digests)).hexdigest()


def _open_envelope(signature: bytes) -> tuple[str, bytes, bytes]:
    """(hint, payload, raw signature) of a model.sig. Everything here is still untrusted."""
    try:
        if len(signature) > limits.MAX_SIGNATURE:
            raise ValueError(t("it is larger than {most} bytes", most=limits.MAX_SIGNATURE))
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
    except (StrictJSONError, KeyError, TypeError, ValueError, IndexError, AttributeError, binascii.Error) as e:
        raise BundleError(
            t("model.sig is not a model signature ({why}).", why=names.show(plain(e)) or t("malformed")),
            t("Do not use this bundle. Get it again from its vendor."),
            UNTRUSTED,
        ) from e


def _resources(statement: Any) -> dict[str, str]:
    """Path → SHA-256 of a signed statement, after checking every field that our profile fixes."""
    _require(statement["_type"] == STATEMENT_TYPE, t("unknown statement type"))
    _require(statement["predicateType"] == PREDICATE_TYPE, t("unknown predicate type"))
    _require(len(statement["subject"]) == 1, t("expected one subject"))
    predicate = statement["predicate"]
    how = predicate["serialization"]
    _require(how["method"] == "files", t("method is not 'files'"))
    _require(how["hash_type"] == "sha256", t("hash_type is not 'sha256'"))
    _require(how.get("allow_symlinks", False) is False, t("symlinks are allowed"))
    # `ignore_paths` may be there (the model_signing command writes it); we ignore no path, whatever it says.
    _require(len(predicate["resources"]) <= limits.MAX_FILES + 1, t("too many files"))
    resources: dict[str, str] = {}
    for item in predicate["resources"]:
        name, digest = item["name"], item["digest"]
        _require(isinstance(name, str) and name not in resources, t("a file is listed twice"))
        if (why := names.problem(name)) is not None:
            raise ValueError(t("the path '{name}' {why}", name=names.show(name), why=why))
        _require(item["algorithm"] == "sha256" and _is_sha256(digest), t("{name} is not hashed with sha256", name=name))
        resources[name] = digest
    root = _root_digest(list(resources.values()))
    _require(statement["subject"][0]["digest"] == {"sha256": root}, t("the root digest does not match the files"))
    return resources


def _is_sha256(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)
