"""Network devices over netlink: read as values; created, changed and deleted with our alias."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from netplugin.api.errors import Conflict, HostError, NetpluginError, OperationTimeout
from netplugin.host import netlink
from netplugin.host.link_messages import (
    DELLINK,
    GETADDR,
    GETLINK,
    NEWLINK,
    NEWLINKPROP,
    SETLINK,
    all_links,
    alternative_name,
    any_address,
    bridge_options,
    bridge_ports,
    by_kind,
    by_master,
    by_name,
    change,
    creation,
    identity,
    name_of,
    new_address,
    new_alias,
    new_group,
    new_master,
    new_mtu,
    new_name,
    port_flags,
    port_option,
    read_address,
    read_bond_member,
    read_bridge_port,
    read_link,
    unmakeable,
)
from netplugin.host.link_values import BondMember, Bridge, BridgePort, Link, Made, Vlan
from netplugin.host.netlink import Rtnetlink
from netplugin.host.processes import remaining
from netplugin.host.threaded_call import ThreadedCall

# include/uapi/linux/if_tun.h
TUN_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER, _TUNSETGROUP = 0x400454CA, 0x400454CB, 0x400454CC, 0x400454CE
_IFF_TAP, _IFF_NO_PI, _IFF_MULTI_QUEUE = 0x0002, 0x1000, 0x0100
_IFF_VNET_HDR, _IFF_TUN_EXCL = 0x4000, 0x8000
#: How long a deletion may take until the device is gone, and after which time to look.
_DELETE_S, _LOOK_S = 30.0, 0.0005


class Links:
    """Network devices in the network namespace of the calling thread."""

    def __init__(self) -> None:
        self._kernel = Rtnetlink()

    # -- reading ---------------------------------------------------------------------------------

    def get(self, name: str) -> Link | None:
        """The device with this name or alternative name; None if there is none.

        Raises: HostError, OperationTimeout.
        """
        try:
            with words("read-link", name):
                return read_link(self._kernel.ask(GETLINK, by_name(name))[0])
        except NoSuchLink:
            return None

    def find(self, matches: Callable[[str, str, str], bool]) -> list[Link]:
        """All devices whose name, alias and kind match. Raises: HostError, OperationTimeout."""
        with words("list-links", "devices"):
            found = self._kernel.dump(GETLINK, all_links())
            return [read_link(payload) for payload in found if matches(*identity(payload))]

    def of_kind(self, kind: str) -> list[Link]:
        """All devices of a kind. Raises: HostError, OperationTimeout.

        The kernel filters by kind. If it does not know the kind, it ignores the filter and lists
        all devices; then there is none, and the dump is discarded.
        """
        with words("list-links", f"devices of kind {kind}"):
            found = self._kernel.dump(GETLINK, by_kind(kind), lambda p: identity(p)[2] == kind)
            return [read_link(payload) for payload in found]

    def bridge_ports(self) -> list[tuple[int, BridgePort]]:
        """All bridge ports, each with its index.

        Uses the AF_BRIDGE dump, which is shorter: 6 ms for a thousand ports, compared with 40 ms for
        the full list of devices.

        Raises: HostError, OperationTimeout.
        """
        with words("list-members", "bridge ports"):
            return [read_bridge_port(payload) for payload in self._kernel.dump(GETLINK, bridge_ports())]

    def bridge_members(self, bridge: Link) -> frozenset[str]:
        """The names of the ports of a bridge. Raises: HostError, OperationTimeout."""
        return frozenset(port.name for _, port in self.bridge_ports() if port.bridge == bridge.index)

    def bond_members(self, bond: Link) -> tuple[BondMember, ...]:
        """The members of a bond, sorted by name. Raises: HostError, OperationTimeout."""
        with words("list-members", bond.name):
            found = self._kernel.dump(GETLINK, by_master(bond.index))
            return tuple(sorted((read_bond_member(p) for p in found), key=lambda m: m.name))

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """The IP addresses with their prefix lengths, by device name.

        IPv6 link-local addresses, which every NIC that is up has, are left out.

        Raises: HostError, OperationTimeout.
        """
        with words("read-addresses", "addresses"):
            found = [read_address(payload) for payload in self._kernel.dump(GETADDR, any_address())]
        texts: dict[int, list[str]] = {}
        for index, address in found:
            if not address.startswith("fe80:"):
                texts.setdefault(index, []).append(address)
        return {name_of(index): tuple(sorted(each)) for index, each in texts.items()}

    # -- writing ---------------------------------------------------------------------------------

    def create(self, name: str, made: Made, *, alias: str, address: str, mtu: int, altname: str = "") -> None:
        """Create a device with our alias, down, on no bridge, with the host's IPv6 disabled.

        ``altname``: see ``create_tap``.

        The MAC is part of the creating request, the alias needs a second one. If the agent dies
        between the two, the MAC identifies the device as ours (``names.provisional_mac``).

        Raises: Conflict if a device of this name exists; HostError, OperationTimeout.
        """
        step = f"create-{type(made).__name__.lower()}"
        parent = self._there(made.parent, step).index if isinstance(made, Vlan) else 0
        self._ask(step, name, NEWLINK, creation(name, address, made, parent), netlink.EXCLUSIVE)
        there = self._there(name, step)
        index = there.index
        # A bridge follows the lowest MTU of its ports until an MTU is set, and setting the current
        # value has no effect. So set another value first.
        first = mtu - 1 if isinstance(made, Bridge) else mtu
        self._alter(step, name, index, new_alias(alias), new_mtu(first))
        if altname:
            self.add_altname(name, altname)
        self.refuse_ipv6(name)
        if isinstance(made, Bridge) and isinstance(there.data, Bridge):
            self._ask(
                step, name, NEWLINK, bridge_options(index, made, there.data, made.differences(there.data))
            )
            self._alter(step, name, index, new_mtu(mtu))

    def create_tap(
        self,
        name: str,
        alias: str,
        *,
        address: str,
        multi_queue: bool,
        mtu: int,
        altname: str = "",
        group: int = 0,
    ) -> None:
        """Create a persistent tap of root's, down, on no bridge, with the host's IPv6 disabled.

        ``address`` is its own MAC, not the VM's; ``altname``: an alternative name (since Linux 5.5), by which
        ``get`` finds it too.

        The kernel refuses to open a multi-queue tap as a single-queue one and vice versa
        (``tun_set_iff`` in drivers/net/tun.c). libvirt opens it as multi-queue as soon as the
        domain has more than one queue.

        Raises: Conflict if another device has the alternative name; HostError, OperationTimeout.
        """
        with _opened_tap("create-tap", name, multi_queue, _IFF_TUN_EXCL) as device:
            # Set the alias before the tap is persistent: until then it disappears with this
            # process.
            index = self._there(name, "create-tap").index
            parts = (new_alias(alias), new_address(address), new_mtu(mtu), new_group(group))
            self._alter("create-tap", name, index, *parts)
            if altname:
                self.add_altname(name, altname)
            self.refuse_ipv6(name)
            with words("create-tap", name):
                _keep_for_root(device)

    def keep_for_root(self, name: str, *, multi_queue: bool) -> None:
        """Make a tap root's again, and persistent.

        Raises: HostError, also while a process has it open, unless it has several queues.
        """
        with _opened_tap("own-tap", name, multi_queue) as device, words("own-tap", name):
            _keep_for_root(device)

    def set(
        self,
        name: str,
        *,
        mtu: int | None = None,
        address: str | None = None,
        alias: str | None = None,
        master: str | None = None,
        up: bool | None = None,
        learning: bool | None = None,
        flooding: bool | None = None,
        group: int | None = None,
    ) -> None:
        """Change the given attributes; ``master=""`` removes the device from its bridge.

        In this order: older kernels set a device up before they enslave it, and learning (with flooding)
        can be set only on a bridge port.

        Raises: HostError, OperationTimeout.
        """
        index = self._there(name, "set-link").index
        plain = {
            "set-mtu": new_mtu(mtu) if mtu is not None else b"",
            "set-address": new_address(address) if address is not None else b"",
            "set-alias": new_alias(alias) if alias is not None else b"",
            "set-group": new_group(group) if group is not None else b"",
            "enslave": new_master(self._there(master, "enslave").index if master else 0)
            if master is not None
            else b"",
        }
        self._alter_all(name, index, {step: each for step, each in plain.items() if each})
        if learning is not None:
            self._ask("set-learning", name, SETLINK, port_flags(index, learning, flooding))
        if up is not None:
            self._ask("set-state", name, NEWLINK, change(index, up=up))

    def _alter_all(self, name: str, index: int, parts: Mapping[str, bytes]) -> None:
        """Change attributes by one request; if the kernel refuses it, by one each.

        So those are changed that can be, and the error says which cannot.
        """
        if len(parts) > 1:
            with words("set-link", name):
                try:
                    self._kernel.ask(NEWLINK, change(index, *parts.values()))
                    return
                except TimeoutError:
                    raise
                except OSError:
                    pass
        refused: list[NetpluginError] = []
        for step, part in parts.items():
            try:
                self._alter(step, name, index, part)
            except NetpluginError as error:
                refused.append(error)
        if refused:
            raise refused[0]

    def set_bridge_option(self, name: str, desired: Bridge, option: str) -> None:
        """Set one option of a bridge, a field of ``Bridge``. Raises: HostError, OperationTimeout."""
        link = self._there(name, "set-bridge")
        if isinstance(link.data, Bridge):
            self._ask("set-bridge", name, NEWLINK, bridge_options(link.index, desired, link.data, [option]))

    def reset_port_option(self, name: str, option: str) -> None:
        """Set an option of a bridge port (``PortOptions``) as the kernel does for a new one.

        Raises: HostError, OperationTimeout.
        """
        index = self._there(name, "set-port").index
        self._ask("set-port", name, SETLINK, port_option(index, option))

    def add_altname(self, name: str, altname: str) -> None:
        """Give the device a further name. Raises: Conflict if another has it; HostError, OperationTimeout."""
        index = self._there(name, "create-name").index
        with words("create-name", altname):
            self._kernel.ask(NEWLINKPROP, alternative_name(index, altname), netlink.APPEND)

    def rename(self, name: str, new: str) -> None:
        """Rename the device; kernels before 6.2 refuse it while the device is up.

        Raises: Conflict if another has the name; HostError, OperationTimeout.
        """
        index = self._there(name, "create-name").index
        self._alter("create-name", new, index, new_name(new))

    def refuse_ipv6(self, name: str) -> None:
        """Disable the host's IPv6 on the device: its link-local address would expose the host.

        ``name`` is no alternative name. Raises: HostError.
        """
        with words("disable-ipv6", name), contextlib.suppress(FileNotFoundError):
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")

    def delete(self, name: str) -> None:
        """Delete the device if it exists, and return when it is gone and its name is free.

        Then the kernel waits, in the same call, until nobody uses the memory of the device any more
        (``netdev_run_todo`` in net/core/dev.c): ten times as long, and without end if a reference has
        leaked. So a thread makes the call, and the waits of several devices overlap.

        Raises: HostError, OperationTimeout.
        """
        link = self.get(name)
        if link is None:
            return
        deadline = time.monotonic() + _DELETE_S
        call = ThreadedCall(
            "delete-link", partial(self._ask, "delete-link", name, DELLINK, change(link.index))
        )
        with contextlib.suppress(NoSuchLink):
            while not call.ended(_LOOK_S) and self._is(name, link.index):
                if not remaining(deadline):
                    raise OperationTimeout(
                        f"{name}: the kernel did not delete it in time", step="delete-link"
                    )

    def _is(self, name: str, index: int) -> bool:
        """Whether the device of this name is the one with this index."""
        found = self.get(name)
        return found is not None and found.index == index

    def _alter(self, step: str, name: str, index: int, *parts: bytes) -> None:
        self._ask(step, name, NEWLINK, change(index, *parts))

    def _ask(self, step: str, name: str, kind: int, body: bytes, flags: int = 0) -> None:
        with words(step, name):
            self._kernel.ask(kind, body, flags)

    def _there(self, name: str, step: str) -> Link:
        link = self.get(name)
        if link is None:
            raise HostError(f"{name}: there is no such device", step=step)
        return link


@contextlib.contextmanager
def _opened_tap(step: str, name: str, multi_queue: bool, flags: int = 0) -> Iterator[int]:
    """Open a tap, and create it if there is none. Raises: HostError."""
    flags |= _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR | (_IFF_MULTI_QUEUE if multi_queue else 0)
    with words(step, name):
        device = os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        with words(step, name):
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        yield device
    finally:
        os.close(device)


def _keep_for_root(device: int) -> None:
    """Let no user without CAP_NET_ADMIN open the tap: without an owner and a group, every user may
    (``tun_not_capable`` in drivers/net/tun.c)."""
    fcntl.ioctl(device, _TUNSETGROUP, 0)
    fcntl.ioctl(device, _TUNSETOWNER, 0)
    fcntl.ioctl(device, _TUNSETPERSIST, 1)


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


def kind_unavailable(kind: str) -> str | None:
    """The error text of the kernel if it cannot create devices of a kind; None if it can.

    The probe creates nothing: its multicast MAC is refused, after the kernel has looked up the kind
    (and loaded the module).
    """
    try:
        Rtnetlink().ask(NEWLINK, unmakeable(kind), netlink.EXCLUSIVE)
    except OSError as refused:
        if refused.errno == errno.EADDRNOTAVAIL:
            return None
        return refused.strerror or str(refused)
    return "it made what cannot be"
