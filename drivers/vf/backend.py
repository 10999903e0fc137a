"""What the backends that use VFs have in common: one pool of VFs, those of ``[sriov] devices``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from drivers.vf.inventory import Inventory
from drivers.vf.kernel import VfKernel
from drivers.vf.ledger import list_vfs, out_of_order
from drivers.vf.networks import check_devices, pool_devices
from drivers.vf.options import read_devices
from drivers.vf.pool import Pool
from netplugin.api.counter_models import Place, Traffic
from netplugin.api.models import VfCounters, VfInfo
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import Backend, Claim, Intent, Observation
from netplugin.counters import Key, Reading, Readings, Source
from netplugin.host.shared import Host, SimulatedHost
from netplugin.host.usability import Usability, Wake
from netplugin.optional import (
    FindsPortsByClaims,
    HasCounters,
    HasFindings,
    HasVfs,
    NeedsClaims,
    OffersFeatures,
    UsesPhysicalNetworks,
)


@dataclass(frozen=True)
class VfObservation(Observation):
    """The whole pool of VFs, independent of the observed ports."""

    inventory: Inventory = field(default_factory=Inventory)


ObservationT = TypeVar("ObservationT", bound=VfObservation)


class VfBackend(
    Backend[ObservationT],
    NeedsClaims[ObservationT],
    FindsPortsByClaims[ObservationT],
    HasVfs[ObservationT],
    HasCounters,
    HasFindings[ObservationT],
    OffersFeatures,
    UsesPhysicalNetworks[ObservationT],
):
    """See ``netplugin.backend.Backend``."""

    def __init__(self, conf: Any, host: Host | None, *, kernel: VfKernel | None = None) -> None:
        """``kernel``: a model of the host, for tests; None for the real one."""
        shared = host or SimulatedHost()
        self._kernel = kernel or VfKernel(pool_devices(conf, shared.networks))
        self._pool = Pool(self.name, self._kernel, shared.supervisor, shared.locks)

    @classmethod
    def check_options(cls, conf: Any) -> None:
        read_devices(conf)

    @property
    def _vf_networks(self) -> frozenset[str]:
        """The physical networks that have VFs."""
        return frozenset(device.network for device in self._kernel.devices)

    def hold(self) -> Usability:
        return self._pool.hold()

    def vfs(
        self, observed: ObservationT, taken: Mapping[Claim, str], unfit: Mapping[Claim, str]
    ) -> Sequence[VfInfo]:
        return list_vfs(observed.inventory, taken, unfit)

    def out_of_order(self, observed: ObservationT) -> Collection[str]:
        return out_of_order(observed.inventory)

    def counters(self, claims: Sequence[Claim]) -> Mapping[Claim, VfCounters]:
        return self._kernel.counters(claims)

    def port_counters(self, intents: Sequence[Intent], deadline: float) -> Readings:
        """What the NICs count of VFs; ``rx`` is what a VF receives."""
        owners = {claim: intent.port_id for intent in intents for claim in intent.claims}
        counted = self._kernel.counters(list(owners))
        return Readings({owners[claim]: Reading({"vf": of_vf(claim, c)}) for claim, c in counted.items()})

    def check_network(self, name: str, spec: PhysicalNetworkSpec) -> None:
        check_devices(self._kernel, name, spec)

    def watch(self, wake: Callable[[Wake], None]) -> None:
        self._pool.watch(wake)
        super().watch(wake)

    def close(self) -> None:
        self._pool.close()


def drops_of(reading: Reading | None) -> dict[str, Source]:
    """The sources of a port's VF without its traffic, which is that of the port."""
    sources = reading.sources.items() if reading else ()
    return {
        name: replace(each, values={key: n for key, n in each.values.items() if isinstance(key, Place)})
        for name, each in sources
    }


def of_vf(claim: Claim, counted: VfCounters) -> Source:
    """The counters of a VF, which are those of its PCI address: the NIC begins them when its VFs are made."""
    values: dict[Key, int] = {
        Traffic.PACKETS_FROM_VM: counted.tx_packets,
        Traffic.PACKETS_TO_VM: counted.rx_packets,
        Traffic.BYTES_FROM_VM: counted.tx_bytes,
        Traffic.BYTES_TO_VM: counted.rx_bytes,
        Place.VF_FROM_VM: counted.tx_dropped,
        Place.VF_TO_VM: counted.rx_dropped,
    }
    return Source(values, claim.key)
