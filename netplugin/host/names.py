"""Names, addresses and marks of the objects that netplugin creates."""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

#: Name prefixes of our devices. nftables drops the traffic of a tap with our prefix, or in our group
#: (``TAP_GROUP``), and no filter.
TAP = "npt"
VHOST = "npv"
BRIDGE = "npb"
#: An OVS bridge whose name was derived: a Linux bridge may be for the same network.
OVS_BRIDGE = "npo"
UPLINK = "npu"
VXLAN = "npx"
SHAPER = "npi"
RELAY = "npr"
#: How every name begins that we choose.
DERIVED = "np"
#: The interface group of taps whose names were chosen (``PortSpec.port_name``).
TAP_GROUP = 0x6E70
#: Not a device: the directory of a port's vhost-user socket.
SOCKETS = "nps"
#: Not a network device: the VDUSE device of a port, and the vDPA device that the kernel has for it.
VDUSE = "npd"

#: Longest path of a UNIX socket, in bytes.
MAX_SOCKET_PATH = 107

# First byte of a MAC: locally administered and unicast (IEEE 802). The other bytes are a digest, so
# no random MAC of the kernel matches by chance.
_FIRST_BYTE = 0x0E

# IFNAMSIZ is 16 with the final NUL (include/uapi/linux/if.h): 3 letters and 11 hex digits fit.
# With 44 bits, a clash among 10,000 ports of one host has a probability of 1 in 350,000; who chooses the
# identities finds one in half a minute, so the store refuses the second port (``Store.save``).
_DIGITS = 11


@lru_cache(maxsize=256)  # a plug asks for the names of its port about thirty times
def device_name(prefix: str, identity: str) -> str:
    """The device name for this identity, for example ``npv3f2a91c07be``."""
    return prefix + name_digits(identity)


def name_digits(identity: str) -> str:
    """What the names of all devices for this identity have in common."""
    return hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]


def is_our_device(name: str) -> bool:
    """Whether this is, or looks like, a name that netplugin gives to a device."""
    return name.startswith((TAP, VHOST, BRIDGE, OVS_BRIDGE, UPLINK, VXLAN, SHAPER, RELAY, "np-"))


def vhost_socket(directory: Path, port_id: str) -> str:
    """The path of a port's vhost-user socket, in the port's own directory below ``directory``."""
    return f"{directory}/{device_name(SOCKETS, port_id)}/{device_name(VHOST, port_id)}"


def fits_socket(path: str | Path) -> bool:
    """Whether the path is short enough for a UNIX socket.

    ``sun_path`` has 108 bytes with the final NUL (unix(7)). DPDK truncates a longer path silently
    (``create_unix_socket`` in lib/vhost/socket.c), so OVS would use another file.
    """
    return len(os.fsencode(path)) <= MAX_SOCKET_PATH


def provisional_mac(name: str) -> str:
    """The provisional MAC that a device of ours is created with.

    ``rtnl_create_link`` (net/core/rtnetlink.c) ignores IFLA_IFALIAS, so the alias that marks a
    device as ours needs a second request; the MAC can be part of the first. If the agent dies
    between the two, the name and this MAC identify the device as ours.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (_FIRST_BYTE, *digest[:5]))


def link_local(mac: str) -> str:
    """The IPv6 link-local address derived from a MAC (modified EUI-64, RFC 4291, appendix A)."""
    octets = bytes.fromhex(mac.replace(":", ""))
    identifier = bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:]
    return str(ipaddress.IPv6Address(b"\xfe\x80" + bytes(6) + identifier))


# -- The mark of the agent's store on an object of the host: the mark to write, and the mark found there.


#: Maps the mark that was found (empty: none) to the mark to write.
Mark = Callable[[str], str]
# How many of its own marks a process remembers: one for each commit that changed the object.
_WRITTEN = 10_000


#: Maps a kind of claims to the claim that each port has: its key, and what is stored with it.
Claimed = Callable[[str], Mapping[str, tuple[str, Mapping[str, Any]]]]


def nothing_claimed(kind: str) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Without a store, no port has a claim."""
    return {}


def unmarked(found: str) -> str:
    """Keep the mark as it is."""
    return found


class CarriedMark:
    """The store mark of an object that several backends write to, such as an OVS database.

    The first backend that writes replaces the mark. The mark found before is remembered, so that
    every backend compares with it, in any order. Not thread-safe.
    """

    def __init__(self, mark: Mark = unmarked) -> None:
        self._mark = mark
        self._found = ""
        self._written: dict[str, None] = {}

    def found(self, there: str) -> str:
        """The last mark that another process wrote; empty if there was none."""
        if there and there not in self._written:
            self._found = there
        return self._found

    def after(self, there: str) -> str:
        """The mark to write over the mark ``there``."""
        found = self.found(there)
        mark = self._mark(found)
        if mark != found:
            self._written[mark] = None
            if len(self._written) > _WRITTEN:
                del self._written[next(iter(self._written))]
        return mark
