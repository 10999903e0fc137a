"""Cells on a hypervisor: the checks before a run, and the set-up through the agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from netplugin.api.client import Client
from netplugin.api.errors import NetpluginError
from netplugin.api.models import BackendInfo, Binding, Port
from netplugin.data_path import DataPath, NoDataPath, data_path
from netplugin.programs.polling import polled
from netplugin.tuning.facts import Facts
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Root
from netplugin_zeroloss import paths
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.generators.choose import PortMacs
from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.journal import NO_BACKEND, Cell, Part
from netplugin_zeroloss.loss import choose as evidence
from netplugin_zeroloss.loss.contract import AttributedGenerator
from netplugin_zeroloss.matrix import cells, numa, preflight
from netplugin_zeroloss.matrix.axes import NumaPlacement, pmd_count
from netplugin_zeroloss.matrix.bench import (
    Bench,
    CellError,
    Guarded,
    Stand,
    generator_of,
    wait_until_forwarding,
)
from netplugin_zeroloss.matrix.cells import Ceilings, CellTask
from netplugin_zeroloss.matrix.description import End, RunDescription, Vm, in_mode, vm_of
from netplugin_zeroloss.matrix.domain import DomainRunner, source_of
from netplugin_zeroloss.matrix.findings import Finding, of_error, require
from netplugin_zeroloss.matrix.guest import look_into
from netplugin_zeroloss.matrix.nics import NicNeed, Nics
from netplugin_zeroloss.matrix.pmd_cpus import planned_cpus
from netplugin_zeroloss.matrix.ports import Ports
from netplugin_zeroloss.values import TrialRequest, UnusableInput
from netplugin_zeroloss.vnf import choose as vnfs
from netplugin_zeroloss.vnf import contract as vnf_contract
from netplugin_zeroloss.vnf.contract import PlacedDescription, Vnf, VnfPort

#: Interval between looks at a backend, in seconds.
_LOOK_S = 0.1


def client(description: RunDescription) -> Client:
    """Create the agent's client from the description, with the environment as default.

    Raises: UnusableInput.
    """
    agent = description.agent
    assert agent is not None
    given = {
        "NETPLUGIN_URL": agent.url,
        "NETPLUGIN_TOKEN_FILE": agent.token_file,
        "NETPLUGIN_CA": agent.ca,
        "NETPLUGIN_CERT": agent.cert,
        "NETPLUGIN_KEY": agent.key,
    }
    settings = {name: str(value) for name, value in given.items() if value is not None}
    try:
        return Client.from_environment({**os.environ, **settings}, description.timeouts.agent)
    except NetpluginError as error:
        raise UnusableInput("agent", str(error)) from error


# -- Sets up cells on a hypervisor: ports and PMD cores through the agent's RPC, VM, VNF, loss attribution.


class AgentBench(Bench):
    """Sets up cells through the agent.

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
        self._description = description
        self._run_id = run_id
        vm_id = f"zeroloss-{run_id}"
        vm = description.vm
        self._domain = self._runner(vm, vm_id) if vm is not None else None
        self._vm_id = vm_id
        self._client = client(description)
        self._root = root
        self.nics = Nics(root, self._port_of_vf, nics)
        self._ports = Ports(self._client, description, vm_id, self._planned_cpus)
        self._ports.found_cpus = pmd_cpus
        self._ports.found_mask = pmd_mask

    def _runner(self, vm: Vm, name: str) -> DomainRunner:
        return DomainRunner(source_of(vm), vm.uri, name, self._description.timeouts.shutdown)

    def close(self) -> None:
        self._client.close()

    def check(self, tasks: Sequence[CellTask]) -> Mapping[str, Any]:
        searched = [task.cell for task in tasks if task.part is Part.SEARCH]
        require(self.findings(tasks))
        require(self._guest_findings(tasks))
        try:
            if self._ports.found_cpus is None and any(cell.pmd_cores for cell in searched):
                self._ports.look_at_pmd()
            infos = self._client.backends()
        except NetpluginError as error:
            raise UnusableInput("agent", str(error)) from error
        return {
            "run_id": self._run_id,
            "pmd_cpus": self._ports.found_cpus,
            "pmd_mask": self._ports.found_mask,
            "nics": self.nics.note(self._needs(searched)) if self._description.rebind else {},
            "agent": self._client.url,
            "backends": preflight.journalled(searched, infos),
        }

    def findings(self, tasks: Sequence[CellTask]) -> Iterator[Finding]:
        """Yield all that can be found without starting a VM. Nothing is changed."""
        searched = [task.cell for task in tasks if task.part is Part.SEARCH]
        agent = list(preflight.about_agent(self._client, self._rebound()))
        yield from agent
        if not any(finding.missing for finding in agent):
            try:
                yield from self._agent_findings(searched)
            except NetpluginError as error:
                yield of_error("agent", error, "the agent's log")
        yield from preflight.about_generators((self._generator_of(task), task.cell) for task in tasks)
        image = self._description.vm.image if self._description.vm is not None else None
        yield from preflight.about_vnfs(self._vnfs(tasks), self._facts, image, len(self._ports.ends))
        if self._domain is not None:
            vm = list(self._domain.findings(self._root))
            yield from vm
            # The memory of a VM that a killed run left is given back before the next one starts.
            if (
                not any(each.missing for each in vm)
                and preflight.shares_memory(searched)
                and not self._domain.is_running
            ):
                memory = self._domain.memory_mb()
                for node in self._vm_nodes(searched):
                    yield from preflight.about_hugepages(memory, "the VM", self._facts, node)

    def _agent_findings(self, searched: Sequence[Cell]) -> Iterator[Finding]:
        description = self._description
        backends = list(dict.fromkeys(cell.backend for cell in searched))
        networks = {network.name: network for network in self._client.list_physical_networks()}
        needs = self._needs(searched)
        unfit = [need for need in needs if not need.fits(self.nics.driver(need.address))]
        later = {need.backend for need in unfit} if description.rebind else set()
        yield from preflight.about_backends(self._client, description, searched, later)
        yield from preflight.about_ports(self._client, description, self._vm_id)
        placement = description.vm.placement if description.vm is not None else None
        if placement is not None and (placement.pin or placement.realtime or description.matrix.numa):
            yield from preflight.about_plan(self._client)
        yield from preflight.about_networks(networks, description, self._infos(searched), unfit)
        yield from preflight.about_nics(self.nics, needs, description.rebind)
        workers = 1 if description.vm is not None else self._workers
        for backend in backends:
            entries = [
                entry
                for entry in description.matrix.pmd_cores
                if any(c.backend == backend and c.pmd_cores == pmd_count(entry) for c in searched)
            ]
            mine = [need.address for need in needs if need.backend == backend]
            yield from preflight.about_pmd_cores(entries, self._facts, mine)
            for where in description.matrix.numa:
                yield from numa.findings(where, self._facts, mine, workers, self._most_pmd_cores)

    def _guest_findings(self, tasks: Sequence[CellTask]) -> Iterator[Finding]:
        """Yield what the VM of the VNF lacks; a VM of the run is started for it, without test NICs."""
        vm, seconds = self._description.vm, self._description.timeouts.boot
        guests = [(vnf, machine) for vnf in self._vnfs(tasks) if (machine := vm_of(vnf)) is not None]
        with ExitStack() as parts:
            try:
                domain = self._domain
                if vm is not None and domain is not None and guests and not domain.is_running:
                    # Its name is always the same, so that the next check removes it after a kill.
                    domain = self._runner(vm, "zeroloss-check")
                    domain.remove()
                    parts.enter_context(domain.running(domain.template))
                for vnf, machine in guests:
                    if domain is not None:
                        domain.wait_for(machine, seconds)
                    assert isinstance(vnf, PlacedDescription)
                    yield from look_into(vnf, machine)
            except NetpluginError as error:
                yield of_error("vm", error, "look at libvirt's log, and at that of its QEMU")
            except CellError as error:
                yield Finding("vm", str(error), "look at its console; has the image an SSH server?")

    def recover(self) -> None:
        try:
            if self._domain is not None:
                self._domain.remove()
            if self._ports.remove_leftovers():
                self._ports.put_back_pmd()
        except (CellError, NetpluginError) as error:
            raise UnusableInput("agent", str(error)) from error
        if left := self.restore():
            raise UnusableInput("nics", "\n".join(left))

    def restore(self) -> Sequence[str]:
        return self.nics.put_back()

    def not_restored(self) -> Sequence[str]:
        return self._ports.not_restored()

    @cached_property
    def _facts(self) -> Facts:
        return read_facts(Root(self._root))

    def _rebound(self) -> set[str]:
        """Return the backends of the agent without a NIC that the run rebinds, or rebound before a kill."""
        if not self._description.rebind:
            return set()
        try:
            needs = self._needs([Cell(info.name) for info in self._client.backends()])
        except NetpluginError:
            return set()  # about_agent reports it
        return {need.backend for need in needs if not need.fits(self.nics.driver(need.address))}

    def _needs(self, searched: Sequence[Cell]) -> list[NicNeed]:
        """Return the NICs of these cells, each with the driver that it needs. Raises: NetpluginError."""
        networks = {network.name: network for network in self._client.list_physical_networks()}
        return preflight.needs(networks, self._description, self._infos(searched), self.nics.sys)

    def _infos(self, searched: Sequence[Cell]) -> list[BackendInfo]:
        """Return the backends of these cells, as far as the agent has them. Raises: NetpluginError."""
        infos = {info.name: info for info in self._client.backends()}
        backends = dict.fromkeys(cell.backend for cell in searched)
        return [infos[name] for name in backends if name in infos]

    def _planned_cpus(self, backend: str, count: int) -> str:
        needs = self._needs([Cell(backend)])
        return planned_cpus(count, self._facts, [need.address for need in needs])

    def _port_of_vf(self) -> Mapping[str, str]:
        return {vf.pci_address: vf.port_id for vf in self._client.list_vfs() if vf.port_id is not None}

    def _vnfs(self, tasks: Sequence[CellTask]) -> list[vnf_contract.Description]:
        """Return the distinct VNFs of these tasks."""
        control = self._description.controls.vnf
        found: list[vnf_contract.Description] = []
        for task in tasks:
            chosen = self._description.vnf_of(task.cell) if task.part is Part.SEARCH else None
            if task.part is Part.VNF and control is not None:
                chosen = control.vnf or self._description.vnf
            if chosen is not None and chosen not in found:
                found.append(chosen)
        return found

    # -- setting up ------------------------------------------------------------------------------

    @contextmanager
    def stand(self, task: CellTask) -> Iterator[Stand]:
        with ExitStack() as parts:
            setup: dict[str, Any] = {"agent": self._client.url}
            checks: list[Callable[[], None]] = []
            bindings: list[tuple[DataPath, Binding]] = []
            vnf_ports: list[VnfPort] = []
            if task.part is Part.SEARCH:
                self._bind_nics(task.cell)
                plugged = self._ports.plug(parts, task.cell)
                checks.append(self._ports.check)
                bindings = [_bound(port) for port in plugged]
                vnf_ports = [
                    vnfs.vnf_port(path, binding, port.spec, end.peer_mac)
                    for (path, binding), port, end in zip(bindings, plugged, self._ports.ends, strict=True)
                ]
                self._start_vm(parts, task.cell, setup)
            elif task.part is Part.VNF:
                vnf_ports = self._control_ports(task.cell)
            # A NIC of OVS-DPDK has no kernel device in this cell: OVS counts what it drops.
            counted = self._description.evidence.without(self.nics.hides)
            places = list(evidence.make(counted, bindings, self._description.timeouts.counters))
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
            setup["ends"] = ports = self._port_ids(task)
            attributed = AttributedGenerator(generator, places)
            seconds = self._description.timeouts.forwarding
            yield Stand(Guarded(attributed, checks, ports, seconds), setup)

    def _bind_nics(self, cell: Cell) -> None:
        """Bind the NICs of the cell as it needs them, and wait until its backend is usable with them.

        Raises: CellError, NetpluginError.
        """
        needs = self._needs([cell]) if self._description.rebind else []
        unfit = [need for need in needs if not need.fits(self.nics.driver(need.address))]
        for need in unfit:
            self.nics.bind(need)
        if not unfit:
            return
        seconds = self._description.timeouts.active
        info = polled(lambda: self._info(cell.backend), lambda found: found.usable, seconds, _LOOK_S)
        if not info.usable:
            raise CellError(
                f"backend {cell.backend} is not usable {seconds:g} s after its NICs were bound: {info.reason}"
            )

    def _info(self, backend: str) -> BackendInfo:
        [info] = [each for each in self._client.backends() if each.name == backend]
        return info

    def _start_vm(self, parts: ExitStack, cell: Cell, setup: dict[str, Any]) -> None:
        described, domain = self._description.vm, self._domain
        if described is None or domain is None:
            return
        placement = described.placement
        if (node := self._node(cell)) is not None:
            placement = placement.model_copy(update={"pin": True, "numa_node": node})
            setup["numa_node"] = node
        rendered = self._client.render_domain(self._vm_id, domain.template, placement).xml
        setup["vm"] = domain.source.addressed(rendered, [end.mac for end in self._ports.ends])
        parts.enter_context(domain.running(setup["vm"]))
        vnf = self._description.vnf_of(cell)
        machine = vm_of(vnf) if vnf is not None else None
        if machine is not None:
            domain.wait_for(machine, self._description.timeouts.boot)

    def _start_vnf(
        self, parts: ExitStack, task: CellTask, ports: Sequence[VnfPort], setup: dict[str, Any]
    ) -> Vnf:
        control = self._description.controls.vnf
        chosen = self._description.vnf_of(task.cell)
        if task.part is Part.VNF and control is not None and control.vnf is not None:
            chosen = in_mode(control.vnf, task.cell)
        assert chosen is not None  # with an agent there is one
        cores = self._description.vnf_cores.vnf_cores()
        # In a VM they are vCPUs, which the agent places.
        if vm_of(chosen) is None and (node := self._node(task.cell)) is not None:
            cores = numa.cores_on(
                node, self._workers, self._facts, self._nics_of(task.cell), self._most_pmd_cores
            )
            setup["numa_node"] = node
        vnf = vnfs.make(chosen, ports, cores)
        parts.enter_context(vnf)
        setup["vnf"] = asdict(vnf.start())
        return vnf

    def _node(self, cell: Cell) -> int | None:
        """Return the NUMA node for the VM or VNF of a cell; None: no placement is requested.

        Raises: NetpluginError.
        """
        if not cell.numa:
            return None
        return numa.node_of(NumaPlacement(cell.numa), self._facts, self._nics_of(cell))

    def _vm_nodes(self, searched: Sequence[Cell]) -> list[int | None]:
        """Return the nodes of the VMs of these cells; None: any."""
        try:
            return list(dict.fromkeys(self._node(cell) for cell in searched))
        except NetpluginError:
            return [None]  # a finding of its own

    def _nics_of(self, cell: Cell) -> list[str]:
        """Return the NICs of a cell; a control has those of all backends. Raises: NetpluginError."""
        backends = self._description.matrix.backends if cell.backend == NO_BACKEND else (cell.backend,)
        return [need.address for need in self._needs([Cell(backend) for backend in backends])]

    @property
    def _workers(self) -> int:
        return len(self._description.vnf_cores.vnf_cores().workers) or 1

    @property
    def _most_pmd_cores(self) -> int:
        """The most PMD cores of a cell: the VNF's CPUs are the same in all of them."""
        return max(map(pmd_count, self._description.matrix.pmd_cores))

    def _control_ports(self, cell: Cell) -> list[VnfPort]:
        control = self._description.controls.vnf
        assert control is not None and control.ports is not None
        return [replace(port, queues=cell.queues) for port in control.ports]

    def _note_ports(self, cell: Cell, setup: dict[str, Any]) -> None:
        setup["ports"] = [p.model_dump(mode="json") for p in self._ports.connected(cell)]
        if cell.pmd_cores is not None:
            setup["pmd"] = self._ports.pmd().model_dump(mode="json")

    def _port_ids(self, task: CellTask) -> list[str]:
        """Return the ids of the ports between which frames go; a control has none."""
        return [end.port_id for end in self._ports.ends] if task.part is Part.SEARCH else []

    def _generator_of(self, task: CellTask) -> generators.Description:
        """Return the generator of a task, with the MAC addresses of the ends filled in."""
        return addressed(generator_of(self._description, task), self._ports.ends)

    def _wait_until_forwarding(self, generator: Generator, task: CellTask) -> None:
        plan = cells.plan(self._description, task, generator.info, Ceilings())
        like = TrialRequest(plan.top_pps / 2, 1.0, frame_size=plan.frame_size, flows=plan.flows, mix=plan.mix)
        seconds = self._description.timeouts.forwarding
        wait_until_forwarding(generator, like, seconds, self._port_ids(task))


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
        frames = path.frames.model_copy(
            update={
                "source_mac": path.frames.source_mac or end.peer_mac,
                "destination_mac": path.frames.destination_mac or end.mac,
            }
        )
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
