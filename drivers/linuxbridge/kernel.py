"""The kernel interfaces that the backend uses. Tests substitute models."""

from __future__ import annotations

from dataclasses import dataclass, field

from drivers.linuxbridge import filters
from netplugin.host.fdb import Fdb
from netplugin.host.links import Links
from netplugin.host.nftables import Nftables
from netplugin.host.tc import Tc
from netplugin.host.vxlan_filter import VxlanFilter


@dataclass(frozen=True)
class Kernel:
    links: Links = field(default_factory=Links)
    fdb: Fdb = field(default_factory=Fdb)
    tc: Tc = field(default_factory=Tc)
    nft: Nftables = field(default_factory=lambda: Nftables(filters.FAMILY, filters.TABLE))
    vxlan: VxlanFilter = field(default_factory=lambda: VxlanFilter(""))
