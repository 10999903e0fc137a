"""Network devices by netlink: read as values, made, changed and deleted, each with our mark.

pyroute2 does the work. It costs tens of megabytes, so it is imported when first used; what is read
for every port, the members of a bridge, is read without it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from netplugin.errors import HostError, NetpluginError, OperationTimeout

# include/uapi/linux/if_tun.h
TUN_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST = 0x400454CA, 0x400454CB
_IFF_TAP, _IFF_NO_PI, _IFF_MULTI_QUEUE = 0x0002, 0x1000, 0x0100
_IFF_VNET_HDR, _IFF_TUN_EXCL = 0x4000, 0x8000
# include/uapi/linux/netlink.h, rtnetlink.h, if_link.h
_ERROR, _DONE = 2, 3
NEWLINK, DELLINK, _GETLINK = 16, 17, 18
_REQUEST_DUMP, _REQUEST_CREATE, _DUMP_INTERRUPTED = 0x301, 0x605, 0x10
_ADDRESS, _IFNAME, _MTU, _MASTER, _LINKINFO, _IFALIAS, _EXT_MASK = 1, 3, 4, 10, 18, 20, 29
_INFO_KIND = 1
_SKIP_STATISTICS = 8
_IFF_UP = 1
_HEADER, _IFINFO = struct.Struct("=IHHII"), struct.Struct("=BxHiII")
_ERRNO = struct.Struct("=i")
_ANSWER_S = 5.0
_DUMPS = 5  # a dump during which links came or went is begun anew, so often at most

#: What a bridge of ours is set to: a loop is the operator's to avoid, a member forwards at once,
#: and multicast reaches every VM without a querier.
BRIDGE_OPTIONS: Mapping[str, int] = MappingProxyType(
    {"br_stp_state": 0, "br_forward_delay": 0, "br_mcast_snooping": 0}
)


@dataclass(frozen=True)
class Link:
    """A network device as the kernel has it."""

    index: int
    name: str
    kind: str = ""
    mtu: int = 1500
    up: bool = False
    carrier: bool = False
    master: str | None = None
    alias: str | None = None
    address: str | None = None
    #: Whether the host's own IPv6 runs on it.
    ipv6: bool = False
    #: Of a tap.
    multi_queue: bool = False
    vnet_hdr: bool = False
    persistent: bool = False
    #: Of a bridge: those of BRIDGE_OPTIONS.
    options: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """A device that is enslaved to a bridge."""

    index: int
    name: str
    mtu: int


@dataclass(frozen=True)
class LinkEvent:
    """What the kernel says of a device that has changed, or (``gone``) is no more."""

    gone: bool
    name: str
    alias: str | None
    up: bool
    mtu: int
    master: int


class Links:
    """The devices of the network namespace that the calling thread is in."""

    def __init__(self) -> None:
        self._socket: Any = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # -- reading ---------------------------------------------------------------------------------

    def get(self, name: str) -> Link | None:
        """The device of this name. Raises: HostError, OperationTimeout."""
        try:
            return _link(self._call("read-link", "get", ifname=name, ext_mask=_SKIP_STATISTICS)[0])
        except _NoSuchLink:
            return None

    def find(self, matches: Callable[[str, str], bool]) -> list[Link]:
        """All devices whose name and alias match. Raises: HostError, OperationTimeout."""
        return [
            _link(message)
            for message in self._call("list-links", "dump", ext_mask=_SKIP_STATISTICS)
            if matches(message.get_attr("IFLA_IFNAME"), message.get_attr("IFLA_IFALIAS") or "")
        ]

    def addresses(self, name: str) -> tuple[str, ...]:
        """The IP addresses of the device, without the link-local ones that every NIC that is up has.

        Raises: HostError, OperationTimeout.
        """
        link = self.get(name)
        if link is None:
            return ()
        with _words("read-addresses", name):
            found = list(self._netlink().addr("dump", index=link.index))
        texts = (f"{m.get_attr('IFA_ADDRESS')}/{m['prefixlen']}" for m in found)
        return tuple(sorted(text for text in texts if not text.startswith("fe80:")))

    def members(self, bridge: Link) -> tuple[Member, ...]:
        """The devices enslaved to the bridge.

        A dump that the kernel filters, read with nothing but what is needed: this is read for each
        port that comes or goes, and there may be a thousand.

        Raises: HostError, OperationTimeout.
        """
        for _ in range(_DUMPS):
            with _words("list-members", bridge.name):
                found = _dump_members(bridge.index)
            if found is not None:
                return found
        raise HostError(
            f"the members of {bridge.name} kept changing while they were read", step="list-members"
        )

    # -- writing ---------------------------------------------------------------------------------

    def create_bridge(self, name: str, alias: str, mtu: int, address: str) -> None:
        """A bridge that is up, with ``BRIDGE_OPTIONS``, without the host's IPv6.

        The address is set by the request that makes the bridge and the alias by a later one: by the
        address a bridge can be known whose maker died in between.

        Raises: HostError, OperationTimeout.
        """
        self._call(
            "create-bridge", "add", ifname=name, kind="bridge", address=address, **BRIDGE_OPTIONS
        )
        link = self._there(name, "create-bridge")
        self._call("create-bridge", "set", index=link.index, ifalias=alias)
        self.refuse_ipv6(name)
        # A bridge takes the least MTU of its members until somebody has set one, and setting the
        # one that it has counts for nothing.
        self._call("create-bridge", "set", index=link.index, mtu=mtu - 1)
        self._call("create-bridge", "set", index=link.index, mtu=mtu)
        self._call("create-bridge", "set", index=link.index, state="up")

    def create_tap(self, name: str, alias: str, *, multi_queue: bool, mtu: int) -> None:
        """A persistent tap that is down and on no bridge, without the host's IPv6.

        The kernel refuses to open a tap of several queues as one of a single queue, and the other
        way round (``tun_set_iff`` in drivers/net/tun.c); libvirt asks for several as soon as the
        domain has more than one.

        Raises: HostError, OperationTimeout.
        """
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR | _IFF_TUN_EXCL
        flags |= _IFF_MULTI_QUEUE if multi_queue else 0
        with _words("create-tap", name):
            device = os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        try:
            with _words("create-tap", name):
                fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
            # Marked before it persists: one that we did not get to mark goes with this process.
            link = self._there(name, "create-tap")
            self._call("create-tap", "set", index=link.index, ifalias=alias, mtu=mtu)
            self.refuse_ipv6(name)
            with _words("create-tap", name):
                fcntl.ioctl(device, _TUNSETPERSIST, 1)
        finally:
            os.close(device)

    def set(
        self,
        name: str,
        *,
        mtu: int | None = None,
        alias: str | None = None,
        master: str | None = None,
        up: bool | None = None,
        options: Mapping[str, int] | None = None,
    ) -> None:
        """Change what is given; ``master=""`` takes the device off its bridge.

        One request each, in this order: older kernels set a device up before they enslave it.

        Raises: HostError, OperationTimeout.
        """
        index = self._there(name, "set-link").index
        if mtu is not None:
            self._call("set-mtu", "set", index=index, mtu=mtu)
        if alias is not None:
            self._call("set-alias", "set", index=index, ifalias=alias)
        if options:
            self._call("set-bridge", "set", index=index, kind="bridge", **options)
        if master is not None:
            owner = self._there(master, "enslave").index if master else 0
            self._call("enslave", "set", index=index, master=owner)
        if up is not None:
            self._call("set-state", "set", index=index, state="up" if up else "down")

    def refuse_ipv6(self, name: str) -> None:
        """Turn the host's own IPv6 off on the device: its link-local address is a way into the host.

        Raises: HostError.
        """
        with _words("disable-ipv6", name), contextlib.suppress(FileNotFoundError):
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")

    def delete(self, name: str) -> None:
        """Delete the device, if there is one. Raises: HostError, OperationTimeout."""
        link = self.get(name)
        if link is not None:
            with contextlib.suppress(_NoSuchLink):
                self._call("delete-link", "del", index=link.index)

    # -- netlink ---------------------------------------------------------------------------------

    def _netlink(self) -> Any:
        if self._socket is None:
            from pyroute2 import IPRoute  # see the head of this file

            logging.getLogger("pyroute2").setLevel(logging.WARNING)  # it tells of each call
            self._socket = IPRoute()
        return self._socket

    def _call(self, step: str, command: str, **arguments: Any) -> list[Any]:
        what = arguments.get("ifname") or _name_of(arguments.get("index", 0))
        with _words(step, what):
            return list(self._netlink().link(command, **arguments) or ())

    def _there(self, name: str, step: str) -> Link:
        link = self.get(name)
        if link is None:
            raise HostError(f"{name}: there is no such device", step=step)
        return link


class _NoSuchLink(HostError):
    """The kernel knows no device of this name or index."""


@contextlib.contextmanager
def _words(step: str, what: str) -> Iterator[None]:
    """The kernel's refusal as a HostError with its own words."""
    try:
        yield
    except NetpluginError:
        raise
    except TimeoutError as late:
        raise OperationTimeout(f"{what}: the kernel did not answer in time", step=step) from late
    except OSError as refused:
        raise HostError(f"{what}: {refused.strerror or refused}", step=step) from refused
    except Exception as refused:
        code = getattr(refused, "code", None)  # a NetlinkError of pyroute2, which derives from it
        if not isinstance(code, int):
            raise
        kind = _NoSuchLink if code == errno.ENODEV else HostError
        words = refused.args[1] if len(refused.args) > 1 else os.strerror(code)
        raise kind(f"{what}: {words}", step=step) from refused


def _link(message: Any) -> Link:
    info = message.get_attr("IFLA_LINKINFO")
    kind = (info and info.get_attr("IFLA_INFO_KIND")) or ""
    data = info.get_attr("IFLA_INFO_DATA") if info else None
    master = message.get_attr("IFLA_MASTER")

    def tun(attribute: str) -> bool:
        return kind == "tun" and data is not None and bool(data.get_attr(f"IFLA_TUN_{attribute}"))

    return Link(
        index=message["index"],
        name=message.get_attr("IFLA_IFNAME"),
        kind=kind,
        mtu=message.get_attr("IFLA_MTU") or 0,
        up=bool(message["flags"] & _IFF_UP),
        carrier=bool(message.get_attr("IFLA_CARRIER")),
        master=_name_of(master) if master else None,
        alias=message.get_attr("IFLA_IFALIAS"),
        address=message.get_attr("IFLA_ADDRESS"),
        ipv6=_ipv6(message),
        multi_queue=tun("MULTI_QUEUE"),
        vnet_hdr=tun("VNET_HDR"),
        persistent=tun("PERSIST"),
        options=_bridge_options(data) if kind == "bridge" and data is not None else {},
    )


def _bridge_options(data: Any) -> dict[str, int]:
    found = {name: data.get_attr(f"IFLA_{name.upper()}") for name in BRIDGE_OPTIONS}
    return {name: value for name, value in found.items() if value is not None}


def _ipv6(message: Any) -> bool:
    families = message.get_attr("IFLA_AF_SPEC")
    inet6 = families.get_attr("AF_INET6") if families else None
    conf = inet6.get_attr("IFLA_INET6_CONF") if inet6 else None
    return conf is not None and not conf["disable_ipv6"]


def _name_of(index: int) -> str:
    try:
        return socket.if_indextoname(index)
    except OSError:
        return f"device {index}"  # gone since


# -- netlink without pyroute2 ----------------------------------------------------------------------


def _dump_members(master: int) -> tuple[Member, ...] | None:
    """None if links came or went meanwhile, so that the answer may lack some."""
    body = _IFINFO.pack(0, 0, 0, 0, 0)
    body += _attribute(_MASTER, struct.pack("=I", master))
    body += _attribute(_EXT_MASK, struct.pack("=I", _SKIP_STATISTICS))
    request = _HEADER.pack(_HEADER.size + len(body), _GETLINK, _REQUEST_DUMP, 1, 0) + body
    found: list[Member] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(_ANSWER_S)
        netlink.send(request)
        while True:
            for kind, flags, payload in messages(netlink.recv(1 << 16)):
                if flags & _DUMP_INTERRUPTED:
                    return None
                if kind == _DONE:
                    return tuple(found)
                if kind == _ERROR:
                    number = -_ERRNO.unpack_from(payload)[0]
                    raise OSError(number, os.strerror(number))
                found.append(_member(payload))


def bridges_unavailable() -> str | None:
    """The kernel's words if it makes no bridges, or not for us; nothing is made to find out.

    The kernel looks for the type (and loads its module) before it refuses the address, which is a
    multicast one. Without pyroute2, which does not work in a thread that runs an event loop.
    """
    body = _IFINFO.pack(0, 0, 0, 0, 0)
    body += _attribute(_IFNAME, b"npbprobe\0") + _attribute(_ADDRESS, b"\x01" + bytes(5))
    body += _attribute(_LINKINFO, _attribute(_INFO_KIND, b"bridge"))
    request = _HEADER.pack(_HEADER.size + len(body), NEWLINK, _REQUEST_CREATE, 1, 0) + body
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
            netlink.settimeout(_ANSWER_S)
            netlink.send(request)
            _, _, payload = next(messages(netlink.recv(1 << 16)))
    except OSError as refused:
        return refused.strerror or str(refused)
    number = -_ERRNO.unpack_from(payload)[0]
    return None if number == errno.EADDRNOTAVAIL else os.strerror(number)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _member(payload: bytes) -> Member:
    index = _IFINFO.unpack_from(payload)[2]
    name, mtu = "", 0
    for kind, value in attributes(payload, _IFINFO.size):
        if kind == _IFNAME:
            name = text(value)
        elif kind == _MTU:
            mtu = _number(value)
        if name and mtu:
            break  # the kernel writes both first; what follows is long
    return Member(index, name, mtu)


def link_event(kind: int, payload: bytes) -> LinkEvent | None:
    """What a message of the group RTNLGRP_LINK tells; a bridge's own word of its member tells less."""
    family, _, _, flags, _ = _IFINFO.unpack_from(payload)
    if kind not in (NEWLINK, DELLINK) or family != socket.AF_UNSPEC:
        return None
    found = dict(attributes(payload, _IFINFO.size))
    return LinkEvent(
        gone=kind == DELLINK,
        name=text(found.get(_IFNAME, b"")),
        alias=text(found[_IFALIAS]) if _IFALIAS in found else None,
        up=bool(flags & _IFF_UP),
        mtu=_number(found.get(_MTU)),
        master=_number(found.get(_MASTER)),
    )


def _number(value: bytes | None) -> int:
    return int.from_bytes(value or b"", sys.byteorder)


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and payload of each netlink message."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, flags, _, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            return
        yield kind, flags, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def attributes(payload: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """Type and value of each attribute after a header of ``offset`` bytes."""
    while offset + 4 <= len(payload):
        length, kind = struct.unpack_from("=HH", payload, offset)
        if length < 4:
            return
        yield kind & 0x3FFF, payload[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")
