"""Network devices by netlink: read as values, made, changed and deleted, each with our mark.

pyroute2 writes. It costs tens of megabytes, so it is imported when first used; what is read is read
without it (see netlink.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from netplugin.errors import Conflict, HostError, NetpluginError, OperationTimeout
from netplugin.host import netlink
from netplugin.host.link_messages import (
    GETADDR,
    GETLINK,
    NEWLINK,
    SETLINK,
    BondMember,
    Bridge,
    Ifb,
    Link,
    Vlan,
    Vxlan,
    all_links,
    any_address,
    bridge_options,
    bridge_ports,
    by_kind,
    by_master,
    by_name,
    identity,
    port_learning,
    read_address,
    read_bond_member,
    read_bridge_port,
    read_link,
    unmakeable,
)

# include/uapi/linux/if_tun.h
TUN_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST = 0x400454CA, 0x400454CB
_IFF_TAP, _IFF_NO_PI, _IFF_MULTI_QUEUE = 0x0002, 0x1000, 0x0100
_IFF_VNET_HDR, _IFF_TUN_EXCL = 0x4000, 0x8000

Made = Bridge | Vlan | Vxlan | Ifb


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
            with words("read-link", name):
                return read_link(netlink.ask(GETLINK, by_name(name))[0])
        except NoSuchLink:
            return None

    def find(self, matches: Callable[[str, str, str], bool]) -> list[Link]:
        """All devices whose name, alias and kind match. Raises: HostError, OperationTimeout."""
        with words("list-links", "devices"):
            found = netlink.dump(GETLINK, all_links())
        return [read_link(payload) for payload in found if matches(*identity(payload))]

    def of_kind(self, kind: str) -> list[Link]:
        """All devices of a kind. Raises: HostError, OperationTimeout.

        The kernel chooses them, if it knows the kind; one that does not has none, and begins to
        list all.
        """
        with words("list-links", f"devices of kind {kind}"):
            found = netlink.dump(GETLINK, by_kind(kind), lambda p: identity(p)[2] == kind)
        return [read_link(payload) for payload in found]

    def bridge_members(self) -> dict[str, dict[str, int]]:
        """The MTU of each device that is on a bridge, by its name, by the bridge's.

        The bridges' own list of all their ports, which says little of each: this is read for each
        port that comes or goes, and there may be a thousand (6 ms; the same of the devices 40).

        Raises: HostError, OperationTimeout.
        """
        with words("list-members", "bridge ports"):
            ports = [read_bridge_port(p) for p in netlink.dump(GETLINK, bridge_ports())]
        bridges = {master: _name_of(master) for _, _, master in ports}
        found: dict[str, dict[str, int]] = {name: {} for name in bridges.values()}
        for name, mtu, master in ports:
            found[bridges[master]][name] = mtu
        return found

    def bond_members(self, bond: Link) -> tuple[BondMember, ...]:
        """The devices that make up a bond. Raises: HostError, OperationTimeout."""
        with words("list-members", bond.name):
            found = netlink.dump(GETLINK, by_master(bond.index))
        return tuple(sorted((read_bond_member(p) for p in found), key=lambda m: m.name))

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """The IP addresses, each with its prefix length, by the name of their device.

        Without the link-local ones of IPv6 that every NIC that is up has.

        Raises: HostError, OperationTimeout.
        """
        with words("read-addresses", "addresses"):
            found = netlink.dump(GETADDR, any_address())
        texts: dict[int, list[str]] = {}
        for index, address in map(read_address, found):
            if not address.startswith("fe80:"):
                texts.setdefault(index, []).append(address)
        return {_name_of(index): tuple(sorted(each)) for index, each in texts.items()}

    # -- writing ---------------------------------------------------------------------------------

    def create(self, name: str, made: Made, *, alias: str, address: str, mtu: int) -> None:
        """A device that is down, on no bridge, with its mark, without the host's IPv6.

        The address is set by the request that makes it and the alias by a later one: by the address
        a device can be known whose maker died in between (``names.birth_address``).

        Raises: Conflict if there is one of this name already; HostError, OperationTimeout.
        """
        step = f"create-{type(made).__name__.lower()}"
        self._call(step, "add", ifname=name, address=address, **self._arguments(made, step))
        index = self._there(name, step).index
        self._call(step, "set", index=index, ifalias=alias)
        self.refuse_ipv6(name)
        if isinstance(made, Bridge):
            self._set_bridge(index, made, step)
            # A bridge takes the least MTU of its members until somebody has set one, and setting
            # the one that it has counts for nothing.
            self._call(step, "set", index=index, mtu=mtu - 1)
        self._call(step, "set", index=index, mtu=mtu)

    def create_tap(self, name: str, alias: str, *, multi_queue: bool, mtu: int) -> None:
        """A persistent tap that is down and on no bridge, without the host's IPv6.

        The kernel refuses to open a tap of several queues as one of a single queue, and the other
        way round (``tun_set_iff`` in drivers/net/tun.c); libvirt asks for several as soon as the
        domain has more than one.

        Raises: HostError, OperationTimeout.
        """
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR | _IFF_TUN_EXCL
        flags |= _IFF_MULTI_QUEUE if multi_queue else 0
        with words("create-tap", name):
            device = os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        try:
            with words("create-tap", name):
                fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
            # Marked before it persists: one that we did not get to mark goes with this process.
            index = self._there(name, "create-tap").index
            self._call("create-tap", "set", index=index, ifalias=alias, mtu=mtu)
            self.refuse_ipv6(name)
            with words("create-tap", name):
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
        bridge: Bridge | None = None,
        learning: bool | None = None,
    ) -> None:
        """Change what is given; ``master=""`` takes the device off its bridge.

        One request each, in this order: older kernels set a device up before they enslave it, and
        only what is on a bridge can be told what that learns of it.

        Raises: HostError, OperationTimeout.
        """
        index = self._there(name, "set-link").index
        if mtu is not None:
            self._call("set-mtu", "set", index=index, mtu=mtu)
        if alias is not None:
            self._call("set-alias", "set", index=index, ifalias=alias)
        if bridge is not None:
            self._set_bridge(index, bridge, "set-bridge")
        if master is not None:
            owner = self._there(master, "enslave").index if master else 0
            self._call("enslave", "set", index=index, master=owner)
        if learning is not None:
            with words("set-learning", name):
                netlink.ask(SETLINK, port_learning(index, learning))
        if up is not None:
            self._call("set-state", "set", index=index, state="up" if up else "down")

    def refuse_ipv6(self, name: str) -> None:
        """Turn the host's own IPv6 off on the device: its link-local address is a way into the host.

        Raises: HostError.
        """
        with words("disable-ipv6", name), contextlib.suppress(FileNotFoundError):
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")

    def delete(self, name: str) -> None:
        """Delete the device, if there is one. Raises: HostError, OperationTimeout."""
        link = self.get(name)
        if link is not None:
            with contextlib.suppress(NoSuchLink):
                self._call("delete-link", "del", index=link.index)

    # -- netlink ---------------------------------------------------------------------------------

    def _arguments(self, made: Made, step: str) -> Mapping[str, Any]:
        """How pyroute2 wants to be told what is to be made."""
        match made:
            case Bridge():
                return {"kind": "bridge"}
            case Ifb():
                return {"kind": "ifb"}
            case Vlan():
                parent = self._there(made.parent, step).index
                return {"kind": "vlan", "link": parent, "vlan_id": made.id,
                        "vlan_protocol": made.protocol}  # fmt: skip
            case Vxlan():
                six = ipaddress.ip_address(made.local).version == 6
                return {
                    "kind": "vxlan", "vxlan_id": made.vni, "vxlan_port": made.port,
                    "vxlan_local6" if six else "vxlan_local": made.local, "vxlan_df": made.df,
                    "vxlan_ttl": made.ttl, "vxlan_learning": int(made.learning),
                }  # fmt: skip

    def _set_bridge(self, index: int, bridge: Bridge, step: str) -> None:
        with words(step, _name_of(index)):
            netlink.ask(NEWLINK, bridge_options(index, bridge))

    def _netlink(self) -> Any:
        if self._socket is None:
            from pyroute2 import IPRoute  # see the head of this file

            logging.getLogger("pyroute2").setLevel(logging.WARNING)  # it tells of each call
            self._socket = IPRoute(ext_ack=True)
        return self._socket

    def _call(self, step: str, command: str, **arguments: Any) -> None:
        what = arguments.get("ifname") or _name_of(arguments.get("index", 0))
        with words(step, what):
            list(self._netlink().link(command, **arguments) or ())

    def _there(self, name: str, step: str) -> Link:
        link = self.get(name)
        if link is None:
            raise HostError(f"{name}: there is no such device", step=step)
        return link


class NoSuchLink(HostError):
    """The kernel knows no device of this name or index."""


@contextlib.contextmanager
def words(step: str, what: str) -> Iterator[None]:
    """The kernel's refusal as a typed error with its own words."""
    try:
        yield
    except NetpluginError:
        raise
    except TimeoutError as late:
        raise OperationTimeout(f"{what}: the kernel did not answer in time", step=step) from late
    except netlink.Interrupted as moving:
        raise HostError(f"{what} kept changing while they were read", step=step) from moving
    except OSError as refused:
        raise _refusal(step, what, refused.errno, refused.strerror or str(refused)) from refused
    except Exception as refused:
        code = getattr(refused, "code", None)  # a NetlinkError of pyroute2, which derives from it
        if not isinstance(code, int):
            raise
        said = refused.args[1] if len(refused.args) > 1 else os.strerror(code)
        raise _refusal(step, what, code, str(said)) from refused


def _refusal(step: str, what: str, code: int | None, said: str) -> NetpluginError:
    if code == errno.ENODEV:
        return NoSuchLink(f"{what}: {said}", step=step)
    if code == errno.EEXIST and step.startswith("create-"):
        return Conflict(
            f"{what} cannot be made beside something that is not ours: {said}", step=step,
            fix="find it with ip -d link show, and remove or rename it",
        )  # fmt: skip
    return HostError(f"{what}: {said}", step=step)


def _name_of(index: int) -> str:
    try:
        return socket.if_indextoname(index)
    except OSError:
        return f"device {index}"  # gone since


def kind_unavailable(kind: str) -> str | None:
    """The kernel's words if it makes no devices of a kind, or not for us; nothing is made.

    The kernel looks for the kind (and loads its module) before it refuses the address, which is a
    multicast one. Without pyroute2, which does not work in a thread that runs an event loop.
    """
    try:
        netlink.ask(NEWLINK, unmakeable(kind), netlink.EXCLUSIVE)
    except OSError as refused:
        if refused.errno == errno.EADDRNOTAVAIL:
            return None
        return refused.strerror or str(refused)
    return "it made what cannot be"
