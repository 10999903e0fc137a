"""Network devices over netlink: read as values; created, changed and deleted with our alias."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyroute2.netlink import NLA_F_NESTED, rtnl
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP

from netplugin.api.errors import Conflict, HostError, NetpluginError, OperationTimeout
from netplugin.host import link_messages as messages
from netplugin.host import netlink
from netplugin.host.link_values import BondMember, Bridge, BridgePort, Link, Made, Vlan, Vxlan
from netplugin.host.processes import remaining
from netplugin.host.rtnetlink import APPEND, CREATE, DUMP, Rtnetlink, about_link, nest
from netplugin.host.rtnetlink_messages import Message
from netplugin.host.safe_files import opened
from netplugin.host.threaded_call import ThreadedCall

# include/uapi/linux/if_tun.h
TUN_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER, _TUNSETGROUP = 0x400454CA, 0x400454CB, 0x400454CC, 0x400454CE
_IFF_TAP, _IFF_NO_PI, _IFF_MULTI_QUEUE = 0x0002, 0x1000, 0x0100
_IFF_VNET_HDR, _IFF_TUN_EXCL = 0x4000, 0x8000
#: What a new bridge has otherwise than ours.
_NEW_BRIDGE = Bridge(forward_delay=1500, mcast_snooping=1, booleans=0, fdb_max_learned=0)
_WITHOUT_STATISTICS = ("IFLA_EXT_MASK", messages.SKIP_STATISTICS)
#: How long a deletion may take until the device is gone, and after which time to look.
_DELETE_S, _LOOK_S = 30.0, 0.0005


class Links:
    """Network devices in the network namespace of the calling thread.

    All methods raise HostError and OperationTimeout, besides what they name.
    """

    def __init__(self) -> None:
        self._kernel = Rtnetlink()

    def get(self, name: str) -> Link | None:
        """The device with this name or alternative name; None if there is none."""
        with contextlib.suppress(NoSuchLink):
            return self._there(name, "read-link")
        return None

    def find(self, matches: Callable[[str, str, str], bool]) -> list[Link]:
        """All devices whose name, alias and kind match."""
        with words("list-links", "devices"):
            found = self._listed()
            return [messages.read_link(each) for each in found if matches(*messages.identity(each))]

    def of_kind(self, kind: str) -> list[Link]:
        """All devices of a kind.

        The kernel filters by kind. If it does not know the kind, it ignores the filter and lists
        all devices; then there is none, and the dump is discarded.
        """
        with words("list-links", f"devices of kind {kind}"):
            found = self._listed(_info(kind), fits=lambda message: messages.kind_of(message) == kind)
            return [messages.read_link(message) for message in found]

    def bridge_ports(self) -> list[tuple[int, BridgePort]]:
        """All bridge ports, each with its index.

        The dump for AF_BRIDGE is shorter than the full list of devices.
        """
        with words("list-members", "bridge ports"):
            found = self._kernel.ask(rtnl.RTM_GETLINK, about_link(family=socket.AF_BRIDGE), DUMP)
            return [messages.read_bridge_port(message) for message in found]

    def bridge_members(self, bridge: Link) -> frozenset[str]:
        """The names of the ports of a bridge."""
        return frozenset(port.name for _, port in self.bridge_ports() if port.bridge == bridge.index)

    def bond_members(self, bond: Link) -> tuple[BondMember, ...]:
        """The members of a bond, sorted by name."""
        with words("list-members", bond.name):
            found = self._listed(("IFLA_MASTER", bond.index))
            members = (each for each in found if each.attributes.number("IFLA_MASTER") == bond.index)
            return tuple(sorted(map(messages.read_bond_member, members), key=lambda member: member.name))

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """The IP addresses with their prefix lengths, by device name.

        IPv6 link-local addresses, which every NIC that is up has, are left out.
        """
        with words("read-addresses", "addresses"):
            texts: dict[int, list[str]] = {}
            for index, address in map(
                messages.read_address, self._kernel.ask(rtnl.RTM_GETADDR, ifaddrmsg(), DUMP)
            ):
                if not address.startswith("fe80:"):
                    texts.setdefault(index, []).append(address)
            return {messages.name_of(index): tuple(sorted(each)) for index, each in texts.items()}

    def create(self, name: str, made: Made, *, alias: str, address: str, mtu: int, altname: str = "") -> None:
        """Create a device with our alias, down, on no bridge, with the host's IPv6 disabled.

        ``altname``: see ``create_tap``.

        The MAC is part of the creating request, the alias needs a second one. If the agent dies
        between the two, the MAC identifies the device as ours (``names.provisional_mac``).

        Raises: Conflict if a device of this name exists.
        """
        kind = type(made).__name__.lower()
        step = f"create-{kind}"
        attributes: list[tuple[Any, ...]] = [("IFLA_IFNAME", name), ("IFLA_ADDRESS", address)]
        if isinstance(made, Vlan):
            attributes.append(("IFLA_LINK", self._index(made.parent, step)))
        if isinstance(made, Bridge):
            # It follows the lowest MTU of its ports until an MTU is set, and setting the current value has
            # no effect. So it begins with another one.
            attributes.append(("IFLA_MTU", mtu - 1))
        with words(step, name):
            self._kernel.ask(rtnl.RTM_NEWLINK, about_link(*attributes, _info(kind, _options(made))), CREATE)
        self._set(step, name, ("IFLA_IFALIAS", alias), ("IFLA_MTU", mtu))
        if altname:
            self.add_altname(name, altname)
        self.refuse_ipv6(name)

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

        The kernel refuses to open a multi-queue tap as a single-queue one and vice versa (``tun_set_iff`` in
        drivers/net/tun.c). libvirt opens it as multi-queue as soon as the domain has more than one queue.

        Raises: Conflict if another device has the alternative name.
        """
        with _opened_tap("create-tap", name, multi_queue, _IFF_TUN_EXCL) as device:
            # Set the alias before the tap is persistent: until then it disappears with this process.
            own = ("IFLA_IFALIAS", alias), ("IFLA_ADDRESS", address), ("IFLA_MTU", mtu), ("IFLA_GROUP", group)
            self._set("create-tap", name, *own)
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
        """
        bridge = (self._index(master, "enslave") if master else 0) if master is not None else None
        plain: dict[str, tuple[str, str | int | None]] = {
            "set-mtu": ("IFLA_MTU", mtu),
            "set-address": ("IFLA_ADDRESS", address),
            "set-alias": ("IFLA_IFALIAS", alias),
            "set-group": ("IFLA_GROUP", group),
            "enslave": ("IFLA_MASTER", bridge),
        }
        self._set_all(name, {step: each for step, each in plain.items() if each[1] is not None})
        if learning is not None:
            options = {"LEARNING": learning}
            if flooding is not None:
                options |= {messages.PORT_OPTIONS[flood][0]: flooding for flood in messages.FLOODS}
            if flooding is False:  # then the bridge forgets what it has learned on the port
                options["FLUSH"] = True
            self._set_port("set-learning", name, options)
        if up is not None:
            self._set("set-state", name, flags=IFF_UP if up else 0, change=IFF_UP)

    def _set_all(self, name: str, parts: Mapping[str, tuple[str, Any]]) -> None:
        """Change attributes, each by its step, by one request; if the kernel refuses it, by one each.

        So those are changed that can be, and the error says which cannot.
        """
        if len(parts) > 1:
            with contextlib.suppress(HostError):
                self._set("set-link", name, *parts.values())
                return
        refused: list[NetpluginError] = []
        for step, part in parts.items():
            try:
                self._set(step, name, part)
            except NetpluginError as error:
                refused.append(error)
        if refused:
            raise refused[0]

    def set_bridge_option(self, name: str, desired: Bridge, option: str) -> None:
        """Set one option of a bridge, a field of ``Bridge``."""
        link = self._there(name, "set-bridge")
        if isinstance(link.data, Bridge):
            options = _bridge_options(desired, link.data, [option])
            with words("set-bridge", name):
                self._kernel.ask(rtnl.RTM_NEWLINK, about_link(_info("bridge", options), index=link.index))

    def reset_port_option(self, name: str, option: str) -> None:
        """Set an option of a bridge port (``PortOptions``) as the kernel does for a new one."""
        self._set_port("set-port", name, dict([messages.PORT_OPTIONS[option]]))

    def add_altname(self, name: str, altname: str) -> None:
        """Give the device a further name. Raises: Conflict if another has it."""
        with words("create-name", altname):
            names = ("IFLA_PROP_LIST", nest([("IFLA_ALT_IFNAME", altname)]), NLA_F_NESTED)
            self._kernel.ask(rtnl.RTM_NEWLINKPROP, about_link(_called(name), names), APPEND)

    def rename(self, name: str, new: str) -> None:
        """Rename the device; kernels before 6.2 refuse it while the device is up.

        Raises: Conflict if another has the name.
        """
        with words("create-name", new):
            renamed = about_link(("IFLA_IFNAME", new), index=self._index(name, "create-name"))
            self._kernel.ask(rtnl.RTM_SETLINK, renamed)

    def refuse_ipv6(self, name: str) -> None:
        """Disable the host's IPv6 on the device: its link-local address would expose the host.

        ``name`` is no alternative name.
        """
        with words("disable-ipv6", name), contextlib.suppress(FileNotFoundError):
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")

    def delete(self, name: str) -> None:
        """Delete the device if it exists, and return when it is gone and its name is free.

        Then the kernel waits, in the same call, until nobody uses the memory of the device any more
        (``netdev_run_todo`` in net/core/dev.c): ten times as long, and without end if a reference has
        leaked. So a thread makes the call, and the waits of several devices overlap.
        """
        deadline = time.monotonic() + _DELETE_S
        with contextlib.suppress(NoSuchLink):
            index = self._index(name, "delete-link")
            call = ThreadedCall("delete-link", partial(self._delete, name, index))
            while not call.ended(_LOOK_S) and self._index(name, "delete-link") == index:
                if not remaining(deadline):
                    late = f"{name}: the kernel did not delete it in time"
                    raise OperationTimeout(late, step="delete-link")

    def _delete(self, name: str, index: int) -> None:
        with words("delete-link", name):
            self._kernel.ask(rtnl.RTM_DELLINK, about_link(index=index))

    def _set(self, step: str, name: str, *attributes: tuple[Any, ...], **fields: int) -> None:
        """Change a device by its name.

        RTM_NEWLINK with a group would change all devices of the group if there is none of the name.
        """
        with words(step, name):
            self._kernel.ask(rtnl.RTM_SETLINK, about_link(_called(name), *attributes, **fields))

    def _set_port(self, step: str, name: str, options: Mapping[str, int]) -> None:
        """Set options of a bridge port: IFLA_BRPORT_* and the value of each."""
        nested = nest((f"IFLA_BRPORT_{option}", value) for option, value in options.items())
        place = {"index": self._index(name, step), "family": socket.AF_BRIDGE}
        with words(step, name):
            self._kernel.ask(rtnl.RTM_SETLINK, about_link(("IFLA_PROTINFO", nested, NLA_F_NESTED), **place))

    def _named(self, name: str) -> Message:
        """The device with this name or alternative name. Raises: OSError."""
        return self._kernel.ask(rtnl.RTM_GETLINK, about_link(_called(name), _WITHOUT_STATISTICS))[0]

    def _there(self, name: str, step: str) -> Link:
        """A device. Raises: NoSuchLink if there is none."""
        with words(step, name):
            return messages.read_link(self._named(name))

    def _index(self, name: str, step: str) -> int:
        """The index of a device. Raises: NoSuchLink if there is none."""
        with words(step, name):
            return self._named(name)["index"]

    def _listed(
        self, *filters: tuple[Any, ...], fits: Callable[[Message], bool] = lambda _: True
    ) -> list[Message]:
        """All devices that the kernel's own filters let pass, if it knows them. See ``Rtnetlink.ask``."""
        return self._kernel.ask(rtnl.RTM_GETLINK, about_link(*filters, _WITHOUT_STATISTICS), DUMP, fits)


def _called(name: str) -> tuple[str, str]:
    """The attribute by which the kernel finds a device with this name or alternative name."""
    return "IFLA_IFNAME", name.encode()[:15].decode(errors="ignore")


def _options(made: Made) -> dict[str, Any]:
    """The options of a device to create; of a bridge, those that a new one has otherwise."""
    if isinstance(made, Bridge):
        return _bridge_options(made, _NEW_BRIDGE, made.differences(_NEW_BRIDGE))
    names = messages.OPTIONS.get(type(made), {})
    options = {attribute: getattr(made, name) for name, attribute in names.items()}
    if isinstance(made, Vxlan):
        options["IFLA_VXLAN_LOCAL6" if ":" in made.local else "IFLA_VXLAN_LOCAL"] = made.local
    return options


def _bridge_options(bridge: Bridge, found: Bridge, names: Sequence[str]) -> dict[str, Any]:
    """These options of a bridge as ``bridge`` has them; ``found``: as they are."""
    options = {f"IFLA_BR_{name.upper()}": getattr(bridge, name) for name in names if name != "booleans"}
    if "booleans" in names:
        changed = bridge.booleans ^ found.booleans
        options["IFLA_BR_MULTI_BOOLOPT"] = {"optval": bridge.booleans & changed, "optmask": changed}
    return options


def _info(kind: str, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[Any, ...]:
    """The attribute with the kind of a device and its options."""
    data = [("IFLA_INFO_DATA", nest(options.items()))] if options else []
    return "IFLA_LINKINFO", nest([("IFLA_INFO_KIND", kind), *data])


@contextlib.contextmanager
def _opened_tap(step: str, name: str, multi_queue: bool, flags: int = 0) -> Iterator[int]:
    """Open a tap, and create it if there is none."""
    flags |= _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR | (_IFF_MULTI_QUEUE if multi_queue else 0)
    with words(step, name):
        device = os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    with opened(device):
        with words(step, name):
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        yield device


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
    return netlink.translated(step, what, lambda error_text, code: _refusal(step, what, code, error_text))


def _refusal(step: str, what: str, code: int, error_text: str) -> NetpluginError:
    if code == errno.ENODEV:
        return NoSuchLink(f"{what}: {error_text}", step=step)
    if code == errno.EEXIST and step.startswith("create-"):
        clash = f"{what} cannot be made next to an object that netplugin did not make: {error_text}"
        return Conflict(clash, step=step, fix="find it with ip -d link show, and remove or rename it")
    return HostError(f"{what}: {error_text}", step=step)


def kind_unavailable(kind: str) -> str | None:
    """The error text of the kernel if it cannot create devices of a kind; None if it can.

    The probe creates nothing: its multicast MAC is refused, after the kernel has looked up the kind
    (and loaded the module).
    """
    try:
        probe = ("IFLA_IFNAME", "npbprobe"), ("IFLA_ADDRESS", "01:00:00:00:00:00"), _info(kind)
        Rtnetlink().ask(rtnl.RTM_NEWLINK, about_link(*probe), CREATE)
    except OSError as refused:
        if refused.errno == errno.EADDRNOTAVAIL:
            return None
        return refused.strerror or str(refused)
    return "it made what cannot be"
