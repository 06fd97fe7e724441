"""Names for the content of full pages: a keyed hash chain over token ids.

    h[0] = H(key, salt, tokens[0:P])     h[i] = H(key, h[i-1], tokens[P i : P (i+1)])     P = page_size

Equal names mean equal tokens *and* equal history, so a page can be reused wherever its name comes up. The key is drawn
per process and BLAKE2b is collision resistant, so nobody outside can craft two prompts that share a name; the salt
keeps tenants from hitting (and timing) each other's pages.
"""

import hashlib
import os
from array import array

from engine.core.sequence import Sequence

_DIGEST_SIZE = 16


class PageHasher:
    def __init__(self, page_size: int, key: bytes | None = None) -> None:
        self.page_size = page_size
        self._key = key or os.urandom(32)

    def extend(self, seq: Sequence) -> None:
        """Append the hashes of pages of `seq` that have become full of known tokens."""
        hashes, size = seq.page_hashes, self.page_size
        for i in range(len(hashes), len(seq.token_ids) // size):
            parent = hashes[i - 1] if i else seq.cache_salt.encode()
            digest = hashlib.blake2b(parent, digest_size=_DIGEST_SIZE, key=self._key)
            digest.update(b"\0page")  # ends the salt, whatever it holds
            digest.update(array("i", seq.token_ids[i * size : (i + 1) * size]).tobytes())
            hashes.append(digest.digest())
