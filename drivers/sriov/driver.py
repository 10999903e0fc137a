"""The sriov backend: read the pool of VFs, plan changes with ``plan``, and apply them.

The agent binds a VF to vfio-pci when a port is plugged and restores its driver when the port is removed,
also for mlx5. libvirt does neither (``managed='no'``), so a VF whose VM stops is not handed to a host
driver with the VM's MAC still set. libvirt does write the MAC and VLAN when a VM starts and stops; the
agent therefore releases the VF only after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from drivers.sriov.plan import SriovObservation, check_spec, make_plan, observed_ports
from drivers.vf.kernel import VfKernel
from drivers.vf.ledger import books, claim_vf, out_of_order
from drivers.vf.memory import remembered
from drivers.vf.networks import check_devices, pool_devices
from drivers.vf.plan import claim_of, place
from drivers.vf.pool import Pool, changed_vfs
from drivers.vf.usability import pool_findings, tag_findings
from netplugin.api.errors import NetpluginError
from netplugin.api.models import (
    Binding,
    DomainRequirements,
    Features,
    Finding,
    PortSpec,
    VfCounters,
    VfInfo,
)
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.backend import (
    Applied,
    Backend,
    Change,
    Claim,
    Intent,
    ObservedPort,
    Plan,
    unknown_network,
)
from netplugin.data_path import DataPath
from netplugin.host.shared import Host, SimulatedHost
from netplugin.host.usability import Usability, Wake
from netplugin.libvirt.interfaces import hostdev_interface
from netplugin.optional import (
    FindsPortsByClaims,
    HasFindings,
    HasVfs,
    NeedsClaims,
    OffersFeatures,
    UsesPhysicalNetworks,
)


class Sriov(
    Backend[SriovObservation],
    NeedsClaims[SriovObservation],
    FindsPortsByClaims[SriovObservation],
    HasVfs[SriovObservation],
    HasFindings[SriovObservation],
    OffersFeatures,
    UsesPhysicalNetworks[SriovObservation],
):
    """See ``netplugin.backend.Backend``."""

    name: ClassVar[str] = "sriov"
    features: ClassVar[Features] = Features(
        networks=("flat", "vlan"),
        qos=True,
        min_rate=True,
        port_security=("mac",),
        max_queues=128,
        virtual_functions=True,
        teaming=True,
    )
    network_parts: ClassVar[Mapping[str, bool]] = {"sriov": False}
    data_path: ClassVar[DataPath] = DataPath("vfio", "pci_address", links=("pf",))

    def __init__(self, conf: Any, host: Host | None, *, kernel: VfKernel | None = None) -> None:
        """``kernel``: a model of the host, for tests; None for the real one."""
        shared = host or SimulatedHost()
        self._kernel = kernel or VfKernel(pool_devices(conf, shared.networks))
        self._pool = Pool(self.name, self._kernel, shared.supervisor, shared.locks)

    # -- without changing the host ----------------------------------------------------------------

    def hold(self) -> Usability:
        return self._pool.hold()

    def probe(self) -> Usability:
        return self._kernel.usability()

    def offered(self) -> Features:
        return self.features.model_copy(update={"max_queues": self._kernel.max_queues()})

    def validate(self, spec: PortSpec) -> None:
        """Features that depend on the NIC are checked with the claim: see ``drivers.vf.abilities``."""
        super().validate(spec)
        networks = {device.network for device in self._kernel.devices}
        name = spec.network.physical_network
        if name not in networks:
            raise unknown_network(name, "[sriov] devices", networks)
        check_spec(spec)

    def claims(
        self, intent: Intent, observed: SriovObservation, taken: Mapping[Claim, str]
    ) -> tuple[Claim, ...]:
        return (claim_vf(observed.inventory, intent, taken),)

    def plan(self, intents: Sequence[Intent], observed: SriovObservation) -> Plan:
        return make_plan(intents, observed.inventory)

    def observed_ports(
        self, intents: Sequence[Intent], observed: SriovObservation
    ) -> Mapping[str, ObservedPort]:
        return observed_ports(intents, observed.inventory)

    def vfs(
        self, observed: SriovObservation, taken: Mapping[Claim, str], unfit: Mapping[Claim, str]
    ) -> Sequence[VfInfo]:
        return books(observed.inventory, taken, unfit)

    def out_of_order(self, observed: SriovObservation) -> Collection[str]:
        return out_of_order(observed.inventory)

    def counters(self, claims: Sequence[Claim]) -> Mapping[Claim, VfCounters]:
        return self._kernel.counters(claims)

    def findings(self, intents: Sequence[Intent], observed: SriovObservation) -> Sequence[Finding]:
        return [*pool_findings(observed.inventory), *tag_findings(intents, observed.inventory)]

    def check_network(self, name: str, spec: PhysicalNetworkSpec) -> None:
        check_devices(self._kernel, name, spec)

    def network_faults(self, observed: SriovObservation) -> Mapping[str, NetpluginError]:
        return {}  # it keeps none, and reports missing NICs as findings

    def network_remains(self, name: str, observed: SriovObservation) -> Sequence[str]:
        return ()

    def network_holders(self, name: str) -> Sequence[str]:
        return ()

    def binding(self, intent: Intent) -> Binding:
        claim = claim_of(intent)
        assert intent.spec is not None and claim is not None
        return Binding.model_validate(
            {
                "vif_type": "hostdev",
                "interface_xml": hostdev_interface(intent.spec, claim.key),
                "domain_requirements": DomainRequirements(vfio=True, numa_node=intent.spec.numa_node),
                "pci_address": claim.key,
                **place(remembered(claim)),
            }
        )

    # -- reading and changing the host ------------------------------------------------------------

    def observe(self, ports: Collection[str] | None, deadline: float) -> SriovObservation:
        start = time.monotonic()
        inventory = self._pool.look()
        return SriovObservation({}, inventory, timings_ms={"vfs": (time.monotonic() - start) * 1e3})

    def read_back(
        self,
        seen: SriovObservation,
        changes: Sequence[Change],
        ports: Collection[str] | None,
        deadline: float,
    ) -> SriovObservation:
        start = time.monotonic()
        inventory = self._pool.look_again(seen.inventory, changed_vfs(changes))
        return SriovObservation({}, inventory, timings_ms={"vfs": (time.monotonic() - start) * 1e3})

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        start = time.monotonic()
        failed, unfit = self._pool.apply(changes, deadline)
        return Applied(failed, {"vf": (time.monotonic() - start) * 1e3}, unfit)

    def watch(self, wake: Callable[[Wake], None]) -> None:
        self._pool.watch(wake)
        super().watch(wake)

    def close(self) -> None:
        self._pool.close()
