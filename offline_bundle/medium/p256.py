"""ECDSA over P-256 with SHA-256, verification only, in whole numbers of the standard library.

A server that Atoll is brought to has no cryptography package yet, and the signature must hold before anything from the
medium runs. Nothing here is secret, so nothing here needs constant time; it is written to be read, not to be fast
(a verification takes some tens of milliseconds). This file is also a part of install.sh, and imports nothing of ours.

Source: FIPS 186-5 section 6.4.2; curve parameters from SP 800-186 section 3.2.1.3.
"""

import base64
import binascii
import hashlib

P = 0xFFFFFFFF00000001000000000000000000000000FFFFFFFFFFFFFFFFFFFFFFFF  # the field
N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # the order of G
B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B  # y² = x³ - 3x + B
G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
# What precedes the point in the DER text of every P-256 SubjectPublicKeyInfo, up to "uncompressed" (04).
SPKI_HEAD = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004")

Point = tuple[int, int] | None  # None: the point at infinity


class KeyFormatError(ValueError):
    """The text is not a P-256 public key."""


def load_public(pem: bytes) -> tuple[tuple[int, int], str]:
    """(point, fingerprint) of a public key in PEM. The fingerprint is the SHA-256 of the PEM text, written one way.

    Raises KeyFormatError for anything but an uncompressed point on the curve.
    """
    head, tail = b"-----BEGIN PUBLIC KEY-----", b"-----END PUBLIC KEY-----"
    if pem.count(b"-----BEGIN") != 1 or head not in pem or tail not in pem.split(head, 1)[1]:
        raise KeyFormatError("it is not one public key in PEM")
    try:
        der = base64.b64decode(b"".join(pem.split(head, 1)[1].split(tail, 1)[0].split()), validate=True)
    except binascii.Error as e:
        raise KeyFormatError("its base64 is damaged") from e
    if not der.startswith(SPKI_HEAD) or len(der) != len(SPKI_HEAD) + 64:
        raise KeyFormatError("it is a key of another kind than ECDSA P-256")
    point = (int.from_bytes(der[-64:-32], "big"), int.from_bytes(der[-32:], "big"))
    if not on_curve(point):
        raise KeyFormatError("its point is not on the curve")
    text = base64.b64encode(der).decode()
    lines = [text[i : i + 64] for i in range(0, len(text), 64)]
    return point, hashlib.sha256("\n".join([head.decode(), *lines, tail.decode(), ""]).encode()).hexdigest()


def verify(public: tuple[int, int], signature: bytes, message: bytes) -> bool:
    """Whether `signature` (DER) by `public` holds for `message`. Malformed input is simply not a signature."""
    pair = parse_der(signature)
    if pair is None or not on_curve(public):
        return False
    r, s = pair
    if not (0 < r < N and 0 < s < N):
        return False
    z = int.from_bytes(hashlib.sha256(message).digest(), "big")
    w = pow(s, -1, N)
    point = add(multiply(z * w % N, G), multiply(r * w % N, public))
    return point is not None and point[0] % N == r


def parse_der(data: bytes) -> tuple[int, int] | None:
    """(r, s) of SEQUENCE { INTEGER, INTEGER } in strict DER: one text per pair, nothing after it."""
    if len(data) < 8 or len(data) > 72 or data[0] != 0x30 or data[1] != len(data) - 2:
        return None
    numbers: list[int] = []
    at = 2
    for _ in range(2):
        if at + 2 > len(data) or data[at] != 0x02:
            return None
        length = data[at + 1]
        digits = data[at + 2 : at + 2 + length]
        if not 0 < length <= 33 or len(digits) != length or digits[0] & 0x80:
            return None  # missing, too long, or negative
        if length > 1 and digits[0] == 0 and not digits[1] & 0x80:
            return None  # a zero too many in front
        numbers.append(int.from_bytes(digits, "big"))
        at += 2 + length
    return (numbers[0], numbers[1]) if at == len(data) else None


def on_curve(point: tuple[int, int]) -> bool:
    """Whether the point is on the curve (whose cofactor is 1, so that every such point has order N)."""
    x, y = point
    return 0 <= x < P and 0 <= y < P and (y * y - (x * x * x - 3 * x + B)) % P == 0


def add(a: Point, b: Point) -> Point:
    """The sum of two points."""
    if a is None or b is None:
        return b if a is None else a
    if a[0] == b[0]:
        if (a[1] + b[1]) % P == 0:
            return None
        slope = 3 * (a[0] * a[0] - 1) * pow(2 * a[1], -1, P)
    else:
        slope = (b[1] - a[1]) * pow(b[0] - a[0], -1, P)
    x = (slope * slope - a[0] - b[0]) % P
    return x, (slope * (a[0] - x) - a[1]) % P


def multiply(k: int, point: Point) -> Point:
    """k times the point, by doubling and adding."""
    total: Point = None
    while k:
        if k & 1:
            total = add(total, point)
        point = add(point, point)
        k >>= 1
    return total
