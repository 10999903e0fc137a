"""Names of the devices we make: short enough for the kernel, the same each time, ours at a glance."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

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

#: Bytes that the path of a UNIX socket may have.
MAX_SOCKET_PATH = 107

# Locally administered and unicast (IEEE 802), and not what the kernel gives by chance.
_BIRTH = 0x0E

# IFNAMSIZ is 16 with the final NUL (include/uapi/linux/if.h): 3 letters and 11 hex digits fit, and
# 44 bits make an accidental clash among 10,000 ports of one host a one in 350,000 event.
_DIGITS = 11


def device_name(prefix: str, identity: str) -> str:
    """The device's name for this identity, for example ``npv3f2a91c07be``."""
    return prefix + hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]


def vhost_socket(directory: Path, port_id: str) -> Path:
    """Where a port's vhost-user socket is below ``directory``: in a directory of the port's own."""
    return directory / device_name(SOCKETS, port_id) / device_name(VHOST, port_id)


def fits_socket(path: str | Path) -> bool:
    """Whether a UNIX socket can have this path.

    ``sun_path`` has 108 bytes with the final NUL (unix(7)). DPDK cuts a longer path without a word
    (``create_unix_socket`` in lib/vhost/socket.c), so that OVS would look for another file.
    """
    return len(os.fsencode(path)) <= MAX_SOCKET_PATH


def birth_address(name: str) -> str:
    """The MAC address that a device of ours is made with.

    The kernel takes an alias only of a device that is there (``rtnl_create_link`` in
    net/core/rtnetlink.c passes IFLA_IFALIAS over), but an address in the request that makes it. So
    one whose maker died before it could mark it is known as ours by its name and this address.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (_BIRTH, *digest[:5]))
