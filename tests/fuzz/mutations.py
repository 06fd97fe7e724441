"""What the fuzzers do to good input: bytes, values and text that are almost right. Everything follows from one seed."""

import copy
import random
from typing import Any

INTEGERS = [0, 1, -1, 2, 7, 15, 16, 17, 255, 256, 319, 320, 511, 512, 513, 4096, 65_536, 2**31 - 1, 2**31, 2**32,
            2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**30]
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.0, 1e-9, 2.0, 1e9, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")]
TEXTS = [
    "", " ", "\n", "\0", "\x1b[31m", "a", "ab" * 40, "é한😀", "e\u0301", "\u202egnp.exe", "\ufeff", "\ud800",
    "a\udc00b", "{{ 7*7 }}", "{% for i in range(9) %}", "<|im_start|>system\n", "<|im_end|>", "<|endoftext|>",
    "${jndi:ldap://x}", "../../etc/passwd", "%s%n", "null", "true", "1e999", "[]", '{"a":', "</s>", "<think>",
    "</think>", "[TOOL_CALLS]", "(a+)+$", "x" * 3000, "😀" * 700, "\\u0000", "'; DROP TABLE", "A\u030a\u0327" * 30,
]  # fmt: skip
KEYS = ["a", "type", "$ref", "properties", "items", "function", "role", "content", "name", "__proto__", "messages", ""]
BYTES = [b"\0", b"\r\n", b"\r\n\r\n", b"\n", b"\xff", b"\x80", b"\xc1", b"\xed\xa0\x80", b"{", b"[", b'"', b"\\u", b":",
         b"0\r\n\r\n", b"-1", b"99999999999", b"chunked", b"HTTP/1.1", b" ", b"\t", b"\x16\x03\x01"]


class Chance(random.Random):
    """Random numbers with the choices that fuzzers make."""

    def often(self, probability: float) -> bool:
        return self.random() < probability

    def text(self) -> str:
        kind = self.random()
        if kind < 0.6:
            return self.choice(TEXTS)
        if kind < 0.8:
            return "".join(self.choice(TEXTS)[:20] for _ in range(self.randint(0, 5)))
        return "".join(chr(self.choice((self.randint(0, 127), self.randint(0, 0x2FFF), self.randint(0, 0x10FFFF))))
                       for _ in range(self.randint(0, 30)))

    def value(self, depth: int = 3) -> Any:
        """A value of JSON, seldom a sensible one."""
        kind = self.randint(0, 9 if depth else 6)
        if kind < 2:
            return self.choice(INTEGERS)
        if kind < 3:
            return self.choice(FLOATS)
        if kind < 4:
            return self.choice([None, True, False])
        if kind < 7:
            return self.text()
        if kind < 8:
            return [self.value(depth - 1) for _ in range(self.randint(0, 4))]
        if kind < 9:
            return {self.choice(KEYS) if self.often(0.7) else self.text(): self.value(depth - 1)
                    for _ in range(self.randint(0, 4))}
        value = self.value(0)
        for _ in range(self.choice((5, 40, 100))):
            value = [value] if self.often(0.5) else {"a": value}
        return value

    def mutated(self, value: Any) -> Any:
        """A copy of `value` (of JSON) with one place changed."""
        value = copy.deepcopy(value)
        places: list[tuple[Any, Any]] = []

        def walk(node: Any) -> None:
            keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
            for key in keys:
                places.append((node, key))
                walk(node[key])

        walk(value)
        if not places or self.often(0.02):
            return self.value()
        node, key = self.choice(places)
        kind = self.randint(0, 9)
        if kind < 5:
            node[key] = self.value()
        elif kind < 6:
            del node[key]
        elif kind < 7 and isinstance(node, list):
            node.extend(node[key : key + 1] * self.choice((1, 2, 40, 2000)))
        elif kind < 8:
            node[key] = [node[key]]
        elif isinstance(node, dict):
            node[self.text() if self.often(0.3) else self.choice(KEYS)] = self.value()
        else:
            node[key] = self.value(0)
        return value

    def mutated_bytes(self, data: bytes) -> bytes:
        """`data` with a few places changed, repeated, dropped, or cut off."""
        found = bytearray(data)
        for _ in range(self.choice((1, 1, 2, 4, 12))):
            at = self.randint(0, len(found))
            kind = self.randint(0, 6)
            if kind == 0 and found:
                found[min(at, len(found) - 1)] ^= 1 << self.randint(0, 7)
            elif kind == 1:
                found[at:at] = self.choice(BYTES)
            elif kind == 2:
                found[at : at + self.randint(1, 20)] = b""
            elif kind == 3:
                found[at:at] = found[at : at + self.randint(1, 50)] * self.choice((1, 2, 100))
            elif kind == 4:
                found[at : at + 4] = self.randbytes(4)
            elif kind == 5:
                del found[at:]
            else:
                found[at:at] = self.choice(BYTES) * self.choice((1, 3, 3000))
        return bytes(found)

    def pieces(self, data: bytes, most: int = 6) -> list[bytes]:
        """`data` cut at random places."""
        cuts = sorted(self.randint(0, len(data)) for _ in range(self.randint(0, most)))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
