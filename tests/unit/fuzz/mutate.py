"""Inputs that are almost right: samples of what is really read, with a few mistakes in them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from random import Random

#: The most bytes of an input: a sample that is repeated grows.
MOST = 1 << 18
_MISTAKES = 4
#: Bytes that lengths, counts and signs are made of.
_EDGES = (b"\0", b"\xff", b"\x7f", b"\x80", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x04\0", b"\0\x04")
#: Words that text is made of, and that break what reads it.
_WORDS = (
    *("", "-1", "0", "1e309", "NaN", "9" * 400, "9" * 5000, "0x", "\u0663", "\ud7ff", "\0", "%n", "null"),
    *("[", "]", "{", "}", "[" * 3000, '{"a":' * 3000, "<a>" * 300, "&a;", "*a", "&b [*b]", "<<: 1", "!!x y"),
    *(
        "\n",
        "\r\n",
        "\t",
        "  ",
        ":",
        ",",
        "-",
        '"',
        "'",
        "\\",
        "\\u00",
        "]]>",
        "<!--",
        "true",
        "1_0",
        "1:1:1",
    ),
)
_NUMBER, _WORD = re.compile(r"\d+"), re.compile(r"[\w.:-]+")


def mutated(samples: Sequence[bytes], random: Random) -> bytes:
    """A sample with mistakes: of bytes, or of the words that it has as text."""
    data = random.choice(samples)
    mistakes = _OF_BYTES if random.random() < 0.5 else _OF_WORDS
    for _ in range(random.randint(1, _MISTAKES)):
        data = random.choice(mistakes)(data, random)
    if random.random() < 0.1:
        data = _spliced(data, random.choice(samples), random)
    return data[:MOST]


def _place(data: bytes, random: Random) -> tuple[int, int]:
    """Where a mistake is: a few bytes, now and then many."""
    at = random.randint(0, len(data))
    return at, min(len(data), at + random.choice((0, 1, 1, 2, 4, 8, 64, len(data))))


def _flipped(data: bytes, random: Random) -> bytes:
    if not data:
        return b"\0"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _replaced(data: bytes, random: Random) -> bytes:
    begin, end = _place(data, random)
    return data[:begin] + random.choice((*_EDGES, random.randbytes(end - begin))) + data[end:]


def _counted(data: bytes, random: Random) -> bytes:
    """A number of two or four bytes, which may be a length, is a little more or less."""
    size = random.choice((2, 4))
    if len(data) < size:
        return data
    at = random.randrange(len(data) - size + 1)
    code = random.choice("<>") + {2: "H", 4: "I"}[size]
    [number] = struct.unpack_from(code, data, at)
    other = (number + random.choice((-4, -1, 1, 4, 1 << 15))) % (1 << 8 * size)
    return data[:at] + struct.pack(code, other) + data[at + size :]


def _cut(data: bytes, random: Random) -> bytes:
    begin, end = _place(data, random)
    return data[:begin] + data[end:]


def _ended(data: bytes, random: Random) -> bytes:
    return data[: random.randint(0, len(data))]


def _repeated(data: bytes, random: Random) -> bytes:
    begin, end = _place(data, random)
    return data[:begin] + data[begin:end] * random.choice((2, 3, 50)) + data[end:]


def _spliced(data: bytes, other: bytes, random: Random) -> bytes:
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


def _worded(data: bytes, random: Random) -> bytes:
    """Another word, from here or from the list, in the place of one."""
    text = data.decode(errors="surrogateescape")
    places = list((_NUMBER if random.random() < 0.4 else _WORD).finditer(text))
    if not places:
        return data + random.choice(_WORDS).encode(errors="surrogateescape")
    at = random.choice(places)
    other = random.choice(places)[0] if random.random() < 0.3 else random.choice(_WORDS)
    return (text[: at.start()] + other + text[at.end() :]).encode(errors="surrogateescape")


def _lined(data: bytes, random: Random) -> bytes:
    """A line goes, comes twice, or comes elsewhere."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    line = lines.pop(random.randrange(len(lines)))
    for _ in range(random.choice((0, 1, 2))):
        lines.insert(random.randint(0, len(lines)), line)
    return b"".join(lines)


_Mistake = Callable[[bytes, Random], bytes]
_OF_BYTES: tuple[_Mistake, ...] = (_flipped, _replaced, _counted, _cut, _ended, _repeated)
_OF_WORDS: tuple[_Mistake, ...] = (_worded, _worded, _worded, _lined, _cut, _repeated)
