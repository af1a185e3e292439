"""One seed becomes many: independent streams by name and number, the same on every machine."""

from __future__ import annotations

from hashlib import blake2b


def mixed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1
