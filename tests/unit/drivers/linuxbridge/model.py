"""A model of the kernel in memory, links, queueing, peers and nftables: the real driver runs on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oslo_config import cfg

from drivers.linuxbridge.commands import BridgeKernel
from drivers.linuxbridge.driver import LinuxBridge
from drivers.linuxbridge.obstacles import ObstacleReader, Obstacles
from drivers.linuxbridge.options import GROUP, OPTIONS
from drivers.linuxbridge.segments import PORT_MARK, is_ours
from netplugin.api.errors import Conflict, HostError
from netplugin.host.bridge_members import BridgeMembers
from netplugin.host.cbpf import BpfProgram
from netplugin.host.fdb import Fdb
from netplugin.host.foreign_filters import ForeignFilters
from netplugin.host.link_values import (
    BondMember,
    Bridge,
    Ifb,
    Link,
    LinuxBond,
    PortOptions,
    TapUse,
    Vlan,
    Vxlan,
)
from netplugin.host.links import Links, Made
from netplugin.host.locks import NoLocks
from netplugin.host.names import TAP
from netplugin.host.nft_rules import ACCEPT, IIFNAME, Match, Rule
from netplugin.host.nftables import (
    AddElement,
    AddMap,
    AddTable,
    Chain,
    Command,
    DeleteChain,
    DeleteElement,
    DeleteTable,
    Nftables,
    SetChain,
    Table,
)
from netplugin.host.physical_networks import PhysicalNetworks
from netplugin.host.shared import Host
from netplugin.host.tc import Queueing, Tbf, Tc
from netplugin.host.vxlan_filter import VxlanFilter, VxlanKey, VxlanSources

#: net1 stays on the host, net2 and net3 have an interface, net4 a bond.
#: Devices of the host that can be service ports, by the port that asks for each.
DEVICES = {"svc-0": "dhcp0", "svc-1": "dhcp1"}
INTERFACES = {"net1": "", "net2": "eth2", "net3": "eth3", "net4": "bond0"}
#: The interface that tunnels end at.
UNDERLAY, LOCAL_IP = "eth8", "192.0.2.8"
FIRST_RULE = Rule.make(Match(IIFNAME, b"x".ljust(16, b"\0")), ACCEPT)
FOR_ROOT = TapUse(0, 0, True)
_KINDS = {Bridge: "bridge", Vlan: "vlan", Vxlan: "vxlan", Ifb: "ifb"}


class ModelLinks(Links):
    """The devices. ``filtered`` tells whether a tap may be put to use."""

    def __init__(self, filtered: Callable[[Link], bool]) -> None:
        self.unplugged: Callable[[Link], None] = lambda link: None
        self.links: dict[str, Link] = {}
        self.ips: dict[str, tuple[str, ...]] = {}
        self.bonds: dict[str, tuple[BondMember, ...]] = {}
        self.deleted: Callable[[Link], None] = lambda link: None
        self._filtered = filtered
        self._next = 1

    def add(self, link: Link) -> None:
        if self.get(link.name) is not None:
            raise Conflict(f"{link.name}: File exists", step="add")
        self.links[link.name] = replace(link, index=self._next)
        self._next += 1

    def get(self, name: str) -> Link | None:
        second = (link for link in self.links.values() if name in link.altnames)
        return self.links.get(name) or next(second, None)

    def find(self, matches: Callable[[str, str, str], bool]) -> list[Link]:
        return [link for link in self.links.values() if matches(link.name, link.alias or "", link.kind)]

    def of_kind(self, kind: str) -> list[Link]:
        return [link for link in self.links.values() if link.kind == kind]

    def addresses(self) -> dict[str, tuple[str, ...]]:
        return {name: each for name, each in self.ips.items() if name in self.links}

    def bond_members(self, bond: Link) -> tuple[BondMember, ...]:
        return self.bonds[bond.name]

    def bridge_members(self, bridge: Link) -> frozenset[str]:
        return frozenset(self.members().get(bridge.name, {}))

    def members(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for link in self.links.values():
            if link.master is not None:
                found.setdefault(link.master, {})[link.name] = link.mtu
        return found

    def _real(self, name: str) -> str:
        link = self.get(name)
        return link.name if link else name

    def create(self, name: str, made: Made, *, alias: str, address: str, mtu: int, altname: str = "") -> None:
        for other in self.links.values():
            match made, other.data:
                case Vlan(), Vlan():
                    clash = made == other.data
                case Vxlan(), Vxlan():
                    clash = (made.vni, made.port) == (other.data.vni, other.data.port)
                case _:
                    clash = False
            if clash:
                raise Conflict(f"{name}: {other.name} has that", step="create")
        if isinstance(made, Vlan) and self.links[made.parent].mtu < mtu:
            raise HostError(f"{name}: Numerical result out of range", step="create")
        kind = _KINDS[type(made)]
        self.add(Link(0, name, kind, mtu, alias=alias, address=address, data=made))
        if altname:
            self.add_altname(name, altname)

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
        assert not altname or self.get(altname) is None
        self.add(
            Link(
                0,
                name,
                "tun",
                mtu,
                alias=alias,
                address=address,
                multi_queue=multi_queue,
                use=FOR_ROOT,
                altnames=(altname,) if altname else (),
                group=group,
                qdisc="noop",
            )
        )

    def set(
        self,
        name: str,
        *,
        mtu: int | None = None,
        alias: str | None = None,
        master: str | None = None,
        up: bool | None = None,
        address: str | None = None,
        learning: bool | None = None,
        flooding: bool | None = None,
        group: int | None = None,
    ) -> None:
        name = self._real(name)
        link, master = self.links[name], self._real(master) if master else master
        is_tap = (link.alias or "").startswith(PORT_MARK)
        if (is_tap and (master or up)) or (name in DEVICES.values() and master):
            assert self._filtered(link), "a tap is open before its guard and its filter are there"
        if master:
            assert self.links[master].kind == "bridge"
        if learning is not None:
            assert link.master, "only what is on a bridge has ports' options"
        fields = {"mtu": mtu, "alias": alias, "up": up, "address": address, "group": group}
        of_port = {"learning": learning, "flooding": flooding}
        port = replace(link.port, **{k: v for k, v in of_port.items() if v is not None})
        link = replace(link, port=port, **{k: v for k, v in fields.items() if v is not None})
        if master is not None and (master or None) != link.master:
            self.unplugged(link)
            link = replace(link, master=master or None, port=PortOptions())
        self.links[name] = link

    def keep_for_root(self, name: str, *, multi_queue: bool) -> None:
        self.links[name] = replace(self.links[name], use=FOR_ROOT)

    def set_bridge_option(self, name: str, desired: Bridge, option: str) -> None:
        link = self.links[name := self._real(name)]
        assert isinstance(link.data, Bridge)
        data = replace(link.data, **{option: getattr(desired, option)})
        self.links[name] = replace(link, data=data)

    def reset_port_option(self, name: str, option: str) -> None:
        port = self.links[name].port
        others = port.others - {option}
        learning, flooding = port.learning or option == "learning", port.flooding or "flood" in option or None
        self.links[name] = replace(self.links[name], port=PortOptions(learning, flooding, others))

    def add_altname(self, name: str, altname: str) -> None:
        link = self.links[name]
        assert self.get(altname) is None
        self.links[name] = replace(link, altnames=(*link.altnames, altname))

    def rename(self, name: str, new: str) -> None:
        if self.get(new) is not None:
            raise Conflict(f"{new}: File exists", step="create-name")
        assert not (self.links[name].kind == "bridge" and self.links[name].up), "before Linux 6.2"
        self.links[new] = replace(self.links.pop(name), name=new)
        for member in list(self.links.values()):
            if member.master == name:
                self.links[member.name] = replace(member, master=new)

    def refuse_ipv6(self, name: str) -> None:
        self.links[name] = replace(self.links[name], ipv6=False)

    def delete(self, name: str) -> None:
        link = self.links.pop(name := self._real(name), None)
        if link is None:
            return
        self.deleted(link)
        for other in list(self.links.values()):
            if isinstance(other.data, Vlan) and other.data.parent == name:
                self.delete(other.name)
            elif other.master == name:
                self.unplugged(other)
                self.links[other.name] = replace(other, master=None, port=PortOptions())


class ModelObstacles(ObstacleReader):
    """No other program has packet filters."""

    def read(self, deadline: float, *, fresh: bool) -> Obstacles:
        return Obstacles(ForeignFilters())


class ModelMembers(BridgeMembers):
    def __init__(self, links: ModelLinks) -> None:
        self._model = links

    def read(self, *, whole: bool) -> Mapping[str, Mapping[str, int]]:
        return self._model.members()


class ModelFdb(Fdb):
    """The peers of each VXLAN device, by its index; and the port that each MAC of a bridge is fixed at."""

    def __init__(self, links: ModelLinks) -> None:
        self.entries: dict[int, set[str]] = {}
        self.macs: dict[tuple[str, str], int] = {}
        #: Ports on which a bridge has learned a MAC.
        self.known: set[int] = set()
        self._links = links

    def learn(self, index: int) -> None:
        self.known.add(index)

    def learned(self, index: int) -> bool:
        return index in self.known

    def fixed(self, index: int) -> frozenset[str]:
        return frozenset(mac for (_, mac), at in self.macs.items() if at == index)

    def holder(self, index: int, mac: str) -> int | None:
        return self.macs.get((str(self._named(index).master), mac))

    def fix(self, index: int, mac: str) -> None:
        self.macs[(str(self._named(index).master), mac)] = index

    def release(self, index: int, mac: str) -> None:
        self.macs.pop((str(self._named(index).master), mac), None)

    def unplugged(self, link: Link) -> None:
        self.macs = {key: at for key, at in self.macs.items() if at != link.index}

    def _named(self, index: int) -> Link:
        return next(link for link in self._links.links.values() if link.index == index)

    def peers(self, index: int) -> frozenset[str]:
        return frozenset(self.entries.get(index, ()))

    def add_peer(self, index: int, address: str) -> None:
        self.entries.setdefault(index, set()).add(address)

    def remove_peer(self, index: int, address: str) -> None:
        self.entries.get(index, set()).discard(address)


class ModelTc(Tc):
    """Buckets and redirects of each device, by its index."""

    def __init__(self, links: ModelLinks) -> None:
        self.found: dict[int, Queueing] = {}
        self._links = links

    def read(self, index: int, root_kind: str) -> Queueing:
        found = self.found.get(index, Queueing())
        return found if root_kind == "tbf" else replace(found, root=None)

    def read_all(self) -> Mapping[int, Queueing]:
        return dict(self.found)

    def is_filtered(self, index: int) -> bool:
        return False

    def set_root(self, index: int, tbf: Tbf | None) -> None:
        self.found[index] = replace(self.found.get(index, Queueing()), root=tbf)
        self._says(index, "tbf" if tbf else "noqueue")

    def delete_root(self, index: int) -> None:
        self.set_root(index, None)

    def set_redirect(self, index: int, to: int | None) -> None:
        self.found[index] = replace(self.found.get(index, Queueing()), redirect=to)

    def set_guard(self, index: int, program: BpfProgram | None) -> None:
        self.found[index] = replace(self.found.get(index, Queueing()), guard=program)

    def delete_guard(self, index: int) -> None:
        self.set_guard(index, None)

    def delete_redirect(self, index: int) -> None:
        self.set_redirect(index, None)

    def forget(self, link: Link) -> None:
        """The device is gone: so is what it has, and what leads to it leads nowhere."""
        self.found.pop(link.index, None)
        for index, each in self.found.items():
            if each.redirect == link.index:
                self.found[index] = replace(each, redirect=0)

    def _says(self, index: int, kind: str) -> None:
        for name, link in self._links.links.items():
            if link.index == index:
                self._links.links[name] = replace(link, qdisc=kind)


class ModelVxlan(VxlanFilter):
    """Who may send into each network; None without the table."""

    def __init__(self) -> None:
        super().__init__(LOCAL_IP)
        self.found: VxlanSources | None = None

    def read(self, deadline: float) -> VxlanSources | None:
        return self.found

    def allow(
        self, key: VxlanKey, peers: Collection[str], gone: Collection[str], deadline: float, *, base: bool
    ) -> None:
        assert base or (self.found is not None and self.found.sound)
        before = self.found or VxlanSources(sound=True)
        left = before.peers - {(key, peer) for peer in gone} | {(key, peer) for peer in peers}
        self.found = VxlanSources(True, before.networks | {key}, left)

    def forget(self, key: VxlanKey, peers: Collection[str], deadline: float) -> None:
        assert self.found is not None and key in self.found.networks
        left = self.found.peers - {(key, peer) for peer in peers}
        self.found = replace(self.found, networks=self.found.networks - {key}, peers=left)

    def remove(self, deadline: float) -> None:
        assert self.found is not None
        self.found = None


class ModelNftables(Nftables):
    """The one table, at the level of the commands and of what is read."""

    def __init__(self) -> None:
        super().__init__("bridge", "netplugin")
        self.there = False
        self.chains: dict[str, Chain] = {}
        self.rules: dict[str, list[Rule]] = {}
        self.maps: dict[str, dict[str, str | None]] = {}

    def filters(self, name: str) -> bool:
        """Whether frames from this interface meet rules, by way of the base chain."""
        target = self.maps.get("ports", {}).get(name) or ""
        right = target == name if name.startswith(TAP) else target.startswith(TAP)
        listed = name not in DEVICES.values() or name in self.maps.get("services", {})
        return right and listed and bool(self.rules.get(target))

    def read(self, chains: Collection[str] | None, deadline: float) -> Table | None:
        if not self.there:
            return None
        found = {n: replace(c, rules=tuple(self.rules[n])) for n, c in self.chains.items()}
        listed = {name: chain for name, chain in found.items() if chains is None or name in chains}
        return Table(frozenset(found), listed, {name: dict(keys) for name, keys in self.maps.items()})

    def commit(self, commands: Sequence[Command], deadline: float) -> None:
        before = (self.there, dict(self.chains), {k: list(v) for k, v in self.rules.items()})
        maps = {k: dict(v) for k, v in self.maps.items()}
        try:
            for command in commands:
                self.do(command)
        except KeyError as missing:
            self.there, self.chains, self.rules = before
            self.maps = maps
            raise HostError(f"nft: No such file or directory: {missing}", step="nft") from missing

    def do(self, command: Command) -> None:
        if isinstance(command, AddTable):
            self.there = True
        elif not self.there:
            raise KeyError("table")
        match command:
            case DeleteTable():
                self.there, self.chains, self.rules, self.maps = False, {}, {}, {}
            case AddMap(name):
                self.maps.setdefault(name, {})
            case SetChain(name, chain):
                self.chains.setdefault(name, replace(chain, rules=()))
                self.rules[name] = list(chain.rules)
            case DeleteChain(name):
                if name in [target for keys in self.maps.values() for target in keys.values()]:
                    raise KeyError(f"{name} is busy")
                del self.chains[name], self.rules[name]
            case AddElement(name, key, target):
                if target is not None and target not in self.chains:
                    raise KeyError(target)
                if self.maps[name].setdefault(key, target) != target:
                    raise KeyError(f"{key} exists")
            case DeleteElement(name, key):
                del self.maps[name][key]


class Model:
    """A host with the driver on it."""

    def __init__(self) -> None:
        self._conf = cfg.ConfigOpts()
        self._conf([], default_config_files=[], default_config_dirs=[])
        self._conf.register_opts(OPTIONS, group=GROUP)
        self.nft = ModelNftables()
        self.links = ModelLinks(self._shut)
        self.fdb = ModelFdb(self.links)
        self.tc = ModelTc(self.links)
        self.vxlan = ModelVxlan()
        self.links.deleted = self._forget
        self.links.unplugged = self.fdb.unplugged
        #: Its physical networks are those that the API made, which stay when the options change.
        self.host = Host(self._conf)
        self.host.locks = NoLocks()
        members = ModelMembers(self.links)
        self._kernel = BridgeKernel(
            self.links, self.fdb, self.tc, self.nft, self.vxlan, members, ModelObstacles()
        )
        self.configure(physical_interfaces=INTERFACES, local_ip=LOCAL_IP)
        for name in ("eth2", "eth3", UNDERLAY, "eth9"):
            self.links.add(Link(0, name, mtu=9100, up=True, carrier=True, ipv6=True))
        self.links.ips[UNDERLAY] = (f"{LOCAL_IP}/24",)
        bond = LinuxBond("802.3ad", "layer2", "02:00:00:00:00:aa")
        self.links.add(Link(0, "bond0", "bond", 9100, up=True, carrier=True, data=bond))
        self.links.bonds["bond0"] = (BondMember("eth4", "up", True), BondMember("eth5", "up", True))
        for name in DEVICES.values():
            self.links.add(Link(0, name, "veth", mtu=2000, up=True, carrier=True, ipv6=True))
        theirs = Link(0, "theirs", "bridge", up=True, address="02:00:00:00:00:09", data=Bridge())
        self.links.add(theirs)

    def configure(self, **options: Any) -> None:
        """The agent starts again with other options."""
        for option, value in options.items():
            self._conf.set_override(option, value, group=GROUP)
        stored = self.host.networks.now.made
        self.host.networks = PhysicalNetworks()
        self.host.networks.replace_stored(stored)
        self.driver = LinuxBridge(self._conf, self.host, kernel=self._kernel)

    def _shut(self, tap: Link) -> bool:
        guard = self.tc.found.get(tap.index, Queueing()).guard
        return guard is not None and self.nft.filters(tap.name)

    def _forget(self, link: Link) -> None:
        self.fdb.unplugged(link)
        self.tc.forget(link)
        self.fdb.entries.pop(link.index, None)

    def foreign(self) -> dict[str, Link]:
        """What is not ours, without what we may change: the master of our networks' interfaces."""
        found = {}
        for name, link in self.links.links.items():
            if name in DEVICES.values():
                found[name] = replace(link, master=None, alias=None, port=PortOptions())
            elif not is_ours(link):
                ours = name in INTERFACES.values()
                found[name] = replace(link, master=None, port=PortOptions()) if ours else link
        return found

    def ours(self) -> list[str]:
        return [name for name, link in self.links.links.items() if is_ours(link)]
