"""The types of the API's fields, such as names and addresses, and the base class of its models."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

# Names become file names, OVSDB values and libvirt XML, so the character set is restricted here.
# (In pydantic's regex engine ``$`` matches the end of the text only, not the end of a line.)
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, strict=True)]
PortId = Name
# A network device: IFNAMSIZ is 16 with the final NUL (include/uapi/linux/if.h).
DEVICE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$"
DeviceName = Annotated[str, StringConstraints(pattern=DEVICE_PATTERN, strict=True)]


def _free_to_choose(name: str) -> str:
    """Refuse names that the agent derives itself (netplugin/host/names.py), those that libvirt removes
    from a domain as its own (``VIR_NET_GENERATED_*_PREFIX``), and names in /proc/sys/net/ipv6/conf that
    are no device's."""
    if name.startswith("np"):
        raise ValueError("names that begin with np are those that the agent chooses")
    if name.startswith(("vnet", "vif", "macvtap", "macvlan")):
        raise ValueError("libvirt takes names that begin with vnet, vif, macvtap or macvlan for its own")
    if name in ("all", "default"):
        raise ValueError(f"no device can be named {name}")
    return name


PortName = Annotated[DeviceName, AfterValidator(_free_to_choose)]
# Absolute and normalized: a root, a directory below it, the socket. Within the length of a UNIX socket's
# path (``names.MAX_SOCKET_PATH``).
SocketPath = Annotated[
    str, StringConstraints(pattern=r"^(/[A-Za-z0-9_][A-Za-z0-9._-]*){3,}$", max_length=107, strict=True)
]
# Strict: only JSON true and false; "no", 0 and similar values are refused.
Flag = Annotated[bool, Field(strict=True)]
VlanId = Annotated[int, Field(ge=1, le=4094, strict=True)]
Kbps = Annotated[int, Field(ge=1, le=400_000_000, strict=True)]
RingSize = Literal[256, 512, 1024]


def at_most(most: int) -> BeforeValidator:
    """Check the length of a list before its entries are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) > most:
            raise ValueError(f"must have at most {most} entries")
        return value

    return BeforeValidator(check)


def _unicast(mac: str) -> str:
    mac = mac.lower()
    if int(mac[:2], 16) & 1 or mac == "00:00:00:00:00:00":
        raise ValueError("must be a unicast address that is not all zeros")
    return mac


MAC_PATTERN = r"^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$"
Mac = Annotated[str, StringConstraints(pattern=MAC_PATTERN, strict=True), AfterValidator(_unicast)]


def _address(text: str) -> str:
    """Validate an IPv4 or IPv6 address or prefix and return its shortest form; host bits are refused."""
    network = ipaddress.ip_network(text, strict=True)
    if network.is_multicast or network.prefixlen == 0:
        raise ValueError("must be a unicast address or a prefix of at least one bit")
    if network.version == 6 and int(network.network_address) >> 48 == 0:
        # RFC 4291, section 2.5: unspecified, loopback, IPv4-compatible and IPv4-mapped.
        raise ValueError("is an IPv6 address that is never on a wire (80 leading zero bits)")
    if network.prefixlen == network.max_prefixlen:
        return str(network.network_address)
    return str(network)


ADDRESS_PATTERN = r"^[0-9A-Fa-f.:]{2,45}(/[0-9]{1,3})?$"
IpAddress = Annotated[str, StringConstraints(pattern=ADDRESS_PATTERN, strict=True), AfterValidator(_address)]
PCI_PATTERN = r"^[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[01][0-9A-Fa-f]\.[0-7]$"
# ``to_lower`` is applied after the pattern.
PciAddress = Annotated[str, StringConstraints(pattern=PCI_PATTERN, to_lower=True, strict=True)]


def _peer(text: str) -> str:
    """Validate the tunnel address of another host and return its shortest form."""
    address = ipaddress.ip_address(text)
    if address.is_multicast or address.is_unspecified or address.is_loopback:
        raise ValueError("must be the unicast address of a host")
    return str(address)


PEER_PATTERN = r"^[0-9A-Fa-f.:]{2,45}$"
PeerAddress = Annotated[str, StringConstraints(pattern=PEER_PATTERN, strict=True), AfterValidator(_peer)]


T = TypeVar("T", int, str)


def in_order(values: tuple[T, ...]) -> tuple[T, ...]:
    """Each value once, sorted: the order in a request does not matter."""
    return tuple(sorted(set(values)))


class Value(BaseModel):
    """Base class of the models: immutable, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
