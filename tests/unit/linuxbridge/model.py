"""A model of the kernel's links and nftables in memory: the real driver runs on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oslo_config import cfg

from drivers.linuxbridge.driver import LinuxBridge
from drivers.linuxbridge.options import GROUP, OPTIONS
from netplugin.errors import HostError
from netplugin.host.links import BRIDGE_OPTIONS, Link, Links, Member
from netplugin.host.names import TAP
from netplugin.host.nftables import Command, Nftables

#: net1 stays on the host, net2 and net3 have an interface.
INTERFACES = {"net1": "", "net2": "eth2", "net3": "eth3"}
MARKS = ("netplugin-port=", "netplugin-bridge=")
FIRST_RULE = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "x"}}


class ModelLinks(Links):
    """The devices. ``filtered`` tells whether a tap may be put to use."""

    def __init__(self, filtered: Callable[[str], bool]) -> None:
        super().__init__()
        self.links: dict[str, Link] = {}
        self.ips: dict[str, tuple[str, ...]] = {}
        self._filtered = filtered
        self._next = 1

    def add(self, link: Link) -> None:
        if link.name in self.links:
            raise HostError(f"{link.name}: File exists", step="add")
        self.links[link.name] = replace(link, index=self._next)
        self._next += 1

    def get(self, name: str) -> Link | None:
        return self.links.get(name)

    def find(self, matches: Callable[[str, str], bool]) -> list[Link]:
        return [link for link in self.links.values() if matches(link.name, link.alias or "")]

    def addresses(self, name: str) -> tuple[str, ...]:
        return self.ips.get(name, ())

    def members(self, bridge: Link) -> tuple[Member, ...]:
        found = (link for link in self.links.values() if link.master == bridge.name)
        return tuple(Member(link.index, link.name, link.mtu) for link in found)

    def create_bridge(self, name: str, alias: str, mtu: int, address: str) -> None:
        self.add(
            Link(
                0,
                name,
                "bridge",
                mtu,
                up=True,
                alias=alias,
                address=address,
                options=dict(BRIDGE_OPTIONS),
            )
        )

    def create_tap(self, name: str, alias: str, *, multi_queue: bool, mtu: int) -> None:
        self.add(
            Link(
                0,
                name,
                "tun",
                mtu,
                alias=alias,
                multi_queue=multi_queue,
                vnet_hdr=True,
                persistent=True,
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
        options: Mapping[str, int] | None = None,
    ) -> None:
        link = self.links[name]
        if name.startswith(TAP) and (master or up):
            assert self._filtered(name), "a tap is open before its filter is there"
        if master:
            assert self.links[master].kind == "bridge"
        fields = {"mtu": mtu, "alias": alias, "up": up}
        link = replace(link, **{k: v for k, v in fields.items() if v is not None})
        if master is not None:
            link = replace(link, master=master or None)
        if options is not None:
            link = replace(link, options={**link.options, **options})
        self.links[name] = link

    def refuse_ipv6(self, name: str) -> None:
        self.links[name] = replace(self.links[name], ipv6=False)

    def delete(self, name: str) -> None:
        if self.links.pop(name, None) is not None:
            for other in [link for link in self.links.values() if link.master == name]:
                self.links[other.name] = replace(other, master=None)


class ModelNftables(Nftables):
    """The one table, at the level of the JSON that ``nft`` reads and prints."""

    def __init__(self) -> None:
        super().__init__("bridge", "netplugin")
        self.there = False
        self.chains: dict[str, dict[str, Any]] = {}
        self.rules: dict[str, list[dict[str, Any]]] = {}
        self.maps: dict[str, dict[str, Any]] = {}

    def filters(self, name: str) -> bool:
        """Whether frames from this interface meet rules, by way of the base chain."""
        target = self.maps.get("ports", {}).get(name)
        return target == {"jump": {"target": name}} and bool(self.rules.get(name))

    def _run(self, commands: Sequence[Command], deadline: float) -> list[tuple[str, Any]]:
        before = (self.there, dict(self.chains), {k: list(v) for k, v in self.rules.items()})
        maps = {k: dict(v) for k, v in self.maps.items()}
        found: list[tuple[str, Any]] = []
        try:
            for command in commands:
                ((verb, objects),) = command.items()
                ((kind, value),) = objects.items()
                found += getattr(self, f"_{verb}")(kind, value) or []
        except KeyError as missing:
            self.there, self.chains, self.rules = before
            self.maps = maps
            raise HostError(f"nft: No such file or directory: {missing}", step="nft") from missing
        return found

    def _list(self, what: Any, kind: Any, deadline: Any = None) -> Any:
        if deadline is not None:
            return super()._list(what, kind, deadline)
        kind, value = what, kind
        if kind == "tables":
            return [("table", {"name": "netplugin"})] * self.there
        if kind == "chains":
            return [("chain", chain) for chain in self.chains.values()]
        if kind == "maps":
            return [
                (
                    "map",
                    {"name": name, "table": "netplugin", "elem": list(map(list, elems.items()))},
                )
                for name, elems in self.maps.items()
            ]
        names = list(self.chains) if kind == "table" else [value["name"]]
        return [("rule", {"chain": name, **rule}) for name in names for rule in self.rules[name]]

    def _add(self, kind: str, value: dict[str, Any]) -> None:
        if kind == "table":
            self.there = True
            return
        if not self.there:
            raise KeyError("table")
        name = value.get("name", "")
        if kind == "map":
            self.maps.setdefault(name, {})
        elif kind == "chain":
            self.chains.setdefault(name, value)
            self.rules.setdefault(name, [])
        elif kind == "rule":
            fields = {k: v for k, v in value.items() if k in ("expr", "comment")}
            self.rules[value["chain"]].append(fields)
        elif kind == "element":
            for key, verdict in value["elem"]:
                found = self.maps[name].setdefault(key, verdict)
                if found != verdict:
                    raise KeyError(f"{key} exists")

    def _flush(self, kind: str, value: dict[str, Any]) -> None:
        self.rules[value["name"]].clear()

    def _delete(self, kind: str, value: dict[str, Any]) -> None:
        if kind == "table":
            if not self.there:
                raise KeyError("table")
            self.there, self.chains, self.rules, self.maps = False, {}, {}, {}
        elif kind == "chain":
            name = value["name"]
            jumps = [v for m in self.maps.values() for v in m.values()]
            if self.rules[name] or {"jump": {"target": name}} in jumps:
                raise KeyError(f"{name} is busy")
            del self.chains[name], self.rules[name]
        elif kind == "element":
            for key in value["elem"]:
                del self.maps[value["name"]][key]


class Model:
    """A host with the driver on it."""

    def __init__(self) -> None:
        conf = cfg.ConfigOpts()
        conf([], default_config_files=[], default_config_dirs=[])
        conf.register_opts(OPTIONS, group=GROUP)
        conf.set_override("physical_interfaces", INTERFACES, group=GROUP)
        self.nft = ModelNftables()
        self.links = ModelLinks(self.nft.filters)
        self.driver = LinuxBridge(conf, None, links=self.links, nft=self.nft)
        for name in ("eth2", "eth3", "eth9"):
            self.links.add(Link(0, name, mtu=9000, up=True, carrier=True, ipv6=True))
        self.links.add(Link(0, "theirs", "bridge", up=True, address="02:00:00:00:00:09"))

    def foreign(self) -> dict[str, Link]:
        """What is not ours, without what we may change: the master of our networks' interfaces."""
        found = {}
        for name, link in self.links.links.items():
            if (link.alias or "").startswith(MARKS):
                continue
            ours = name in INTERFACES.values()
            found[name] = replace(link, master=None) if ours else link
        return found

    def ours(self) -> list[str]:
        return [n for n, link in self.links.links.items() if (link.alias or "").startswith(MARKS)]
