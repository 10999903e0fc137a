"""Cells on a hypervisor: the checks before a run, the set-up through the agent, and the VM."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lxml import etree

from netplugin.api.client import Client
from netplugin.api.errors import NetpluginError
from netplugin.api.models import BackendInfo, Binding, Port
from netplugin.data_path import DataPath, NoDataPath, data_path
from netplugin.host.processes import run
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.journal import Cell, Part
from netplugin_zeroloss.loss import choose as evidence
from netplugin_zeroloss.loss.contract import AttributedGenerator
from netplugin_zeroloss.matrix import cells
from netplugin_zeroloss.matrix.bench import (
    Bench,
    CellError,
    Guarded,
    Stand,
    check_generators,
    generator_of,
    wait_until_forwarding,
)
from netplugin_zeroloss.matrix.cells import Ceilings, CellTask
from netplugin_zeroloss.matrix.description import End, RunDescription, ssh_of
from netplugin_zeroloss.matrix.ports import Ports, taken
from netplugin_zeroloss.matrix.yaml_model import read_text
from netplugin_zeroloss.values import TrialRequest, UnusableInput
from netplugin_zeroloss.vnf import choose as vnfs
from netplugin_zeroloss.vnf.contract import LocalMachine, TestpmdDescription, Vnf, VnfPort, VppDescription


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
    reported = {name: str(value) for name, value in given.items() if value is not None}
    try:
        return Client.from_environment({**os.environ, **reported}, description.timeouts.agent)
    except NetpluginError as error:
        raise UnusableInput("agent", str(error)) from error


def check(
    agent: Client, description: RunDescription, searched: Sequence[Cell], vm_id: str
) -> Mapping[str, Any]:
    """Check agent, backends and ports; returns facts for the journal.

    Raises: UnusableInput, NetpluginError.
    """
    readiness = agent.ready()
    if not readiness.ready:
        raise UnusableInput("agent", f"it is not ready: {'; '.join(readiness.reasons)}")
    backends = {info.name: info for info in agent.backends()}
    problems = list(_about_backends(description, searched, backends))
    mine = {end.port_id for end in description.ends or ()}
    problems += [
        taken(port) for port in agent.list_ports() if port.port_id in mine and port.spec.vm_id != vm_id
    ]
    if problems:
        raise UnusableInput("agent", "\n".join(problems))
    used = {cell.backend for cell in searched}
    return {
        "agent": agent.url,
        "backends": {name: dict(backends[name].facts) for name in sorted(used)},
    }


def _about_backends(
    description: RunDescription, searched: Sequence[Cell], backends: Mapping[str, BackendInfo]
) -> Iterator[str]:
    for name in dict.fromkeys(cell.backend for cell in searched):
        info = backends.get(name)
        if info is None:
            yield f"it has no backend {name!r}; it has {', '.join(sorted(backends)) or 'none'}"
            continue
        try:
            data_path(name)
        except NoDataPath as problem:
            yield str(problem)
        if not info.usable:
            fix = f" (fix: {info.fix})" if info.fix else ""
            yield f"backend {name} is not usable there: {info.reason}{fix}"
            continue
        # With several NICs this is the maximum over them: a port on another NIC may still be
        # refused.
        queues = max(cell.queues for cell in searched if cell.backend == name)
        if queues > info.features.max_queues:
            yield f"backend {name} has {info.features.max_queues} queues at most, not {queues}"
        for end in description.ends or ():
            kind = end.network_of(name).type
            if kind not in info.features.networks:
                yield f"backend {name} has no {kind} networks (end {end.port_id})"


def check_vnfs(description: RunDescription, tasks: Sequence[CellTask]) -> None:
    """Check that the VNF programs that run on this host are installed. Raises: UnusableInput."""
    control = description.controls.vnf
    chosen = [description.vnf_of(task.cell) for task in tasks if task.part is Part.SEARCH]
    if control is not None and any(task.part is Part.VNF for task in tasks):
        chosen.append(control.vnf or description.vnf)
    for vnf in chosen:
        if isinstance(vnf, TestpmdDescription) or (
            isinstance(vnf, VppDescription) and isinstance(vnf.machine, LocalMachine)
        ):
            if shutil.which(vnf.binary) is None:
                raise UnusableInput("vnf", f"{vnf.binary} is not installed here, or not in PATH")


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
    ) -> None:
        """``pmd_cpus``: PMD cores at the start of the run; None for a new run.

        ``pmd_mask``: whether they were those of a mask; None: unknown.

        Raises: UnusableInput.
        """
        self._description = description
        self._run_id = run_id
        vm_id = f"zeroloss-{run_id}"
        vm = description.vm
        self._domain = DomainRunner(vm.domain, vm.uri, vm_id) if vm is not None else None
        self._vm_id = vm_id
        self._client = client(description)
        self._ports = Ports(self._client, description, vm_id)
        self._ports.found_cpus = pmd_cpus
        self._ports.found_mask = pmd_mask

    def close(self) -> None:
        self._client.close()

    def check(self, tasks: Sequence[CellTask]) -> Mapping[str, Any]:
        searched = [task.cell for task in tasks if task.part is Part.SEARCH]
        try:
            if self._ports.found_cpus is None and any(cell.pmd_cores for cell in searched):
                self._ports.look_at_pmd()
            found = check(self._client, self._description, searched, self._vm_id)
        except NetpluginError as error:
            raise UnusableInput("agent", str(error)) from error
        check_generators(self._generator_of(task) for task in tasks)
        check_vnfs(self._description, tasks)
        if self._domain is not None:
            self._domain.check()
        return {
            "run_id": self._run_id,
            "pmd_cpus": self._ports.found_cpus,
            "pmd_mask": self._ports.found_mask,
            **found,
        }

    def recover(self) -> None:
        try:
            if self._domain is not None:
                self._domain.destroy()
            if self._ports.remove_leftovers():
                self._ports.put_back_pmd()
        except (CellError, NetpluginError) as error:
            raise UnusableInput("agent", str(error)) from error

    def not_restored(self) -> Sequence[str]:
        return self._ports.not_restored()

    # -- setting up ------------------------------------------------------------------------------

    @contextmanager
    def stand(self, task: CellTask) -> Iterator[Stand]:
        with ExitStack() as parts:
            setup: dict[str, Any] = {"agent": self._client.url}
            checks: list[Callable[[], None]] = []
            paths: list[tuple[DataPath, Binding]] = []
            vnf_ports: list[VnfPort] = []
            if task.part is Part.SEARCH:
                plugged = self._ports.plug(parts, task.cell)
                checks.append(self._ports.check)
                path = data_path(task.cell.backend)
                paths = [(path, _binding(port)) for port in plugged]
                vnf_ports = [
                    vnfs.vnf_port(path, _binding(port), port.spec, end.peer_mac)
                    for port, end in zip(plugged, self._ports.ends, strict=True)
                ]
                self._start_vm(parts, task.cell, setup)
            elif task.part is Part.VNF:
                vnf_ports = self._control_ports(task.cell)
            places = list(evidence.make(self._description.evidence, paths))
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
            yield Stand(Guarded(AttributedGenerator(generator, places), checks), setup)

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
        self, parts: ExitStack, task: CellTask, ports: Sequence[VnfPort], setup: dict[str, Any]
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

    def _generator_of(self, task: CellTask) -> generators.Description:
        """Return the generator of a task, with the MAC addresses of the ends filled in."""
        return addressed(generator_of(self._description, task), self._ports.ends)

    def _wait_until_forwarding(self, generator: Generator, task: CellTask) -> None:
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


# -- The VM of a cell: a libvirt domain of the operator, to which the agent adds NICs. -------------


#: Timeout of one virsh call, in seconds.
_CALL_S = 60.0
#: Interval between attempts to reach a booting VM, in seconds.
_LOOK_S = 0.5


class DomainRunner:
    """Starts and destroys a domain; its fixed name identifies the leftover of a killed run."""

    def __init__(self, template: Path, uri: str, name: str) -> None:
        """Read the template. Raises: UnusableInput if it is not a libvirt domain."""
        self._uri, self._name = uri, name
        self._xml = _named(read_text(template), name, str(template))

    @property
    def template(self) -> str:
        """The domain XML without NICs, with the name replaced."""
        return self._xml

    def check(self) -> None:
        """Check that libvirt responds. Raises: UnusableInput."""
        try:
            self._running()
        except NetpluginError as error:
            raise UnusableInput("vm", str(error)) from error

    def start(self, xml: str) -> None:
        """Create a transient domain, which disappears when it stops.

        Raises: NetpluginError with the error text of libvirt.
        """
        self._virsh("create", "/dev/stdin", stdin=xml)

    def destroy(self) -> None:
        """Destroy the domain if it exists. Raises: NetpluginError."""
        if self._name in self._running():
            self._virsh("destroy", self._name)

    def _running(self) -> list[str]:
        return self._virsh("list", "--name").split()

    def _virsh(self, *words: str, stdin: str | None = None) -> str:
        deadline = time.monotonic() + _CALL_S
        return run(["virsh", "-c", self._uri, *words], step="vm", deadline=deadline, stdin=stdin)


def wait_for_ssh(host: str, port: int, seconds: float) -> None:
    """Wait for the banner of the SSH server. Raises: CellError."""
    deadline = time.monotonic() + seconds
    while True:
        # A booting VM refuses, is unreachable, or accepts the connection before sshd is ready.
        with suppress(OSError), socket.create_connection((host, port), timeout=5.0) as there:
            if there.recv(4) == b"SSH-":
                return
        if time.monotonic() > deadline:
            raise CellError(f"the VM did not answer by SSH at {host} port {port} within {seconds:g} s")
        time.sleep(_LOOK_S)


def _named(xml: str, name: str, where: str) -> str:
    """Set the name of the domain and remove its UUID, so that libvirt generates one."""
    parser = etree.XMLParser(resolve_entities=False, load_dtd=False, no_network=True)
    try:
        domain = etree.fromstring(xml.encode(), parser)
    except etree.XMLSyntaxError as error:
        raise UnusableInput(where, f"it is no XML: {error}") from error
    if domain.tag != "domain":
        raise UnusableInput(where, f"it is no libvirt domain: its element is <{domain.tag}>")
    for child in [*domain.findall("uuid"), *domain.findall("name")]:
        domain.remove(child)
    element = etree.Element("name")
    element.text = name
    domain.insert(0, element)
    return str(etree.tostring(domain, encoding="unicode"))
