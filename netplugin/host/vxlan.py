"""What VXLAN adds to each packet."""

from __future__ import annotations

import ipaddress

# RFC 7348, section 5: the VM's layer-3 packet is preceded by its Ethernet header (without a tag), the VXLAN
# header, UDP and the outer IP header. The MTU of the underlay minus these is the MTU of the VM.
_ETHERNET, _VXLAN, _UDP = 14, 8, 8
_IP = {4: 20, 6: 40}


def overhead(local_ip: str) -> int:
    """The bytes of encapsulation that count against the MTU of the underlay: 50 (IPv4) or 70 (IPv6)."""
    return _ETHERNET + _VXLAN + _UDP + _IP[ipaddress.ip_address(local_ip).version]
