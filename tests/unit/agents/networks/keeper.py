"""The fake backend with physical networks: it keeps those that the API made so, on a host in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from netplugin.api.errors import HostError, NetpluginError
from netplugin.api.models import PortSpec
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import Applied, Change, Intent, Plan, unknown_network
from netplugin.host.physical_networks import PhysicalNetworks
from tests.unit.fakes import FakeBackend, FakeHost, Seen


@dataclass(frozen=True)
class Keep(Change):
    """The bridge and the uplink of a network become ``spec``, or (None) go."""

    network: str
    spec: PhysicalNetworkSpec | None


@dataclass
class KeeperHost(FakeHost):
    """``kept`` are the networks whose bridge there is. A network in ``lost`` is accepted and not made, one
    in ``broken`` is made and does not work."""

    kept: dict[str, PhysicalNetworkSpec] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    #: The networks whose bridge stays although its removal is accepted.
    stuck: set[str] = field(default_factory=set)
    #: What cannot be on this host at all.
    impossible: dict[str, NetpluginError] = field(default_factory=dict)
    #: VXLAN networks whose tunnels need a network.
    tunnels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: The changes of networks that were made, oldest first.
    made: list[Keep] = field(default_factory=list)


@dataclass(frozen=True)
class SeenNetworks(Seen):
    kept: dict[str, PhysicalNetworkSpec] = field(default_factory=dict)


class Keeper(FakeBackend):
    """See ``netplugin.optional.UsesPhysicalNetworks``."""

    network_parts: ClassVar[Mapping[str, bool]] = {"ovs": True}

    def __init__(self, networks: PhysicalNetworks, host: KeeperHost, name: str = "fake") -> None:
        super().__init__(name, host)
        self.networks = networks
        self.there = host
        self._made: Mapping[str, PhysicalNetworkSpec] = {}

    def validate(self, spec: PortSpec) -> None:
        super().validate(spec)
        known, network = self.networks.now.all, spec.network.physical_network
        if network not in known:
            raise unknown_network(network, "the options", known)

    def observe(self, ports: Collection[str] | None, deadline: float) -> SeenNetworks:
        self._made = self.networks.now.made
        return SeenNetworks(**vars(super().observe(ports, deadline)), kept=dict(self.there.kept))

    def plan(self, intents: Sequence[Intent], observed: Seen) -> Plan:
        assert isinstance(observed, SeenNetworks)
        desired = self._kept()
        changes: list[Change] = [
            Keep((), name, desired.get(name), physical_network=name)
            for name in sorted({*desired, *observed.kept})
            if observed.kept.get(name) != desired.get(name)
        ]
        return Plan((*changes, *super().plan(intents, observed).changes))

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        refused: dict[str, NetpluginError] = {}
        for change in changes:
            if not isinstance(change, Keep):
                continue
            try:
                self.there.on_apply(change)
            except NetpluginError as error:
                refused.setdefault(change.physical_network, error)
                continue
            self.there.made.append(change)
            if change.spec is None and change.physical_network not in self.there.stuck:
                self.there.kept.pop(change.physical_network, None)
            elif change.spec is not None and change.physical_network not in self.there.lost:
                self.there.kept[change.physical_network] = change.spec
        applied = super().apply([change for change in changes if not isinstance(change, Keep)], deadline)
        return Applied(applied.failed, applied.timings_ms, of_networks=refused)

    def check_network(self, name: str, spec: PhysicalNetworkSpec) -> None:
        if name in self.there.impossible:
            raise self.there.impossible[name]

    def network_faults(self, observed: SeenNetworks) -> dict[str, NetpluginError]:
        faults: dict[str, NetpluginError] = {}
        for name, spec in self._kept().items():
            if observed.kept.get(name) != spec:
                faults[name] = HostError(f"the bridge of {name} is not there", step="verify")
            elif name in self.there.broken:
                faults[name] = HostError(f"the uplink of {name} does not work", step="uplink")
        return faults

    def network_remains(self, name: str, observed: SeenNetworks) -> Sequence[str]:
        return [f"bridge br-{name}"] if name in observed.kept else []

    def network_holders(self, name: str) -> Sequence[str]:
        return self.there.tunnels.get(name, ())

    def _kept(self) -> dict[str, PhysicalNetworkSpec]:
        return {name: spec for name, spec in self._made.items() if spec.keep}


class VfKeeper(Keeper):
    """Another backend: one of VFs, which keeps nothing."""

    network_parts: ClassVar[Mapping[str, bool]] = {"sriov": False}

    def plan(self, intents: Sequence[Intent], observed: Seen) -> Plan:
        return FakeBackend.plan(self, intents, observed)

    def network_faults(self, observed: SeenNetworks) -> dict[str, NetpluginError]:
        return {}
