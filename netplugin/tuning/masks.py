"""CPU masks as the kernel's files have them: 32 bits at a time, ``1,00000003``."""

from __future__ import annotations

from collections.abc import Iterable


def to_kernel(cpus: Iterable[int]) -> str:
    """The shortest form that the kernel takes (``bitmap_parse`` in lib/bitmap-str.c)."""
    bits = sum(1 << cpu for cpu in set(cpus))
    words = []
    while True:
        bits, word = bits >> 32, bits & 0xFFFFFFFF
        words.append(f"{word:08x}" if bits else f"{word:x}")
        if not bits:
            return ",".join(reversed(words))


def from_kernel(text: str) -> frozenset[int]:
    """Raises: ValueError."""
    bits = 0
    for word in text.split(","):
        bits = bits << 32 | int(word, 16)
    if bits < 0:
        raise ValueError(f"{text} has a sign")
    return frozenset(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)
