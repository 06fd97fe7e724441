"""Both ways with the independent tool: as its own process it verifies what we sign and signs what we verify."""

import base64
import json
from pathlib import Path

from bundle_kit import Made, independent_tool, refused
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from offline_bundle import verify_bundle


def test_a_bundle_signed_by_the_independent_tool_verifies_here(made: Made) -> None:
    ours = (made.path / "model.sig").read_bytes()
    (made.path / "model.sig").unlink()
    done = independent_tool(
        "sign", "key", made.path, "--private_key", made.keys.private_path, "--signature", made.path / "model.sig"
    )
    assert done.returncode == 0, done.stderr
    assert (made.path / "model.sig").read_bytes() != ours
    assert verify_bundle(made.path, made.trusted, full=True).manifest.name == "tiny"


def test_a_bundle_signed_here_verifies_with_the_independent_tool(pristine: Made) -> None:
    done = independent_tool(
        "verify", "key", pristine.path,
        "--signature", pristine.path / "model.sig", "--public_key", pristine.keys.public_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "Verification succeeded\n")


def test_the_statement_is_what_the_specification_asks_for(pristine: Made) -> None:
    envelope = json.loads((pristine.path / "model.sig").read_bytes())
    statement = json.loads(base64.b64decode(envelope["dsseEnvelope"]["payload"]))
    names = [r["name"] for r in statement["predicate"]["resources"]]
    assert names == sorted(names)
    on_disk = {str(p.relative_to(pristine.path)) for p in pristine.path.rglob("*") if p.is_file()}
    assert set(names) == on_disk - {"model.sig"}
    assert statement["subject"][0]["name"] == pristine.path.name
    assert envelope["verificationMaterial"]["publicKey"]["hint"] == pristine.keys.fingerprint


def test_a_p384_signature_is_refused_as_another_kind_of_key(made: Made, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = tmp_path / "p384.key", tmp_path / "p384.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    (made.path / "model.sig").unlink()
    done = independent_tool("sign", "key", made.path, "--private_key", private, "--signature", made.path / "model.sig")
    assert done.returncode == 0, done.stderr
    refused(10, "not an ECDSA P-256", lambda: verify_bundle(made.path, [public]))
    refused(10, "not trusted", lambda: verify_bundle(made.path, made.trusted))
