"""CPU sets as text: lists of Linux (``2-5,8``), masks of OVS (``0x13c``) and of the kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

#: The most CPUs that a kernel can be built for (NR_CPUS of x86).
MOST = 8192
#: Maximum length of a list in characters: it may come from a caller. One of all CPUs, each by itself, fits.
LONGEST = 64 * 1024
_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?\Z")


def span(first: int, last: int) -> int:
    """A range of CPUs as the bits of a number, so that one more costs the same, whatever its length.

    Raises: ValueError if it is reversed or too large.
    """
    if last < first:
        raise ValueError(f"{first}-{last} runs backwards")
    if last >= MOST:
        raise ValueError(f"{first}-{last} is beyond CPU {MOST - 1}")
    return ((1 << (last - first + 1)) - 1) << first


def numbers(bits: int) -> tuple[int, ...]:
    """The numbers of the bits that are set, in order."""
    return tuple(at for at, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")


def parse_list(text: str) -> tuple[int, ...]:
    """Parse a CPU list into a sorted tuple. Raises: ValueError."""
    if len(text) > LONGEST:
        raise ValueError(f"a list of CPUs has more than {LONGEST} characters")
    bits = 0
    for part in filter(None, text.strip().split(",")):
        found = _PART.match(part)
        if found is None:
            raise ValueError(f"{part[:40]!r} is neither a CPU nor a range of CPUs")
        bits |= span(int(found[1]), int(found[2] or found[1]))
    return numbers(bits)


def format_list(cpus: Iterable[int]) -> str:
    """Format CPUs as a list: ``(2, 3, 4, 8)`` as ``2-4,8``."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def to_mask(cpus: Iterable[int]) -> str:
    """Format CPUs as a hexadecimal mask with ``0x``."""
    return hex(sum(1 << cpu for cpu in set(cpus)))


def from_mask(mask: str) -> tuple[int, ...]:
    """Parse a CPU mask. It is hexadecimal, with or without ``0x``, as in OVS."""
    return numbers(int(mask or "0", 16))


def online(root: Path = Path("/sys")) -> tuple[int, ...]:
    """The online CPUs, from sysfs."""
    return parse_list((root / "devices/system/cpu/online").read_text())


def by_node(root: Path = Path("/sys")) -> dict[int, frozenset[int]]:
    """The online CPUs of each NUMA node that has some, from sysfs; one node on a kernel without NUMA."""
    nodes = root / "devices/system/node"
    try:
        numbers = parse_list((nodes / "has_cpu").read_text())
        found = {n: frozenset(parse_list((nodes / f"node{n}/cpulist").read_text())) for n in numbers}
    except FileNotFoundError:
        return {0: frozenset(online(root))}
    # The last CPU of a node may have gone offline between two reads.
    return {n: cpus for n, cpus in found.items() if cpus}


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
    """Parse a mask of the kernel: groups of 32 bits, ``1,00000003``. Raises: ValueError."""
    bits = 0
    for word in text.split(","):
        bits = bits << 32 | int(word, 16)
    if bits < 0:
        raise ValueError(f"{text} has a sign")
    return frozenset(numbers(bits))
