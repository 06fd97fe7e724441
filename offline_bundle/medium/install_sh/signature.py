"""Step 2 of install.sh: the signature, then bundle.json, then the exact set of files.

    the trusted key -> model.sig -> bundle.json -> the names and sizes of all files below runtime/

Nothing is parsed before its signature or hash is verified, except the signature's own envelope. The format, the rules
for paths and the comparison of files are the modules that Atoll itself uses (offline_bundle/bundle/verify.py is the
same order of checks). Only two things differ here, because no package is installed yet: ECDSA is plain Python
(p256.py), and bundle.json is checked without pydantic.
"""

import hashlib
import re

from offline_bundle.errors import CONTENT, SPACE_IO, UNTRUSTED, BundleError
from offline_bundle.limits import MAX_FILE_SIZE, MAX_FILES, MAX_MANIFEST, MAX_SIGNATURE
from offline_bundle.medium.install_sh.terminal import TAMPERED, refused
from offline_bundle.medium.install_sh.trusted_key import choose_key
from offline_bundle.medium.language import plain, t
from offline_bundle.medium.p256 import verify
from offline_bundle.names import check_path, collision, show
from offline_bundle.signing.signature_format import read_envelope, read_statement, signed_bytes
from offline_bundle.signing.strict_json import canonical, loads
from offline_bundle.untrusted_dir import check_file_set, read_small


def verify_signature(root, options):
    """(manifest, its bytes, the signature, the key) once signature, bundle.json and the set of files hold."""
    try:
        signature = read_small(root, "model.sig", MAX_SIGNATURE)
    except BundleError as e:
        if e.exit_code == SPACE_IO:
            raise
        raise refused(
            UNTRUSTED,
            t("The bundle has no usable signature: {message}", message=e.message),
            t("An unsigned bundle is never accepted; get it again from its vendor."),
        ) from None
    claimed, payload, raw = read_envelope(signature)
    point, text, fingerprint, now = choose_key(options, claimed)
    if not verify(point, raw, signed_bytes(payload)):
        raise refused(
            UNTRUSTED,
            t("The signature is not valid: model.sig was changed, or was not made by the trusted key."),
            TAMPERED,
        )
    resources = read_statement(payload)
    data = read_small(root, "bundle.json", MAX_MANIFEST)
    if resources.pop("bundle.json", None) != hashlib.sha256(data).hexdigest():
        raise refused(
            CONTENT, t("bundle.json is not the file that was signed: it was changed after signing."), TAMPERED
        )
    manifest = read_manifest(data, resources)
    sizes = {f["path"]: f["size"] for f in manifest["files"]}
    check_file_set(root, {**sizes, "bundle.json": len(data), "model.sig": len(signature)})
    return manifest, data, signature, {"fingerprint": fingerprint, "pem": text, "new": now}


def read_manifest(data, resources):
    """bundle.json once its hash holds: canonical, of a runtime, and naming the very files that were signed."""
    try:
        manifest = loads(data)
        if canonical(manifest) != data:
            raise ValueError(t("it is not in canonical form"))
        if manifest["kind"] != "runtime" or manifest["schema_version"] != 1:
            raise ValueError(t("it describes another kind of bundle, or has a newer format"))
        if not re.match(r"[0-9][0-9A-Za-z.+-]{0,63}\Z", manifest["version"]) or type(manifest["sequence"]) is not int:
            raise ValueError(t("its version or sequence is malformed"))
        listed = {check_path(f["path"]): f["sha256"] for f in manifest["files"]}
        if any(type(f["size"]) is not int or not 0 <= f["size"] <= MAX_FILE_SIZE for f in manifest["files"]):
            raise ValueError(t("the size of a file is out of range"))
        if listed != resources or len(manifest["files"]) != len(listed) or len(listed) > MAX_FILES:
            raise ValueError(t("it and the signature name different files"))
        if collision([*listed, "bundle.json", "model.sig"]):
            raise ValueError(t("two of its paths collide on some file systems"))
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        message = t("bundle.json is not a valid manifest: {why}.", why=show(plain(e)))
        raise refused(CONTENT, message, TAMPERED) from None
