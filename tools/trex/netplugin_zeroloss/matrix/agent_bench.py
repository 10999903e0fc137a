"""Cells on a hypervisor: the checks before a run, and the set-up through the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from netplugin.api.errors import NetpluginError
from netplugin.api.models import BackendInfo, Binding, Port
from netplugin.data_path import DataPath, NoDataPath, data_path
from netplugin.programs.polling import polled
from netplugin_zeroloss import paths
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.generators.choose import PortMacs
from netplugin_zeroloss.journal import Cell, Part
from netplugin_zeroloss.loss import choose as evidence
from netplugin_zeroloss.loss.contract import AttributedGenerator
from netplugin_zeroloss.matrix import cells, checks
from netplugin_zeroloss.matrix.bench import (
    Bench,
    CellError,
    CheckedGenerator,
    Stand,
    generator_of,
    wait_until_forwarding,
)
from netplugin_zeroloss.matrix.cells import Ceilings, CellTask
from netplugin_zeroloss.matrix.description import End, RunDescription, in_mode, vm_of
from netplugin_zeroloss.matrix.domain import DomainRunner
from netplugin_zeroloss.matrix.findings import Finding, about_generators, of_error, require
from netplugin_zeroloss.matrix.host import Hypervisor, client
from netplugin_zeroloss.matrix.nics import Nics
from netplugin_zeroloss.matrix.ports import Ports
from netplugin_zeroloss.values import TrialRequest, UnusableInput
from netplugin_zeroloss.vnf import choose as vnfs
from netplugin_zeroloss.vnf import contract as vnf_contract
from netplugin_zeroloss.vnf.contract import PlacedDescription, Vnf, VnfPort

#: Interval between looks at a backend, in seconds.
_LOOK_S = 0.1


class AgentBench(Bench):
    """Sets up cells through the agent: ports and PMD cores, VM, VNF, loss attribution.

    The VM id contains the run id, so a resumed run finds and removes the leftovers of a killed one.
    """

    def __init__(
        self,
        description: RunDescription,
        run_id: str,
        pmd_cpus: str | None,
        pmd_mask: bool | None = None,
        nics: Mapping[str, Mapping[str, Any]] | None = None,
        root: Path = Path("/"),
    ) -> None:
        """``pmd_cpus``: PMD cores at the start of the run; None for a new run.

        ``pmd_mask``: whether they were those of a mask; None: unknown. ``nics``: the NICs as they were
        found, by PCI address. ``root``: below it are /sys and /proc.

        Raises: UnusableInput.
        """
        self._description, self._run_id, vm_id = description, run_id, f"zeroloss-{run_id}"
        self._domain = self._runner(vm_id)
        self._client = client(description)
        self._host = Hypervisor(self._client, description, vm_id, Nics(root, self._port_of_vf, nics), root)
        self._ports = Ports(self._host)
        self._ports.found_cpus, self._ports.found_mask = pmd_cpus, pmd_mask

    def _runner(self, name: str) -> DomainRunner | None:
        vm = self._description.vm
        seconds = self._description.timeouts.shutdown
        return DomainRunner(vm, name, seconds) if vm is not None else None

    def _port_of_vf(self) -> Mapping[str, str]:
        return {vf.pci_address: vf.port_id for vf in self._client.list_vfs() if vf.port_id is not None}

    def close(self) -> None:
        self._client.close()

    # -- checks ----------------------------------------------------------------------------------

    def check(self, tasks: Sequence[CellTask]) -> Mapping[str, Any]:
        searched = [task.cell for task in tasks if task.part is Part.SEARCH]
        backends = [cell.backend for cell in searched]
        require(self.findings(tasks))
        require(self._guest_findings(tasks))
        try:
            if self._ports.found_cpus is None and any(cell.pmd_cores for cell in searched):
                self._ports.look_at_pmd()
            return {
                "run_id": self._run_id,
                "pmd_cpus": self._ports.found_cpus,
                "pmd_mask": self._ports.found_mask,
                "nics": self._host.nics.note(self._host.needs(backends)) if self._description.rebind else {},
                "agent": self._client.url,
                "backends": {info.name: dict(info.facts) for info in self._host.infos(backends)},
            }
        except NetpluginError as error:
            raise UnusableInput("agent", str(error)) from error

    def findings(self, tasks: Sequence[CellTask]) -> Iterator[Finding]:
        """Yield all that can be found without starting a VM. Nothing is changed."""
        searched = [task.cell for task in tasks if task.part is Part.SEARCH]
        rebound: set[str] = set()
        with suppress(NetpluginError):  # about_agent reports it
            if self._description.rebind:
                rebound = self._host.rebound(info.name for info in self._client.backends())
        agent = list(checks.about_agent(self._client, rebound))
        yield from agent
        try:
            for check in () if any(finding.missing for finding in agent) else checks.OF_AGENT:
                yield from check(self._host, searched)
        except NetpluginError as error:
            yield of_error("agent", error, "the agent's log")
        yield from about_generators((self._generator_of(task), task.cell) for task in tasks)
        image = self._description.vm.image if self._description.vm is not None else None
        yield from checks.about_vnfs(self._vnfs(tasks), self._host.facts, image, len(self._ports.ends))
        if self._domain is not None:
            vm = list(self._domain.findings(self._host.root))
            yield from vm
            # The memory of a VM that a killed run left is given back before the next one starts.
            if not any(each.missing for each in vm) and not self._domain.is_running:
                yield from checks.about_memory(self._host, searched, self._domain.memory_mb())

    def _guest_findings(self, tasks: Sequence[CellTask]) -> Iterator[Finding]:
        """Yield what the VM of the VNF lacks; a VM of the run is started for it, without test NICs."""
        guests = [(vnf, machine) for vnf in self._vnfs(tasks) if (machine := vm_of(vnf)) is not None]
        with ExitStack() as parts:
            try:
                domain = self._domain
                if domain is not None and guests and not domain.is_running:
                    # Its name is always the same, so that the next check removes it after a kill.
                    domain = self._runner("zeroloss-check")
                    assert domain is not None
                    domain.remove()
                    parts.enter_context(domain.running(domain.template))
                for vnf, machine in guests:
                    if domain is not None:
                        domain.wait_for(machine, self._description.timeouts.boot)
                    assert isinstance(vnf, PlacedDescription)
                    yield from checks.about_guest(vnf, machine)
            except NetpluginError as error:
                yield of_error("vm", error, "look at libvirt's log, and at that of its QEMU")
            except CellError as error:
                yield Finding("vm", str(error), "look at its console; has the image an SSH server?")

    def _vnfs(self, tasks: Sequence[CellTask]) -> list[vnf_contract.Description]:
        """Return the distinct VNFs of these tasks."""
        found: list[vnf_contract.Description] = []
        for task in tasks:
            chosen = self._vnf_of(task) if task.part is not Part.LOOPBACK else None
            if chosen is not None and chosen not in found:
                found.append(chosen)
        return found

    def _vnf_of(self, task: CellTask) -> vnf_contract.Description | None:
        control = self._description.controls.vnf
        if task.part is Part.VNF and control is not None and control.vnf is not None:
            return in_mode(control.vnf, task.cell)
        return self._description.vnf_of(task.cell)

    def recover(self) -> None:
        try:
            if self._domain is not None:
                self._domain.remove()
            if self._ports.remove_leftovers():
                self._ports.put_back_pmd()
        except (CellError, NetpluginError) as error:
            raise UnusableInput("agent", str(error)) from error
        if left := self._host.nics.put_back():
            raise UnusableInput("nics", "\n".join(left))

    def restore(self) -> Sequence[str]:
        return [*self._host.nics.put_back(), *self._ports.not_restored()]

    # -- setting up ------------------------------------------------------------------------------

    @contextmanager
    def stand(self, task: CellTask) -> Iterator[Stand]:
        setup: dict[str, Any] = {"agent": self._client.url}
        checked: list[Callable[[], None]] = []
        bindings: list[tuple[DataPath, Binding]] = []
        vnf_ports: list[VnfPort] = []
        control = self._description.controls.vnf
        with ExitStack() as parts:
            if task.part is Part.SEARCH:
                self._bind_nics(task.cell)
                plugged = self._ports.plug(parts, task.cell)
                checked.append(self._ports.check)
                bindings = [_bound(port) for port in plugged]
                vnf_ports = [
                    vnfs.vnf_port(path, binding, port.spec, end.peer_mac)
                    for (path, binding), port, end in zip(bindings, plugged, self._ports.ends, strict=True)
                ]
                self._start_vm(parts, task.cell, setup)
            elif task.part is Part.VNF and control is not None and control.ports is not None:
                vnf_ports = [replace(port, queues=task.cell.queues) for port in control.ports]
            # A NIC of OVS-DPDK has no kernel device in this cell: OVS counts what it drops.
            counted = self._description.evidence.without(self._host.nics.hides)
            places = list(evidence.make(counted, bindings, self._description.timeouts.counters))
            if vnf_ports:
                vnf = self._start_vnf(parts, task, vnf_ports, setup)
                checked.append(vnf.check)
                places.append(vnf.place)
            if task.part is Part.SEARCH:
                setup["ports"] = [p.model_dump(mode="json") for p in self._ports.connected(task.cell)]
                if task.cell.pmd_cores is not None:
                    setup["pmd"] = self._client.pmd().model_dump(mode="json")
            chosen = self._generator_of(task)
            setup["generator"] = chosen.model_dump(mode="json")
            generator = parts.enter_context(generators.make(chosen))
            setup["ends"] = self._port_ids(task)
            seconds = self._description.timeouts.forwarding
            plan = cells.plan(self._description, task, generator.info, Ceilings())
            like = TrialRequest(plan.top_pps / 2, 1.0, plan.frame_size, plan.flows, mix=plan.mix)
            wait_until_forwarding(generator, like, seconds, setup["ends"])
            counting = AttributedGenerator(generator, places)
            yield Stand(CheckedGenerator(counting, checked, setup["ends"], seconds), setup)

    def _bind_nics(self, cell: Cell) -> None:
        """Bind the NICs of the cell as it needs them, and wait until its backend is usable with them.

        Raises: CellError, NetpluginError.
        """
        unfit = self._host.unfit([cell.backend]) if self._description.rebind else []
        for need in unfit:
            self._host.nics.bind(need)
        if not unfit:
            return

        def look() -> BackendInfo:
            [found] = self._host.infos([cell.backend])
            return found

        seconds = self._description.timeouts.active
        info = polled(look, lambda found: found.usable, seconds, _LOOK_S)
        if not info.usable:
            why = f"is not usable {seconds:g} s after its NICs were bound: {info.reason}"
            raise CellError(f"backend {cell.backend} {why}")

    def _start_vm(self, parts: ExitStack, cell: Cell, setup: dict[str, Any]) -> None:
        described, domain = self._description.vm, self._domain
        if described is None or domain is None:
            return
        placement = described.placement
        if (node := self._host.node(cell)) is not None:
            placement = placement.model_copy(update={"pin": True, "numa_node": node})
            setup["numa_node"] = node
        rendered = self._client.render_domain(self._host.vm_id, domain.template, placement).xml
        setup["vm"] = domain.addressed(rendered, [end.mac for end in self._ports.ends])
        parts.enter_context(domain.running(setup["vm"]))
        vnf = self._description.vnf_of(cell)
        machine = vm_of(vnf) if vnf is not None else None
        if machine is not None:
            domain.wait_for(machine, self._description.timeouts.boot)

    def _start_vnf(
        self, parts: ExitStack, task: CellTask, ports: Sequence[VnfPort], setup: dict[str, Any]
    ) -> Vnf:
        chosen = self._vnf_of(task)
        assert chosen is not None  # with an agent there is one
        cores = self._description.vnf_cores.vnf_cores()
        # In a VM they are vCPUs, which the agent places.
        if vm_of(chosen) is None and (node := self._host.node(task.cell)) is not None:
            cores, setup["numa_node"] = self._host.cores_on(node, task.cell), node
        vnf = parts.enter_context(vnfs.make(chosen, ports, cores))
        setup["vnf"] = asdict(vnf.start())
        return vnf

    def _port_ids(self, task: CellTask) -> list[str]:
        """Return the ids of the ports between which frames go; a control has none."""
        return [end.port_id for end in self._ports.ends if task.part is Part.SEARCH]

    def _generator_of(self, task: CellTask) -> generators.Description:
        """Return the generator of a task, with the MAC addresses of the ends filled in."""
        return addressed(generator_of(self._description, task), self._ports.ends)


def addressed(description: generators.Description, ends: Sequence[End]) -> generators.Description:
    """Fill in missing MAC addresses: to the VNF's port, and from the address that the VNF sends to.

    Ports of a batch enter at the ends in their order.
    """
    if isinstance(description, generators.TrexStf) and not description.macs:
        macs = tuple(PortMacs(source_mac=end.peer_mac, destination_mac=end.mac) for end in ends)
        return description.model_copy(update={"macs": macs})
    if not isinstance(description, generators.Tcpreplay | generators.TrexStl):
        return description
    found = []
    for number, entrance in enumerate(paths.entrances(len(description.paths), len(ends))):
        path, end = description.paths[number], ends[entrance]
        own = path.frames
        source, destination = own.source_mac or end.peer_mac, own.destination_mac or end.mac
        frames = own.model_copy(update={"source_mac": source, "destination_mac": destination})
        found.append(path.model_copy(update={"frames": frames}))
    return description.model_copy(update={"paths": tuple(found)})


def _bound(port: Port) -> tuple[DataPath, Binding]:
    """Return the binding of a port with its data path. Raises: CellError if it has none."""
    if port.binding is None:
        raise CellError(f"the agent gave no binding for port {port.port_id}")
    try:
        return data_path(port.spec.backend, port.binding.vif_type), port.binding
    except NoDataPath as problem:
        raise CellError(str(problem)) from problem
