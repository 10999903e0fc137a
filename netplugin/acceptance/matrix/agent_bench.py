"""Sets up cells on a hypervisor: ports and PMD cores through the agent's RPC, VM, VNF, loss attribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.evidence import choose as evidence
from netplugin.acceptance.evidence.witness import Witnessed
from netplugin.acceptance.generators import choose as generators
from netplugin.acceptance.generators.contract import Generator
from netplugin.acceptance.matrix import agent_checks, cells
from netplugin.acceptance.matrix.bench import (
    Bench,
    CellError,
    Stand,
    check_generators,
    generator_of,
)
from netplugin.acceptance.matrix.cells import Ceilings, Task
from netplugin.acceptance.matrix.description import Description
from netplugin.acceptance.matrix.guarded import Guarded, wait_until_forwarding
from netplugin.acceptance.matrix.hypervisor import End, ssh_of
from netplugin.acceptance.matrix.ports import Ports
from netplugin.acceptance.matrix.records import Cell, Part
from netplugin.acceptance.matrix.vm import DomainRunner, wait_for_ssh
from netplugin.acceptance.values import TrialRequest
from netplugin.acceptance.vnf import choose as vnfs
from netplugin.acceptance.vnf.contract import Vnf, VnfPort
from netplugin.errors import NetpluginError
from netplugin.models import Binding, Port


class AgentBench(Bench):
    """Sets up cells through the agent.

    The VM id contains the run id, so a resumed run finds and removes the leftovers of a killed one.
    """

    def __init__(self, description: Description, run_id: str, pmd_cpus: str | None) -> None:
        """``pmd_cpus``: PMD cores at the start of the run; None for a new run.

        Raises: UnusableInput.
        """
        self._description = description
        self._run_id = run_id
        vm_id = f"zeroloss-{run_id}"
        vm = description.vm
        self._domain = DomainRunner(vm.domain, vm.uri, vm_id) if vm is not None else None
        self._vm_id = vm_id
        self._client = agent_checks.client(description)
        self._ports = Ports(self._client, description, vm_id)
        self._ports.found_cpus = pmd_cpus

    def close(self) -> None:
        self._client.close()

    def check(self, tasks: Sequence[Task]) -> Mapping[str, Any]:
        searched = [task.cell for task in tasks if task.part is Part.SEARCH]
        try:
            if self._ports.found_cpus is None and any(cell.pmd_cores for cell in searched):
                self._ports.look_at_pmd()
            found = agent_checks.check(self._client, self._description, searched, self._vm_id)
        except NetpluginError as error:
            raise UnusableInput("agent", str(error)) from error
        check_generators(self._generator_of(task) for task in tasks)
        agent_checks.check_vnfs(self._description, tasks)
        if self._domain is not None:
            self._domain.check()
        return {"run_id": self._run_id, "pmd_cpus": self._ports.found_cpus, **found}

    def recover(self) -> None:
        try:
            if self._domain is not None:
                self._domain.destroy()
            if self._ports.remove_leftovers():
                self._ports.put_back_pmd()
        except (CellError, NetpluginError) as error:
            raise UnusableInput("agent", str(error)) from error

    # -- setting up ------------------------------------------------------------------------------

    @contextmanager
    def stand(self, task: Task) -> Iterator[Stand]:
        with ExitStack() as parts:
            setup: dict[str, Any] = {"agent": self._client.url}
            checks: list[Callable[[], None]] = []
            bindings: list[Binding] = []
            vnf_ports: list[VnfPort] = []
            if task.part is Part.SEARCH:
                plugged = self._ports.plug(parts, task.cell)
                checks.append(self._ports.check)
                bindings = [_binding(port) for port in plugged]
                vnf_ports = [
                    vnfs.vnf_port(_binding(port), port.spec, end.peer_mac)
                    for port, end in zip(plugged, self._ports.ends, strict=True)
                ]
                self._start_vm(parts, task.cell, setup)
            elif task.part is Part.VNF:
                vnf_ports = self._control_ports(task.cell)
            places = list(evidence.make(self._description.evidence, bindings))
            if vnf_ports:
                vnf = self._start_vnf(parts, task, vnf_ports, setup)
                checks.append(vnf.check)
                places.append(vnf.place)
            if task.part is Part.SEARCH:
                self._note_ports(task.cell, setup)
            chosen = self._generator_of(task)
            setup["generator"] = chosen.model_dump(mode="json")
            generator = parts.enter_context(generators.make(chosen))
            self._wait_until_forwarding(generator, task)
            yield Stand(Guarded(Witnessed(generator, places), checks), setup)

    def _start_vm(self, parts: ExitStack, cell: Cell, setup: dict[str, Any]) -> None:
        described, domain = self._description.vm, self._domain
        if described is None or domain is None:
            return
        rendered = self._client.render_domain(self._vm_id, domain.template, described.policy).xml
        setup["vm"] = rendered
        parts.callback(domain.destroy)
        domain.start(rendered)
        vnf = self._description.vnf_of(cell)
        machine = ssh_of(vnf) if vnf is not None else None
        if machine is not None:
            wait_for_ssh(machine.host, machine.port, self._description.timeouts.boot)

    def _start_vnf(
        self, parts: ExitStack, task: Task, ports: Sequence[VnfPort], setup: dict[str, Any]
    ) -> Vnf:
        control = self._description.controls.vnf
        chosen = self._description.vnf_of(task.cell)
        if task.part is Part.VNF and control is not None and control.vnf is not None:
            chosen = control.vnf
        assert chosen is not None  # with an agent there is one
        vnf = vnfs.make(chosen, ports, self._description.vnf_cores.vnf_cores())
        parts.enter_context(vnf)
        setup["vnf"] = asdict(vnf.start())
        return vnf

    def _control_ports(self, cell: Cell) -> list[VnfPort]:
        control = self._description.controls.vnf
        assert control is not None and control.ports is not None
        return [p.model_copy(update={"queues": cell.queues}).vnf_port() for p in control.ports]

    def _note_ports(self, cell: Cell, setup: dict[str, Any]) -> None:
        setup["ports"] = [p.model_dump(mode="json") for p in self._ports.connected(cell)]
        if cell.pmd_cores is not None:
            setup["pmd"] = self._ports.pmd().model_dump(mode="json")

    def _generator_of(self, task: Task) -> generators.Description:
        """Return the generator of a task, with the MAC addresses of the ends filled in."""
        return addressed(generator_of(self._description, task), self._ports.ends)

    def _wait_until_forwarding(self, generator: Generator, task: Task) -> None:
        plan = cells.plan(self._description, task, generator.info, Ceilings())
        like = TrialRequest(plan.top_pps / 2, 1.0, plan.frame_size, plan.flows, mix=plan.mix)
        wait_until_forwarding(generator, like, self._description.timeouts.forwarding)


def addressed(description: generators.Description, ends: Sequence[End]) -> generators.Description:
    """Fill in missing MAC addresses: to the VNF's port, and from the address that the VNF sends to.

    Even paths enter at the first end, odd ones at the second.
    """
    if not isinstance(description, generators.Tcpreplay | generators.TrexStl):
        return description
    paths = []
    for number in range(len(description.paths)):
        path, end = description.paths[number], ends[number % 2]
        frames = path.frames.model_copy(
            update={
                "source_mac": path.frames.source_mac or end.peer_mac,
                "destination_mac": path.frames.destination_mac or end.mac,
            }
        )
        paths.append(path.model_copy(update={"frames": frames}))
    return description.model_copy(update={"paths": tuple(paths)})


def _binding(port: Port) -> Binding:
    """Return the binding of a port. Raises: CellError if it has none."""
    if port.binding is None:
        raise CellError(f"the agent gave no binding for port {port.port_id}")
    return port.binding
