"""The actions of our flows, as the bytes in which OpenFlow 1.4 has them; several are joined."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from netplugin.host.oxm import BY_NAME, parse_word, port_number

_VENDOR = 0xFFFF
_NICIRA = 0x2320
_NXM_IN_PORT = 0x00000002
_LOAD = struct.Struct(">HHIHHIQ")


def output(ofport: int) -> bytes:
    """Send the frame to a port (OFPAT_OUTPUT)."""
    return struct.pack(">HHIH6x", 0, 16, port_number(ofport), 0)


DROP = b""
#: Switch the frame by MAC and VLAN (OFPP_NORMAL).
NORMAL = output(0xFFFA)
#: OFPAT_PUSH_VLAN with 0x8100, OFPAT_POP_VLAN.
PUSH_VLAN = struct.pack(">HHH2x", 17, 8, 0x8100)
POP_VLAN = struct.pack(">HH4x", 18, 8)


def set_field(word: str) -> bytes:
    """Set a field to the value that a match has for it, such as ``tun_dst=10.0.0.1`` (OFPAT_SET_FIELD).

    Raises: MalformedFlow.
    """
    (tlv,) = parse_word(word)
    return _padded(struct.pack(">HH", 25, -(-(4 + len(tlv)) // 8) * 8) + tlv)


def resubmit(table: int) -> bytes:
    """Look the frame up in a table, with its port (NXAST_RESUBMIT_TABLE)."""
    return struct.pack(">HHIHHB3x", _VENDOR, 16, _NICIRA, 14, 0xFFF8, table)


def take_as_from(ofport: int) -> bytes:
    """Go on as if the frame had come from this port (NXAST_REG_LOAD of NXM_OF_IN_PORT)."""
    return _LOAD.pack(_VENDOR, 24, _NICIRA, 7, 15, _NXM_IN_PORT, ofport)


# -- Learned flows. The structures are those of lib/ofp-actions.c. ------------------------------------

TUN_ID, ETH_DST, ETH_SRC, IN_PORT = 0x00012008, 0x00000206, 0x00000406, BY_NAME["in_port"].header
TUN_IPV4_SRC, TUN_IPV4_DST = BY_NAME["tun_src"].header, BY_NAME["tun_dst"].header
TUN_IPV6_SRC, TUN_IPV6_DST = BY_NAME["tun_ipv6_src"].header, BY_NAME["tun_ipv6_dst"].header


def learn(
    *, table: int, hard_timeout: int, priority: int, cookie: int, limit: int, specs: tuple[bytes, ...]
) -> bytes:
    """Add a flow for each frame, as ``specs`` says (NXAST_LEARN2); ``hard_timeout`` in seconds."""
    following = b"".join(specs)
    length = -(-(40 + len(following)) // 8) * 8
    head = struct.pack(
        ">HHIHHHHQHBxHH", _VENDOR, length, _NICIRA, 45, 0, hard_timeout, priority, cookie, 0, table, 0, 0
    )
    return _padded(head + struct.pack(">IH2x", limit, 0) + following)


def learn_match(source: int, target: int) -> bytes:
    """The learned flow matches in the field ``target`` what the frame has in ``source``."""
    return struct.pack(">HIHIH", _bits(source), source, 0, target, 0)


def learn_load(source: int, target: int) -> bytes:
    """The learned flow sets the field ``target`` to what the frame has in ``source``."""
    return struct.pack(">HIHIH", 1 << 11 | _bits(source), source, 0, target, 0)


def learn_output(source: int) -> bytes:
    """The learned flow sends frames to the port that the frame has in ``source``."""
    return struct.pack(">HIH", 2 << 11 | _bits(source), source, 0)


def loaded(actions: bytes, field: int) -> int | None:
    """The value that learned actions load into a field (NXAST_REG_LOAD); None if into no bit of it."""
    value, found = 0, False
    for action in _actions(actions):
        if len(action) == _LOAD.size and action[:10] == struct.pack(">HHIH", _VENDOR, 24, _NICIRA, 7):
            *_, where, target, part = _LOAD.unpack(action)
            if target == field:
                value, found = value | part << (where >> 6), True
    return value if found else None


def _actions(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at + 2 : at + 4], "big")
        yield data[at : at + size]
        at += max(size, 8)


def _bits(header: int) -> int:
    return (header & 0xFF) * 8


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)
