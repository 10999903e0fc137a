"""Names of the devices we make: short enough for the kernel, the same each time, ours at a glance."""

from __future__ import annotations

import hashlib

#: What the names of our devices begin with; nftables drops a tap of ours that has no filter by it.
TAP = "npt"
VHOST = "npv"
BRIDGE = "npb"
UPLINK = "npu"
VXLAN = "npx"
SHAPER = "npi"
RELAY = "npr"
#: Not of a device: of a port's directory for its vhost-user socket.
SOCKETS = "nps"

# Locally administered and unicast (IEEE 802), and not what the kernel gives by chance.
_BIRTH = 0x0E

# IFNAMSIZ is 16 with the final NUL (include/uapi/linux/if.h): 3 letters and 11 hex digits fit, and
# 44 bits make an accidental clash among 10,000 ports of one host a one in 350,000 event.
_DIGITS = 11


def device_name(prefix: str, identity: str) -> str:
    """The device's name for this identity, for example ``npv3f2a91c07be``."""
    return prefix + hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]


def birth_address(name: str) -> str:
    """The MAC address that a device of ours is made with.

    The kernel takes an alias only of a device that is there (``rtnl_create_link`` in
    net/core/rtnetlink.c passes IFLA_IFALIAS over), but an address in the request that makes it. So
    one whose maker died before it could mark it is known as ours by its name and this address.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (_BIRTH, *digest[:5]))
