"""A hash as people compare it: groups of four hexadecimal digits, or lines of words."""

from offline_bundle.signing.hash_words import in_words


def word_lines(digits: str) -> list[str]:
    """The words of a hash, eight a line."""
    found = in_words(digits).split()
    return [" ".join(found[at : at + 8]) for at in range(0, len(found), 8)]


def grouped(fingerprint: str) -> str:
    """A fingerprint in groups of four that can be read aloud."""
    return " ".join(fingerprint[i : i + 4] for i in range(0, len(fingerprint), 4))
