"""The types of the API's fields, such as names and addresses, and the base class of its models."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

#: What a field with this pattern must be, for the errors.
PATTERN_WORDS: Final[dict[str, str]] = {}


def worded(pattern: str, words: str) -> str:
    """A pattern, with the words that an error has in its place."""
    PATTERN_WORDS[pattern] = words
    return pattern


_CHARACTERS = "letters, digits, dots, dashes and underscores, of which the first is a letter or digit"
# Names become file names, OVSDB values and libvirt XML, so the character set is restricted here.
# (In pydantic's regex engine ``$`` matches the end of the text only, not the end of a line.)
NAME_PATTERN = worded(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", f"must be 1 to 64 {_CHARACTERS}")
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, strict=True)]
PortId = Name
# A network device: IFNAMSIZ is 16 with the final NUL (include/uapi/linux/if.h).
DEVICE_PATTERN = worded(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$", f"must be 1 to 15 {_CHARACTERS}")
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
_SOCKET = worded(
    r"^(/[A-Za-z0-9_][A-Za-z0-9._-]*){3,}$",
    "must be an absolute path of three names or more such as /run/vms/vm-1/net.sock, of letters, digits, "
    "dots, dashes and underscores",
)
SocketPath = Annotated[str, StringConstraints(pattern=_SOCKET, max_length=107, strict=True)]
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


MAC_PATTERN = worded(
    r"^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$", "must be a MAC address such as 52:54:00:12:34:56"
)
Mac = Annotated[str, StringConstraints(pattern=MAC_PATTERN, strict=True), AfterValidator(_unicast)]


_ADDRESS = "must be an IP address or prefix such as 192.0.2.5 or 192.0.2.0/24"
ADDRESS_PATTERN = worded(r"^[0-9A-Fa-f.:]{2,45}(/[0-9]{1,3})?$", _ADDRESS)


def _address(text: str) -> str:
    """Validate an IPv4 or IPv6 address or prefix and return its shortest form; host bits are refused."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(_ADDRESS) from None
    if "/" in text and str(network.network_address) != str(ipaddress.ip_address(text.partition("/")[0])):
        raise ValueError(f"must be a prefix without bits of hosts, such as {network}")
    if network.is_multicast or network.prefixlen == 0:
        raise ValueError("must be a unicast address or a prefix of at least one bit")
    if network.version == 6 and int(network.network_address) >> 48 == 0:
        # RFC 4291, section 2.5: unspecified, loopback, IPv4-compatible and IPv4-mapped.
        raise ValueError("is an IPv6 address that is never on a wire (80 leading zero bits)")
    if network.prefixlen == network.max_prefixlen:
        return str(network.network_address)
    return str(network)


IpAddress = Annotated[str, StringConstraints(pattern=ADDRESS_PATTERN, strict=True), AfterValidator(_address)]
PCI_PATTERN = worded(
    r"^[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[01][0-9A-Fa-f]\.[0-7]$", "must be a PCI address such as 0000:03:00.1"
)
# ``to_lower`` is applied after the pattern.
PciAddress = Annotated[str, StringConstraints(pattern=PCI_PATTERN, to_lower=True, strict=True)]


_PEER = "must be an IP address such as 192.0.2.5"
PEER_PATTERN = worded(r"^[0-9A-Fa-f.:]{2,45}$", _PEER)


def _peer(text: str) -> str:
    """Validate the tunnel address of another host and return its shortest form."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(_PEER) from None
    if address.is_multicast or address.is_unspecified or address.is_loopback:
        raise ValueError("must be the unicast address of a host")
    return str(address)


PeerAddress = Annotated[str, StringConstraints(pattern=PEER_PATTERN, strict=True), AfterValidator(_peer)]


T = TypeVar("T", int, str)


def in_order(values: tuple[T, ...]) -> tuple[T, ...]:
    """Each value once, sorted: the order in a request does not matter."""
    return tuple(sorted(set(values)))


class Value(BaseModel):
    """Base class of the models: immutable, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
