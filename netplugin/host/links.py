"""Network devices over netlink: read as values; created, changed and deleted with our alias."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

from netplugin.api.errors import Conflict, HostError, NetpluginError
from netplugin.host import netlink
from netplugin.host.link_messages import (
    DELLINK,
    GETADDR,
    GETLINK,
    MULTICAST_MAC,
    NEWLINK,
    SETLINK,
    BondMember,
    Bridge,
    Link,
    Made,
    Vlan,
    all_links,
    any_address,
    bridge_options,
    bridge_ports,
    by_kind,
    by_master,
    by_name,
    identity,
    link_change,
    name_of,
    new_link,
    port_learning,
    read_address,
    read_bond_member,
    read_bridge_port,
    read_link,
)

# include/uapi/linux/if_tun.h
TUN_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST = 0x400454CA, 0x400454CB
_IFF_TAP, _IFF_NO_PI, _IFF_MULTI_QUEUE = 0x0002, 0x1000, 0x0100
_IFF_VNET_HDR, _IFF_TUN_EXCL = 0x4000, 0x8000


class Links:
    """Network devices in the network namespace of the calling thread."""

    # -- reading ---------------------------------------------------------------------------------

    def get(self, name: str) -> Link | None:
        """The device with this name; None if there is none. Raises: HostError, OperationTimeout."""
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

        The kernel filters by kind. If it does not know the kind, it ignores the filter and lists
        all devices; then there is none, and the dump is discarded.
        """
        with words("list-links", f"devices of kind {kind}"):
            found = netlink.dump(GETLINK, by_kind(kind), lambda p: identity(p)[2] == kind)
        return [read_link(payload) for payload in found]

    def bridge_members(self) -> dict[str, dict[str, int]]:
        """The MTU of each bridge port, by bridge name and device name.

        Uses the AF_BRIDGE dump, which is shorter, because it is read whenever a port comes or goes:
        6 ms for a thousand ports, compared with 40 ms for the full list of devices.

        Raises: HostError, OperationTimeout.
        """
        with words("list-members", "bridge ports"):
            ports = [read_bridge_port(p) for p in netlink.dump(GETLINK, bridge_ports())]
        bridges = {master: name_of(master) for _, _, master in ports}
        found: dict[str, dict[str, int]] = {name: {} for name in bridges.values()}
        for name, mtu, master in ports:
            found[bridges[master]][name] = mtu
        return found

    def bond_members(self, bond: Link) -> tuple[BondMember, ...]:
        """The members of a bond, sorted by name. Raises: HostError, OperationTimeout."""
        with words("list-members", bond.name):
            found = netlink.dump(GETLINK, by_master(bond.index))
        return tuple(sorted((read_bond_member(p) for p in found), key=lambda m: m.name))

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """The IP addresses with their prefix lengths, by device name.

        IPv6 link-local addresses, which every NIC that is up has, are left out.

        Raises: HostError, OperationTimeout.
        """
        with words("read-addresses", "addresses"):
            found = netlink.dump(GETADDR, any_address())
        texts: dict[int, list[str]] = {}
        for index, address in map(read_address, found):
            if not address.startswith("fe80:"):
                texts.setdefault(index, []).append(address)
        return {name_of(index): tuple(sorted(each)) for index, each in texts.items()}

    # -- writing ---------------------------------------------------------------------------------

    def create(self, name: str, made: Made, *, alias: str, address: str, mtu: int) -> None:
        """Create a device with our alias, down, on no bridge, with the host's IPv6 disabled.

        The MAC is part of the creating request, the alias needs a second one. If the agent dies
        between the two, the MAC identifies the device as ours (``names.provisional_mac``).

        Raises: Conflict if a device of this name exists; HostError, OperationTimeout.
        """
        step = f"create-{type(made).__name__.lower()}"
        parent = self._there(made.parent, step).index if isinstance(made, Vlan) else 0
        _write(step, name, new_link(name, address, made, parent), NEWLINK, netlink.EXCLUSIVE)
        index = self._there(name, step).index
        _write(step, name, link_change(index, alias=alias))
        self.refuse_ipv6(name)
        if isinstance(made, Bridge):
            _write(step, name, bridge_options(index, made))
            # A bridge follows the lowest MTU of its ports until an MTU is set, and setting the
            # current value has no effect. So set another value first.
            _write(step, name, link_change(index, mtu=mtu - 1))
        _write(step, name, link_change(index, mtu=mtu))

    def create_tap(self, name: str, alias: str, *, multi_queue: bool, mtu: int) -> None:
        """Create a persistent tap, down, on no bridge, with the host's IPv6 disabled.

        The kernel refuses to open a multi-queue tap as a single-queue one and vice versa
        (``tun_set_iff`` in drivers/net/tun.c). libvirt opens it as multi-queue as soon as the
        domain has more than one queue.

        Raises: HostError, OperationTimeout.
        """
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR | _IFF_TUN_EXCL
        flags |= _IFF_MULTI_QUEUE if multi_queue else 0
        with words("create-tap", name):
            device = os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        try:
            with words("create-tap", name):
                fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
            # Set the alias before the tap is persistent: until then it disappears with this
            # process.
            index = self._there(name, "create-tap").index
            _write("create-tap", name, link_change(index, alias=alias, mtu=mtu))
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
        """Change the given attributes; ``master=""`` removes the device from its bridge.

        Each change is a request of its own, in this order: older kernels set a device up before
        they enslave it, and learning can be set only on a bridge port.

        Raises: HostError, OperationTimeout.
        """
        index = self._there(name, "set-link").index
        if mtu is not None:
            _write("set-mtu", name, link_change(index, mtu=mtu))
        if alias is not None:
            _write("set-alias", name, link_change(index, alias=alias))
        if bridge is not None:
            _write("set-bridge", name, bridge_options(index, bridge))
        if master is not None:
            owner = self._there(master, "enslave").index if master else 0
            _write("enslave", name, link_change(index, master=owner))
        if learning is not None:
            _write("set-learning", name, port_learning(index, learning), SETLINK)
        if up is not None:
            _write("set-state", name, link_change(index, up=up))

    def refuse_ipv6(self, name: str) -> None:
        """Disable the host's IPv6 on the device: its link-local address would expose the host.

        Raises: HostError.
        """
        with words("disable-ipv6", name), contextlib.suppress(FileNotFoundError):
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")

    def delete(self, name: str) -> None:
        """Delete the device if it exists. Raises: HostError, OperationTimeout."""
        link = self.get(name)
        if link is not None:
            with contextlib.suppress(NoSuchLink):
                _write("delete-link", name, link_change(link.index), DELLINK)

    def _there(self, name: str, step: str) -> Link:
        link = self.get(name)
        if link is None:
            raise HostError(f"{name}: there is no such device", step=step)
        return link


class NoSuchLink(HostError):
    """The kernel has no device of this name or index."""


def words(step: str, what: str) -> contextlib.AbstractContextManager[None]:
    """Translate errors of the kernel into typed errors with its error text."""
    return netlink.translated(step, what, lambda said, code: _refusal(step, what, code, said))


def _refusal(step: str, what: str, code: int, said: str) -> NetpluginError:
    if code == errno.ENODEV:
        return NoSuchLink(f"{what}: {said}", step=step)
    if code == errno.EEXIST and step.startswith("create-"):
        return Conflict(
            f"{what} cannot be made next to an object that netplugin did not make: {said}",
            step=step,
            fix="find it with ip -d link show, and remove or rename it",
        )
    return HostError(f"{what}: {said}", step=step)


def _write(step: str, name: str, body: bytes, kind: int = NEWLINK, flags: int = 0) -> None:
    with words(step, name):
        netlink.ask(kind, body, flags)


def kind_unavailable(kind: str) -> str | None:
    """The error text of the kernel if it cannot create devices of a kind; None if it can.

    The probe creates nothing: its multicast MAC is refused, after the kernel has looked up the kind
    (and loaded the module).
    """
    try:
        netlink.ask(NEWLINK, new_link("npbprobe", MULTICAST_MAC, kind), netlink.EXCLUSIVE)
    except OSError as refused:
        if refused.errno == errno.EADDRNOTAVAIL:
            return None
        return refused.strerror or str(refused)
    return "it made what cannot be"
