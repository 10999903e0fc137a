"""What a VXLAN tunnel costs."""

from __future__ import annotations

import ipaddress

# RFC 7348, section 5: around the VM's layer-3 packet stand its Ethernet header (without a tag), the
# VXLAN header, UDP and the outer IP. What is left of the wire's MTU is what a VM may send.
_ETHERNET, _VXLAN, _UDP = 14, 8, 8
_IP = {4: 20, 6: 40}


def overhead(local_ip: str) -> int:
    """The bytes of a tunnel that count against the MTU of the interface under it: 50, or 70."""
    return _ETHERNET + _VXLAN + _UDP + _IP[ipaddress.ip_address(local_ip).version]
