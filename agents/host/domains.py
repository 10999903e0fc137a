"""Libvirt domains of VMs: add the NICs, place them according to the host's CPU plan, and check them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from agents.host.view import HostView
from agents.off_loop import OffLoop
from agents.store.store import Store
from netplugin.api.domain_models import CheckRequest, DomainPolicy, RenderedDomain, RenderRequest
from netplugin.api.errors import (
    BackendUnavailable,
    CapacityExhausted,
    Conflict,
    HostError,
    NetpluginError,
    NotFound,
)
from netplugin.api.models import Binding, Finding, Port, PortState, VfInfo
from netplugin.host.cpus import format_list
from netplugin.libvirt.domain import (
    RENDER,
    complete,
    function,
    keep_memory_on,
    nics,
    nodes_asked,
    parse_domain,
    written,
)
from netplugin.libvirt.interfaces import Element, fragments
from netplugin.libvirt.pins import Placement, pinned
from netplugin.libvirt.values import content
from netplugin.tuning.checks.frame import fail
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Cpus, Facts, Live
from netplugin.tuning.placing.capacity import Held, HostCapacity, ground_of, held, pinned_by_others, running
from netplugin.tuning.placing.checks import check
from netplugin.tuning.placing.checks.case import STEP as CHECK
from netplugin.tuning.placing.checks.case import Case, DomainNic
from netplugin.tuning.placing.faults import refuse_faults
from netplugin.tuning.placing.host_memory import UNKNOWN, HostMemory, memory_of_host, refuse_without_room
from netplugin.tuning.placing.render import (
    refuse_elsewhere,
    refuse_pmd,
    refuse_stale_mark,
    render_placed,
)
from netplugin.tuning.root import known

_SET: Final = "set [host] pmd_cores in netplugin.conf"


@dataclass
class Domains:
    _store: Store
    _view: HostView
    #: The ports of a VM without standby ports.
    _ports: Callable[[str], list[Port]]
    #: The whole VF pool.
    _vfs: Callable[[], Awaitable[list[VfInfo]]]
    _off_loop: OffLoop

    async def render(self, vm_id: str, request: RenderRequest) -> RenderedDomain:
        """Add the VM's NICs to the domain and, if the policy requests it, place the VM.

        A placed VM keeps its CPUs until its last port is deleted.

        Raises: NotFound if the VM has no ports; Conflict if a port is not active, if the domain
        contradicts a requirement of a NIC or of the placement, or if the host has no plan;
        CapacityExhausted if other VMs use the CPUs or the memory; BackendUnavailable if libvirt is
        running but does not report the CPUs of its VMs; InvalidRequest, Unsupported,
        OperationTimeout, HostError.
        """
        bindings = [_active(port) for port in self._of(vm_id, RENDER)]
        domain = await self._off_loop.compute(parse_domain, request.xml, RENDER)
        await self._place(vm_id, domain, bindings, request.policy)
        return RenderedDomain(xml=await self._off_loop.compute(written, domain))

    async def would_place(self, vm_id: str, request: RenderRequest) -> None:
        """Find out whether ``render`` could place a VM that has no ports here yet; nothing is kept.

        Raises: as ``render``.
        """
        domain = await self._off_loop.compute(parse_domain, request.xml, RENDER)
        await self._place(vm_id, domain, [], request.policy, keep=False)

    async def check(self, vm_id: str, request: CheckRequest) -> list[Finding]:
        """Check the XML of an existing domain. Raises: NotFound, InvalidRequest."""
        ports = self._of(vm_id, CHECK)
        own_nics = tuple(DomainNic(port.port_id, port.binding) for port in ports if port.binding)
        domain = await self._off_loop.compute(parse_domain, request.xml, CHECK)
        findings = [_not_active(port) for port in ports if port.state is not PortState.ACTIVE]
        ground, live, scene = None, frozenset[int](), None
        try:
            scene, impossible = await self._view.within(self._looked)
            ground = _ground(scene)
            if impossible is not None:
                findings.append(_no_plan("fail", impossible.detail, impossible.fix))
            elif ground is None:
                findings.append(_no_plan("warn", "the host has no plan", _SET))
        except NetpluginError as error:
            findings.append(_no_plan("fail", error.detail, error.fix))
        else:
            try:
                live = _live(scene, domain, CHECK)
            except (BackendUnavailable, HostError) as silent:
                findings.append(_unknown("libvirt", silent, "libvirt says which CPUs other VMs have"))
        placements = await self._store.database.in_thread(self._store.placements.all)
        mine = placements.pop(vm_id, None)
        others = held(placements.values(), live)
        other_vfs: tuple[VfInfo, ...] = ()
        if await self._off_loop.compute(_other_functions, domain, own_nics):
            try:
                other_vfs = _of_others(await self._vfs(), ports)
            except NetpluginError as unread:
                expected = "the VFs can be read, to tell whether the domain has one of another VM"
                findings.append(_unknown("nic-vf", unread, expected))
        ovs = known(scene.live.ovs, None) if scene else None
        config = ovs.other_config if ovs else None
        case = Case(domain, own_nics, ground, mine, others.cpus, other_vfs, _host(scene), config)
        return [*findings, *await self._off_loop.compute(lambda: tuple(check(case)))]

    def _of(self, vm_id: str, step: str) -> list[Port]:
        ports = self._ports(vm_id)
        if not ports:
            raise NotFound(f"VM {vm_id} has no ports here", step=step)
        return ports

    async def _place(
        self, vm_id: str, domain: Element, bindings: list[Binding], policy: DomainPolicy, keep: bool = True
    ) -> None:
        """Place the domain if the policy requests it; else add the NICs and check what it has of its own."""
        if not (policy.pin or policy.realtime):
            scene = None
            if await self._off_loop.compute(_names_host, domain, bindings, policy):
                with suppress(NetpluginError):  # nobody knows better then
                    scene = await self._view.within(self._view.planned_or_not)
            await self._off_loop.compute(_complete, domain, bindings, policy, scene)
            return
        scene = await self._view.within(self._planned)
        in_thread = self._store.database.in_thread
        await in_thread(self._render_placed, vm_id, domain, bindings, policy, scene, keep)

    def _render_placed(
        self,
        vm_id: str,
        domain: Element,
        bindings: list[Binding],
        policy: DomainPolicy,
        scene: Scene,
        keep: bool,
    ) -> None:
        ground = _ground(scene)
        assert ground is not None
        live = _live(scene, domain, RENDER)
        with self._store.database.lock:
            placements = self._store.placements.all()
            before = placements.pop(vm_id, None)
            host = _host(scene)
            place = partial(render_placed, domain, bindings, policy, ground, host=host)
            # PMD threads may run on VM cores of the plan, if PUT /v1/pmd set them while no VM used these.
            spared = held(placements.values(), live | scene.polling)
            try:
                placement = place(spared, before)
            except CapacityExhausted as full:
                if policy.realtime:
                    raise _none_for_realtime(full, ground.cpus & scene.polling) from None
                others = held(placements.values(), live)
                placement = _with_polling(place, scene, others, before)
            refuse_without_room(domain, host, ground)
            if keep and placement != before:
                self._store.placements.save(vm_id, placement)

    def _looked(self, facts: Facts, live: Live) -> tuple[Scene, NetpluginError | None]:
        """The host, and why it has no plan although one is configured."""
        try:
            return self._view.scene(facts, live), None
        except NetpluginError as impossible:
            return Scene(facts, live), impossible

    def _planned(self, facts: Facts, live: Live) -> Scene:
        scene = self._view.scene(facts, live)
        if scene.plan is None:
            none = "policy.pin and policy.realtime place a VM by the host's plan, and it has none"
            raise Conflict(none, step=RENDER, fix=_SET)
        return scene


def _names_host(domain: Element, bindings: list[Binding], policy: DomainPolicy) -> bool:
    """Whether what the domain needs depends on the host: CPUs, nodes or hugepages.

    Raises: Conflict if its pins are of a placement, InvalidRequest.
    """
    refuse_stale_mark(domain)
    paths = ("numatune", "memoryBacking/hugepages", "devices/memory")
    named = any(domain.find(path) is not None for path in paths)
    needs = any(binding.domain_requirements.hugepages for binding in bindings)
    return named or needs or bool(nodes_asked(bindings, policy)) or any(True for _ in pinned(domain, RENDER))


def _complete(domain: Element, bindings: list[Binding], policy: DomainPolicy, scene: Scene | None) -> None:
    """Add NICs to a domain that is not placed. ``scene`` is None if nothing depends on the host, or nobody
    knows it."""
    ground = _ground(scene) if scene else None
    nodes = nodes_asked(bindings, policy)
    host = _host(scene)
    if ground is not None:
        refuse_pmd(domain, ground)
    refuse_elsewhere(domain, nodes, host)
    complete(domain, bindings)
    keep_memory_on(domain, nodes)
    refuse_faults(domain, host, None)
    refuse_without_room(domain, host, None)


def _active(port: Port) -> Binding:
    if port.state is not PortState.ACTIVE or port.binding is None:
        seen = _not_active(port)
        raise Conflict(f"{seen.found}, not active", step=RENDER, port_id=port.port_id, fix=seen.fix)
    return port.binding


def _not_active(port: Port) -> Finding:
    found, fix = f"port {port.port_id} is {port.state.value}", f"GET /v1/ports/{port.port_id}"
    fix += " and see its error"
    return fail("port", found, "all ports of the VM are active", fix)


def _other_functions(domain: Element, own_nics: tuple[DomainNic, ...]) -> set[str]:
    """The PCI functions in the domain that do not belong to the VM's ports."""
    parts = (part for nic in own_nics for part in fragments(nic.binding.interface_xml))
    return {function(nic) for nic in nics(domain)} - {function(part) for part in parts} - {""}


def _of_others(vfs: list[VfInfo], ports: list[Port]) -> tuple[VfInfo, ...]:
    """The VFs of other ports, and the free VFs that the configuration does not exclude."""
    mine = {port.port_id for port in ports}
    return tuple(vf for vf in vfs if vf.port_id not in mine and (vf.port_id or not vf.left_out))


def _unknown(name: str, error: NetpluginError, expected: str) -> Finding:
    """What cannot be checked, because the host does not say it."""
    return Finding(id=name, status="warn", found=error.detail, expected=expected, fix=error.fix)


def _no_plan(status: Literal["warn", "fail"], found: str, fix: str | None) -> Finding:
    expected = "a plan that says which CPUs are for VMs"
    return Finding(id="plan", status=status, found=found, expected=expected, fix=fix)


def _none_for_realtime(full: CapacityExhausted, polling: Cpus) -> CapacityExhausted:
    """The error if PMD threads use the CPUs that a real-time VM would get.

    A PMD thread that shares a CPU with a polling SCHED_FIFO vCPU never runs again (sched(7)).
    """
    if not polling:
        return full
    taken = f"CPUs {format_list(polling)} of those for VMs are of PMD threads"
    kept = "which a real-time vCPU would keep from running"
    fix = 'give PMD threads the cores that the plan has for them: PUT /v1/pmd {"count": N}, or '
    fix += f"with the plan's mask as cpus; or {full.fix}"
    return CapacityExhausted(f"{full.detail}; {taken}, {kept}", step=RENDER, fix=fix)


def _with_polling(
    place: Callable[[Held, Placement | None], Placement], scene: Scene, others: Held, before: Placement | None
) -> Placement:
    """Place a VM on the plan's VM cores although the PMD mask contains some of them.

    A finding reports these PMD threads. The first attempt avoids only the CPUs of running threads:
    the mask may have more, because a NUMA node without ports has no thread.
    """
    try:
        return place(replace(others, cpus=others.cpus | scene.running_pmds), before)
    except CapacityExhausted:
        return place(others, before)


def _ground(scene: Scene) -> HostCapacity | None:
    return ground_of(scene.plan, scene.facts) if scene.plan else None


def _host(scene: Scene | None) -> HostMemory:
    return memory_of_host(scene.facts, scene.live) if scene else UNKNOWN


def _live(scene: Scene, domain: Element, step: str) -> Cpus:
    """The CPUs that running domains are pinned to, placed by the agent or not.

    Raises: BackendUnavailable or HostError if libvirt does not report them.
    """
    if scene.plan is None:
        return frozenset()
    every = frozenset(cpu for share in scene.plan.partition.nodes for cpu in share.cpus)
    return pinned_by_others(running(scene.live, step), every, content(domain.find("name")))
