"""An agent that is made up, and the bench of a hypervisor on it: what its tests are written with."""

from __future__ import annotations

from typing import Any

import yaml
from netplugin_zeroloss.journal import Part
from netplugin_zeroloss.matrix import cells
from netplugin_zeroloss.matrix.agent_bench import AgentBench
from netplugin_zeroloss.matrix.cells import CellTask
from netplugin_zeroloss.matrix.description import RunDescription, read

from netplugin.api.client import Client, Readiness
from netplugin.api.domain_models import DomainPolicy, RenderedDomain
from netplugin.api.errors import Conflict, HostError
from netplugin.api.models import BackendInfo, Binding, Features, Finding, Port, PortSpec, PortState, VfInfo
from netplugin.api.physical_models import (
    BridgeUplinkSpec,
    OvsUplinkSpec,
    PhysicalNetworkInfo,
)
from netplugin.api.pmd_models import PmdCore, PmdRequest, PmdState
from netplugin.data_path import data_paths
from tests.unit.zeroloss.matrix_runs import with_agent

#: The host has a plan.
PLAN = Finding(id="plan", status="ok", found="CPUs 9-14 are for VMs", expected="CPUs", fix=None)


class MadeUpAgent(Client):
    """Answers as an agent would; ``fails`` names a call that is refused the n-th time."""

    def __init__(self) -> None:
        self.url = "http://made-up"
        self.ports: dict[str, Port] = {}
        self.cpus = "1"
        #: Those of the PMD threads; a mask takes no effect on them.
        self.running: tuple[int, ...] = (1,)
        self.calls: list[str] = []
        self.fails: tuple[str, int] | None = None
        self.state = PortState.ACTIVE
        self.readiness = Readiness(ready=True)
        self.infos = [
            BackendInfo(name=name, usable=True, features=Features(networks=("flat",), max_queues=4))
            for name in ("dpdkvhostuser", "linuxbridge")
        ]
        #: The ``vif_type`` of new ports, of backends that have several.
        self.vif_types = {"vdpa": "vhostuser"}
        #: So often a port is not deleted, because another process has its VM side.
        self.held = 0
        self.vfs: list[VfInfo] = []
        self.findings = [PLAN]
        self.networks = [
            PhysicalNetworkInfo(
                name=name, origin="config", ovs=OvsUplinkSpec(), linuxbridge=BridgeUplinkSpec()
            )
            for name in ("left", "right")
        ]

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.fails == (name, self.calls.count(name)):
            raise HostError(f"{name} is refused", step="test")

    def close(self) -> None:
        self.calls.append("close")

    def ready(self) -> Readiness:
        return self.readiness

    def backends(self) -> list[BackendInfo]:
        return self.infos

    def checks(self) -> list[Finding]:
        return self.findings

    def list_vfs(self) -> list[VfInfo]:
        return self.vfs

    def list_physical_networks(self) -> list[PhysicalNetworkInfo]:
        return self.networks

    def list_ports(self, **_: Any) -> list[Port]:
        return list(self.ports.values())

    def put_port(self, port_id: str, spec: PortSpec) -> Port:
        self._called("put")
        vif_type = self.vif_types.get(spec.backend, "made-up")
        device = {path.device: f"dev-{port_id}" for path in data_paths(spec.backend)}
        binding = Binding.model_validate({"vif_type": vif_type, "interface_xml": "<interface/>", **device})
        port = Port(port_id=port_id, state=self.state, spec=spec, binding=binding)
        self.ports[port_id] = port
        return port

    def get_port(self, port_id: str) -> Port:
        self._called("get")
        return self.ports[port_id].model_copy(update={"state": self.state})

    def delete_port(self, port_id: str) -> None:
        self._called("delete")
        if self.held:
            self.held -= 1
            raise Conflict(f"a process has the device of {port_id} open", step="vdpa-device")
        self.ports.pop(port_id, None)

    def render_domain(self, vm_id: str, xml: str, policy: DomainPolicy | None = None) -> RenderedDomain:
        return RenderedDomain(xml=xml.replace("</domain>", f"<!-- {vm_id} --></domain>"))

    def pmd(self) -> PmdState:
        cores = (
            PmdCore(cpu=cpu, numa_node=0, isolated=False, busy_percent=None, queues=())
            for cpu in self.running
        )
        return PmdState(cpus=self.cpus, cores=tuple(cores))

    def set_pmd(self, request: PmdRequest) -> PmdState:
        self._called("pmd")
        self.cpus = request.cpus or f"count {request.count}"
        return self.pmd()


def cell_description(**sections: Any) -> RunDescription:
    whole = {
        "matrix": {"backends": ["dpdkvhostuser"], "pmd_cores": ["2-3"], "queues": [2]},
        "evidence": {"ovs_rundir": None},
        "timeouts": {"active": 0.2, "forwarding": 0.2},
        **sections,
    }
    return read(yaml.safe_dump(with_agent(**whole)), "run.yaml")


def bench_on(description: RunDescription, pmd_cpus: str | None = None) -> AgentBench:
    return AgentBench(description, "id", pmd_cpus)


def search_of(description: RunDescription) -> CellTask:
    return CellTask(cells.cells(description)[0], Part.SEARCH)
