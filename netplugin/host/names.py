"""Names of the devices we make: short enough for the kernel, the same each time, ours at a glance."""

from __future__ import annotations

import hashlib

#: What the names of our devices begin with; nftables drops a tap of ours that has no filter by it.
TAP = "npt"
VHOST = "npv"
BRIDGE = "npb"
UPLINK = "npu"

# IFNAMSIZ is 16 with the final NUL (include/uapi/linux/if.h): 3 letters and 11 hex digits fit, and
# 44 bits make an accidental clash among 10,000 ports of one host a one in 350,000 event.
_DIGITS = 11


def device_name(prefix: str, identity: str) -> str:
    """The device's name for this identity, for example ``npv3f2a91c07be``."""
    return prefix + hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]
