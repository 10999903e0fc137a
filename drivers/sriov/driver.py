"""The sriov backend: read the pool of VFs, plan changes with ``plan``, and apply them.

The agent binds a VF to vfio-pci when a port is plugged and restores its driver when the port is removed,
also for mlx5. libvirt does neither (``managed='no'``), so a VF whose VM stops is not handed to a host
driver with the VM's MAC still set. libvirt does write the MAC and VLAN when a VM starts and stops; the
agent therefore releases the VF only after that.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from drivers.sriov.plan import check_spec, make_plan, observed_ports
from drivers.vf.backend import VfBackend, VfObservation
from drivers.vf.ledger import claim_vf
from drivers.vf.memory import Memory, claim_of
from drivers.vf.plan import place
from drivers.vf.pool import changed_vfs
from drivers.vf.usability import pool_findings, tag_findings
from netplugin.api.models import Binding, DomainRequirements, Features, Finding, PortSpec
from netplugin.backend import Applied, Change, Claim, Intent, ObservedPort, Plan, unknown_network
from netplugin.data_path import DataPath
from netplugin.host.usability import Usability
from netplugin.libvirt.interfaces import hostdev_interface


class Sriov(VfBackend[VfObservation]):
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

    # -- without changing the host ----------------------------------------------------------------

    def probe(self) -> Usability:
        return self._kernel.usability()

    def offered(self) -> Features:
        return self.features.model_copy(update={"max_queues": self._kernel.max_queues()})

    def validate(self, spec: PortSpec) -> None:
        """Features that depend on the NIC are checked with the claim: see ``drivers.vf.ledger.refusal``."""
        super().validate(spec)
        name = spec.network.physical_network
        if name not in self._vf_networks:
            raise unknown_network(name, "[sriov] devices", self._vf_networks)
        check_spec(spec)

    def claims(
        self, intent: Intent, observed: VfObservation, taken: Mapping[Claim, str]
    ) -> tuple[Claim, ...]:
        return (claim_vf(observed.inventory, intent, taken),)

    def plan(self, intents: Sequence[Intent], observed: VfObservation) -> Plan:
        return make_plan(intents, observed.inventory)

    def observed_ports(
        self, intents: Sequence[Intent], observed: VfObservation
    ) -> Mapping[str, ObservedPort]:
        return observed_ports(intents, observed.inventory)

    def findings(self, intents: Sequence[Intent], observed: VfObservation) -> Sequence[Finding]:
        return [*pool_findings(observed.inventory), *tag_findings(intents, observed.inventory)]

    def binding(self, intent: Intent) -> Binding:
        claim = claim_of(intent)
        assert intent.spec is not None and claim is not None
        return Binding.model_validate(
            {
                "vif_type": "hostdev",
                "interface_xml": hostdev_interface(intent.spec, claim.key),
                "domain_requirements": DomainRequirements(vfio=True, numa_node=intent.spec.numa_node),
                "pci_address": claim.key,
                **place(Memory.of(claim)),
            }
        )

    # -- reading and changing the host ------------------------------------------------------------

    def observe(self, ports: Collection[str] | None, deadline: float) -> VfObservation:
        start = time.monotonic()
        inventory = self._pool.look()
        return VfObservation({}, inventory, timings_ms={"vfs": (time.monotonic() - start) * 1e3})

    def read_back(
        self,
        seen: VfObservation,
        changes: Sequence[Change],
        ports: Collection[str] | None,
        deadline: float,
    ) -> VfObservation:
        start = time.monotonic()
        inventory = self._pool.look_again(seen.inventory, changed_vfs(changes))
        return VfObservation({}, inventory, timings_ms={"vfs": (time.monotonic() - start) * 1e3})

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        start = time.monotonic()
        failed, unfit = self._pool.apply(changes, deadline)
        return Applied(failed, {"vf": (time.monotonic() - start) * 1e3}, unfit)
