"""CPU masks in the kernel's format: groups of 32 bits, ``1,00000003``."""

from __future__ import annotations

from collections.abc import Iterable


def to_kernel(cpus: Iterable[int]) -> str:
    """Format a mask in the shortest form that the kernel accepts (``bitmap_parse`` in lib/bitmap-str.c)."""
    bits = sum(1 << cpu for cpu in set(cpus))
    words = []
    while True:
        bits, word = bits >> 32, bits & 0xFFFFFFFF
        words.append(f"{word:08x}" if bits else f"{word:x}")
        if not bits:
            return ",".join(reversed(words))


def from_kernel(text: str) -> frozenset[int]:
    """Parse a mask. Raises: ValueError."""
    bits = 0
    for word in text.split(","):
        bits = bits << 32 | int(word, 16)
    if bits < 0:
        raise ValueError(f"{text} has a sign")
    return frozenset(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)
