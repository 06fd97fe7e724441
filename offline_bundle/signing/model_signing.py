"""Sign with an ECDSA P-256 key, and verify against pinned keys, in the OpenSSF Model Signing format.

signature_format.py describes and reads the format itself. Only the envelope is parsed before the signature is
verified; the statement inside it is parsed after.
"""

import hmac
from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from offline_bundle import limits, names
from offline_bundle.errors import CONTENT, UNTRUSTED, BundleError
from offline_bundle.signing.keys import PublicKey, TrustedKeys, public_of
from offline_bundle.signing.signature_format import (
    make_envelope,
    make_statement,
    read_envelope,
    read_statement,
    signed_bytes,
)
from offline_bundle.text import joined, t

_ECDSA_SHA256 = ec.ECDSA(hashes.SHA256())


def sign(resources: Mapping[str, str], model_name: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    """The text of model.sig over `resources` (path → SHA-256 hex)."""
    payload = make_statement(resources, model_name)
    text = make_envelope(payload, key.sign(signed_bytes(payload), _ECDSA_SHA256), public_of(key).fingerprint)
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
    hint, payload, raw_signature = read_envelope(signature)
    revoked: Mapping[str, str] = trusted.revoked if isinstance(trusted, TrustedKeys) else {}
    if hint in revoked:
        raise BundleError(
            t("It is signed by the key {hint}, which was revoked here: {why}.", hint=hint, why=revoked[hint]),
            t("Do not use it. Ask the vendor for one that is signed with the new key."),
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
        key.key.verify(raw_signature, signed_bytes(payload), _ECDSA_SHA256)
    except InvalidSignature as e:
        raise BundleError(
            t("The signature is not valid: model.sig was changed, or was not made by the trusted key."),
            t("Do not use this bundle. Get it again from its vendor."),
            UNTRUSTED,
        ) from e
    return read_statement(payload), key


def claimed_fingerprint(signature: bytes) -> str:
    """The fingerprint that model.sig claims to be signed by. Proves nothing."""
    return read_envelope(signature)[0]
