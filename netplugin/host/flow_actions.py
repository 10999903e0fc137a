"""The actions of our flows, as the bytes in which OpenFlow 1.4 has them; several are joined."""

from __future__ import annotations

import struct

from netplugin.host.oxm import BY_NAME, parse_word, port_number

_VENDOR = 0xFFFF
_NICIRA = 0x2320
_NXM_IN_PORT = 0x00000002


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

    Raises: Malformed.
    """
    (tlv,) = parse_word(word)
    return _action(25, tlv)


def resubmit(table: int) -> bytes:
    """Look the frame up in a table, with its port (NXAST_RESUBMIT_TABLE)."""
    return _action(_VENDOR, struct.pack(">IHHB", _NICIRA, 14, 0xFFF8, table))


def load(field: int, value: int) -> bytes:
    """Set a field, by its header, to a value: 64 bits in each action, the lowest first, as OVS has it for
    learned flows (NXAST_REG_LOAD; ``next_load_segment`` in lib/ofp-actions.c).
    """
    loads = b""
    for first in range(0, _bits(field), 64):
        count = min(64, _bits(field) - first)
        part = value >> first & (1 << count) - 1
        loads += _action(_VENDOR, struct.pack(">IHHIQ", _NICIRA, 7, first << 6 | count - 1, field, part))
    return loads


def take_as_from(ofport: int) -> bytes:
    """Go on as if the frame had come from this port."""
    return load(_NXM_IN_PORT, ofport)


# -- Learned flows. The structures are those of lib/ofp-actions.c. ------------------------------------

TUN_ID, ETH_DST, ETH_SRC, IN_PORT = 0x00012008, 0x00000206, 0x00000406, BY_NAME["in_port"].header
TUN_IPV4_SRC, TUN_IPV4_DST = BY_NAME["tun_src"].header, BY_NAME["tun_dst"].header
TUN_IPV6_SRC, TUN_IPV6_DST = BY_NAME["tun_ipv6_src"].header, BY_NAME["tun_ipv6_dst"].header


def learn(*specs: bytes, table: int, hard_timeout: int, priority: int, cookie: int, limit: int) -> bytes:
    """Add a flow for each frame, as ``specs`` says (NXAST_LEARN2); ``hard_timeout`` in seconds."""
    numbers = _NICIRA, 45, 0, hard_timeout, priority, cookie, 0, table, 0, 0, limit, 0
    return _action(_VENDOR, struct.pack(">IHHHHQHBxHHIH2x", *numbers) + b"".join(specs))


def learn_match(source: int, target: int) -> bytes:
    """The learned flow matches in the field ``target`` what the frame has in ``source``."""
    return struct.pack(">HIHIH", _bits(source), source, 0, target, 0)


def learn_load(source: int, target: int) -> bytes:
    """The learned flow sets the field ``target`` to what the frame has in ``source``."""
    return struct.pack(">HIHIH", 1 << 11 | _bits(source), source, 0, target, 0)


def learn_output(source: int) -> bytes:
    """The learned flow sends frames to the port that the frame has in ``source``."""
    return struct.pack(">HIH", 2 << 11 | _bits(source), source, 0)


def _bits(header: int) -> int:
    return (header & 0xFF) * 8


def _action(kind: int, body: bytes) -> bytes:
    """An action of this type, with zeros up to a multiple of 8 bytes."""
    length = -(-(4 + len(body)) // 8) * 8
    return (struct.pack(">HH", kind, length) + body).ljust(length, b"\0")
