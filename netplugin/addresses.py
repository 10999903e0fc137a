"""Addresses derived from others."""

from __future__ import annotations

import ipaddress


def link_local(mac: str) -> str:
    """The IPv6 link-local address derived from a MAC (modified EUI-64, RFC 4291, appendix A)."""
    octets = bytes.fromhex(mac.replace(":", ""))
    identifier = bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:]
    return str(ipaddress.IPv6Address(b"\xfe\x80" + bytes(6) + identifier))
