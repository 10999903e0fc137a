"""Where the fields of a structure are in this kernel, by its own description (BTF).

Documentation/bpf/btf.rst describes the format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

VMLINUX = Path("/sys/kernel/btf/vmlinux")
_MAGIC = 0xEB9F
_HEADER, _TYPE, _MEMBER = struct.Struct("=HBBIIIII"), struct.Struct("=III"), struct.Struct("=III")
_STRUCT, _UNION = 4, 5
# What follows a type, by its kind: bytes, and bytes for each of its members.
_FIXED = {1: 4, 3: 12, 14: 4, 17: 4}
_EACH = {_STRUCT: 12, _UNION: 12, 6: 8, 13: 8, 15: 12, 19: 12}
_LAST_KIND = 19


def fields(name: str, data: bytes) -> dict[str, int]:
    """Return the offset of each field of a structure in bits, also of those in nameless structures.

    Raises: ValueError if there is no such structure, or the format is not known.
    """
    magic, version, _, length, type_at, type_length, text_at, _ = _HEADER.unpack_from(data)
    if (magic, version) != (_MAGIC, 1):
        raise ValueError("BTF of an unknown format")
    texts = length + text_at
    places = [0, *_types(data, length + type_at, length + type_at + type_length)]
    encoded = name.encode() + b"\0"
    for at in places[1:]:
        text, info, _ = _TYPE.unpack_from(data, at)
        if info >> 24 & 0x1F == _STRUCT and data.startswith(encoded, texts + text):
            return dict(_members(data, texts, places, at, 0))
    raise ValueError(f"BTF has no struct {name}")


def _types(data: bytes, at: int, end: int) -> Iterator[int]:
    while at < end:
        yield at
        _, info, _ = _TYPE.unpack_from(data, at)
        kind = info >> 24 & 0x1F
        if kind > _LAST_KIND:
            raise ValueError(f"BTF has a type of the unknown kind {kind}")
        at += _TYPE.size + _FIXED.get(kind, 0) + _EACH.get(kind, 0) * (info & 0xFFFF)


def _members(data: bytes, texts: int, places: list[int], at: int, base: int) -> Iterator[tuple[str, int]]:
    _, info, _ = _TYPE.unpack_from(data, at)
    for number in range(info & 0xFFFF):
        text, kind, offset = _MEMBER.unpack_from(data, at + _TYPE.size + number * _MEMBER.size)
        if info >> 31:
            offset &= 0xFFFFFF  # above it is the width of a bit field
        start = texts + text
        if name := data[start : data.index(b"\0", start)].decode():
            yield name, base + offset
        elif _TYPE.unpack_from(data, places[kind])[1] >> 24 & 0x1F in (_STRUCT, _UNION):
            yield from _members(data, texts, places, places[kind], base + offset)
