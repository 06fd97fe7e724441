"""The verifier in plain Python agrees with `cryptography` about what is a signature, however odd the input."""

import hashlib
import random

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_bundle.medium import p256

KEY = ec.generate_private_key(ec.SECP256R1())
MESSAGE = b"what is signed"
N = p256.N


def point_of(key: ec.EllipticCurvePrivateKey) -> tuple[int, int]:
    numbers = key.public_key().public_numbers()
    return numbers.x, numbers.y


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def theirs(key: ec.EllipticCurvePrivateKey, signature: bytes, message: bytes) -> bool:
    try:
        key.public_key().verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def both(signature: bytes, message: bytes = MESSAGE, key: ec.EllipticCurvePrivateKey = KEY) -> bool:
    """What both say, which must be the same."""
    ours = p256.verify(point_of(key), signature, message)
    assert ours == theirs(key, signature, message), signature.hex()
    return ours


def test_good_signatures_hold_and_others_do_not() -> None:
    for i in range(30):
        key = ec.generate_private_key(ec.SECP256R1())
        message = bytes([i]) * (i * 7)
        signature = key.sign(message, ec.ECDSA(hashes.SHA256()))
        assert both(signature, message, key)
        assert not both(signature, message + b"x", key)
        assert not both(signature, message)


def test_every_flipped_bit_is_seen() -> None:
    signature = KEY.sign(MESSAGE, ec.ECDSA(hashes.SHA256()))
    for bit in random.Random(7).sample(range(8 * len(signature)), 60):
        spoilt = bytearray(signature)
        spoilt[bit // 8] ^= 1 << bit % 8
        assert not both(bytes(spoilt))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80))
def test_noise_is_no_signature(noise: bytes) -> None:
    assert not both(noise)


R, S = decode_dss_signature(KEY.sign(MESSAGE, ec.ECDSA(hashes.SHA256())))
GOOD = encode_dss_signature(R, S)


def integer(value: bytes) -> bytes:
    return b"\x02" + bytes([len(value)]) + value


def sequence(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return b"\x30" + bytes([len(body)]) + body


def minimal(number: int) -> bytes:
    return number.to_bytes(number.bit_length() // 8 + 1, "big")


ODD_NUMBERS = {
    "r zero": (0, S), "s zero": (R, 0), "both zero": (0, 0), "r n": (N, S), "s n": (R, N), "r + n": (R + N, S),
    "s + n": (R, S + N), "r p": (p256.P, S), "r one": (1, S), "s one": (R, 1), "r n-1": (N - 1, S), "s n-1": (R, N - 1),
    "swapped": (S, R), "r 2^256": (1 << 256, S), "s 2^256-1": (R, (1 << 256) - 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_NUMBERS)
def test_odd_numbers(name: str) -> None:
    r, s = ODD_NUMBERS[name]
    assert not both(sequence(integer(minimal(r)), integer(minimal(s))))


ODD_DER = {
    "empty": b"",
    "only a head": b"\x30\x00",
    "one number": sequence(integer(minimal(R))),
    "three numbers": sequence(integer(minimal(R)), integer(minimal(S)), integer(b"\x01")),
    "bytes after it": GOOD + b"\x00",
    "bytes in it": sequence(integer(minimal(R)), integer(minimal(S)), b"\x05\x00"),
    "cut": GOOD[:-1],
    "long form of the length": b"\x30\x81" + GOOD[1:],
    "indefinite length": b"\x30\x80" + GOOD[2:] + b"\x00\x00",
    "a zero in front": sequence(integer(b"\x00" + minimal(R)), integer(minimal(S))),
    "negative r": sequence(integer((-R).to_bytes(33, "big", signed=True)), integer(minimal(S))),
    "empty number": sequence(b"\x02\x00", integer(minimal(S))),
    "not a sequence": b"\x31" + GOOD[1:],
    "not a number": GOOD.replace(b"\x02", b"\x04", 1),
    "plain r and s": R.to_bytes(32, "big") + S.to_bytes(32, "big"),
}


@pytest.mark.parametrize("name", ODD_DER)
def test_odd_der(name: str) -> None:
    assert not both(ODD_DER[name])


def test_the_other_half_is_a_signature_too() -> None:
    """(r, n - s) holds whenever (r, s) does; nothing of ours takes a signature's bytes for an identity."""
    assert both(encode_dss_signature(R, N - S))


def z_of(message: bytes) -> int:
    return int.from_bytes(hashlib.sha256(message).digest(), "big")


def test_sums_that_end_at_infinity_or_double() -> None:
    secret = 0x1234567890ABCDEF
    key = ec.derive_private_key(secret, ec.SECP256R1())
    to_infinity = -z_of(MESSAGE) * pow(secret, -1, N) % N  # u1·G = -(u2·Q)
    doubling = z_of(MESSAGE) * pow(secret, -1, N) % N  # u1·G = u2·Q
    for r in (to_infinity, doubling):
        for s in (1, 2, N - 1, S):
            assert not both(encode_dss_signature(r, s), MESSAGE, key)


@pytest.mark.parametrize("secret", [1, 2, 3, N - 1, N - 2, (N - 1) // 2])
def test_small_and_large_keys(secret: int) -> None:
    key = ec.derive_private_key(secret, ec.SECP256R1())
    assert both(key.sign(MESSAGE, ec.ECDSA(hashes.SHA256())), MESSAGE, key)
    assert not both(GOOD, MESSAGE, key)


def test_small_nonces_make_good_signatures() -> None:
    """r is then the x of a small multiple of G: a table of known points."""
    secret = KEY.private_numbers().private_value
    for k in (1, 2, 3, N - 1):
        x = p256.multiply(k, p256.G)
        assert x is not None
        r = x[0] % N
        s = pow(k, -1, N) * (z_of(MESSAGE) + r * secret) % N
        assert both(encode_dss_signature(r, s))


def test_arithmetic_agrees_with_known_multiples() -> None:
    for k in (1, 2, 5, N - 1, N, N + 1, 0x0123456789ABCDEF << 100):
        point = p256.multiply(k, p256.G)
        if k % N == 0:
            assert point is None
            continue
        numbers = ec.derive_private_key(k % N, ec.SECP256R1()).public_key().public_numbers()
        assert point == (numbers.x, numbers.y)


def test_key_files() -> None:
    pem = pem_of(KEY)
    assert p256.load_public(pem) == (point_of(KEY), hashlib.sha256(pem).hexdigest())
    dressed = b"a comment\r\n" + pem.replace(b"\n", b"\r\n")
    assert p256.load_public(dressed)[1] == hashlib.sha256(pem).hexdigest()


def key_file(der: bytes) -> bytes:
    import base64

    return b"-----BEGIN PUBLIC KEY-----\n" + base64.encodebytes(der) + b"-----END PUBLIC KEY-----\n"


X, Y = point_of(KEY)
BAD_KEYS = {
    "nothing": b"",
    "noise": b"-----BEGIN PUBLIC KEY-----\n!!!!\n-----END PUBLIC KEY-----\n",
    "two keys": pem_of(KEY) * 2,
    "cut": pem_of(KEY)[:-40],
    "private": KEY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ),
    "p-384": pem_of(ec.generate_private_key(ec.SECP384R1())),
    "off the curve": key_file(p256.SPKI_HEAD + X.to_bytes(32, "big") + (Y ^ 1).to_bytes(32, "big")),
    "zero": key_file(p256.SPKI_HEAD + bytes(64)),
    "x beyond the field": key_file(p256.SPKI_HEAD + (p256.P + 5).to_bytes(32, "big") + Y.to_bytes(32, "big")),
    "infinity": key_file(p256.SPKI_HEAD[:1] + b"\x19" + p256.SPKI_HEAD[2:24] + b"\x02\x00\x00"),
    "compressed": key_file(p256.SPKI_HEAD[:-1] + bytes([2 + Y % 2]) + X.to_bytes(32, "big")),
    "bytes after it": key_file(p256.SPKI_HEAD + X.to_bytes(32, "big") + Y.to_bytes(32, "big") + b"\x00"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_what_is_no_key(name: str) -> None:
    with pytest.raises(p256.KeyFormatError):
        p256.load_public(BAD_KEYS[name])


def test_a_point_off_the_curve_verifies_nothing() -> None:
    assert not p256.verify((X, Y ^ 1), GOOD, MESSAGE)
    assert not p256.verify((0, 0), GOOD, MESSAGE)
