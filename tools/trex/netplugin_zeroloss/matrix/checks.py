"""What can be wrong before a run, each with its fix: one list of checks, for ``matrix`` and ``doctor``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from netplugin.api.client import Client
from netplugin.api.errors import NetpluginError
from netplugin.api.models import Finding as Check
from netplugin.data_path import NoDataPath, data_paths, uplink_parts
from netplugin.host.cpus import format_list
from netplugin.tuning.facts import Facts
from netplugin.tuning.root import known
from netplugin_zeroloss.journal import Cell
from netplugin_zeroloss.machines import LocalMachine, MachineError, Ssh, SshMachine
from netplugin_zeroloss.matrix.description import pmd_count
from netplugin_zeroloss.matrix.findings import Finding, about_program, about_ssh, of_error
from netplugin_zeroloss.matrix.host import Hypervisor, cores_on, node_of, planned_cpus, unfit
from netplugin_zeroloss.matrix.nics import devices_of
from netplugin_zeroloss.matrix.ports import taken
from netplugin_zeroloss.vnf import contract as vnfs
from netplugin_zeroloss.vnf.guest import lacks, read_guest, where

#: Seconds to log in once the VM answers.
_LOG_IN_S = 10.0
_AGENT_FIX = "systemctl start netplugin-agent"

# -- The agent and what it has: backends, ports, networks and NICs. --------------------------------


def _backends(searched: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.backend for cell in searched))


def about_agent(agent: Client, rebound: Collection[str] = ()) -> Iterator[Finding]:
    """Yield whether the agent answers and is ready; ``rebound``: backends that it need not have yet."""
    try:
        readiness = agent.ready()
    except NetpluginError as error:
        yield Finding("agent", error.detail, "; ".join(filter(None, (_AGENT_FIX, error.fix))))
        return
    named = [] if readiness.ready else readiness.reasons
    reasons = [reason for reason in named if reason.partition(":")[0] not in rebound]
    for reason in reasons:
        yield Finding("agent", f"it is not ready: {reason}", "netplugin host check, and the agent's log")
    if not reasons:
        yield Finding("agent", f"{agent.url} answers and is ready")


def about_backends(host: Hypervisor, searched: Sequence[Cell]) -> Iterator[Finding]:
    """Yield the backends that are missing or not usable, or have too few queues or no such network."""
    description, infos = host.description, {info.name: info for info in host.agent.backends()}
    rebound = host.rebound(_backends(searched))
    for name in _backends(searched):
        info = infos.get(name)
        if info is None:
            has = ", ".join(sorted(infos)) or "none"
            yield Finding("agent", f"it has no backend {name!r}; it has {has}", enable(name))
            continue
        try:
            data_paths(name)
        except NoDataPath as problem:
            yield Finding("agent", str(problem), f"install the package of {name} here, or leave it out")
            continue
        for end in description.ends or ():
            kind = end.network_of(name).type
            if info.usable and kind not in info.features.networks:
                fix = f"give the end another network for it: networks: {{{name}: ..}}"
                yield Finding("agent", f"backend {name} has no {kind} networks (end {end.port_id})", fix)
        if name in rebound:
            continue
        if not info.usable:
            found = f"backend {name} is not usable there: {info.reason}"
            yield Finding("agent", found, info.fix or "netplugin backend list")
            continue
        queues = max(cell.queues for cell in searched if cell.backend == name)
        if queues > (most := host.most_queues(info)) and name not in description.matrix.fewer_queues:
            fix = f"add it to matrix.fewer_queues, which takes {most}; or other queues"
            yield Finding("agent", f"backend {name} has {most} queues at most, not {queues}", fix)


def enable(backend: str) -> str:
    return f"add {backend} to enabled_backends in netplugin.conf and start the agent again"


def about_ports(host: Hypervisor, searched: Sequence[Cell]) -> Iterator[Finding]:
    """Yield the ports of others that have the ids of the run's."""
    mine = {end.port_id for end in host.description.ends or ()}
    for port in host.agent.list_ports():
        if port.port_id in mine and port.spec.vm_id != host.vm_id:
            yield Finding("agent", taken(port), f"netplugin port delete {port.port_id}, or another port_id")


def about_placement(host: Hypervisor, searched: Sequence[Cell]) -> Iterator[Finding]:
    """Yield whether the host has a CPU plan, where the VM of a cell is placed by it."""
    vm = host.description.vm
    placement = vm.placement if vm is not None else None
    if placement is not None and (placement.pin or placement.realtime or host.description.matrix.numa):
        yield about_plan(host.agent.checks())


def about_plan(checks: Iterable[Check]) -> Finding:
    """Return whether the host has a CPU plan, by which the agent places a VM."""
    plan = next((each for each in checks if each.id == "plan"), None)
    if plan is None:
        return Finding(
            "plan",
            "the host has no CPU plan, by which the VM of each cell is placed",
            "set [host] pmd_cores in netplugin.conf (netplugin host plan --pmd-cores N shows the plan) and"
            " restart the agent; or vm.policy: {pin: false}, which leaves the VM unplaced",
        )
    if plan.status == "ok":
        return Finding("plan", f"the VM is placed by the host's plan: {plan.found}")
    return of_check(plan)


def of_check(check: Check) -> Finding:
    """Return the finding for a check of the agent that failed."""
    return Finding("host", f"{check.found}; expected: {check.expected}", check.fix or "netplugin host check")


def about_networks(host: Hypervisor, searched: Sequence[Cell]) -> Iterator[Finding]:
    """Yield what the physical networks of the ends lack for the backends, with what the agent finds of their
    devices; not the NICs with the wrong driver, which ``about_nics`` reports."""
    unfit, networks = host.unfit(_backends(searched)), host.networks
    for info in host.infos(_backends(searched)):
        parts = uplink_parts(info.name, info.features.virtual_functions)
        for name in host.networks_of(info.name):
            network = networks.get(name)
            if network is None or (parts and not any(getattr(network, part) for part in parts)):
                found = f"the agent has no physical network {name}"
                if network is not None:
                    part = "/".join(sorted(parts))
                    found = f"physical network {name} has no {part} part for backend {info.name}"
                fix = "netplugin physical-network put, or [ovs], [linuxbridge] and [sriov] in netplugin.conf"
                yield Finding("network", found, fix)
                continue
            mine = set(devices_of(network, parts))
            for wrong in network.findings:
                device = wrong.id.removeprefix(f"physical-network-{name}-")
                without_nic = ":" not in device and any(need.backend == info.name for need in unfit)
                if device in mine - {need.address for need in unfit} and not without_nic:
                    yield Finding("nic", wrong.found, wrong.fix or "netplugin physical-network show")


def about_nics(host: Hypervisor, searched: Sequence[Cell]) -> Iterator[Finding]:
    """Yield the NICs with the wrong driver, or what is in the way of binding them to the right one."""
    backends: dict[tuple[str, bool], list[str]] = {}
    for need in host.unfit(_backends(searched)):
        backends.setdefault((need.address, need.dpdk), []).append(need.backend)
        if host.description.rebind:
            try:
                yield from host.nics.obstacles(need)
            except NetpluginError as error:
                yield of_error("nic", error, "run it as root")
    for (address, dpdk), names in backends.items() if not host.description.rebind else ():
        driver = host.nics.driver(address) or "no driver"
        needed = "vfio-pci" if dpdk else "its kernel driver"
        found = f"{address} is bound to {driver}, and it must be bound to {needed} for {', '.join(names)}"
        fix = f"set-override {address} vfio-pci" if dpdk else f"unset-override {address}"
        other = f"or rebind: true in the description, if other cells need {driver}"
        yield Finding("nic", found, f"driverctl {fix}; {other}")


# -- The CPUs and the memory of the host. ----------------------------------------------------------


def about_cpus(host: Hypervisor, searched: Sequence[Cell]) -> Iterator[Finding]:
    """Yield the CPUs of each number of PMD cores, and those of the VNF on each side of the NICs."""
    axes = host.description.matrix
    workers = 1 if host.description.vm is not None else host.workers
    for backend in _backends(searched):
        counts = {cell.pmd_cores for cell in searched if cell.backend == backend}
        entries = [entry for entry in axes.pmd_cores if pmd_count(entry) in counts]
        mine = [need.address for need in host.needs([backend])]
        yield from about_pmd_cores(entries, host.facts, mine)
        for placement in axes.numa:
            try:
                node = node_of(placement, host.facts, mine)
                chosen = cores_on(node, workers, host.facts, mine, host.most_pmd_cores).workers
            except NetpluginError as error:
                yield Finding("numa", f"{placement}: {error.detail}", error.fix or "netplugin host plan")
                continue
            there = f"CPUs {format_list(chosen)} there are for the VNF"
            yield Finding("numa", f"{placement} is NUMA node {node}; {there}")


def about_pmd_cores(entries: Iterable[int | str], facts: Facts, nics: Collection[str]) -> Iterator[Finding]:
    """Yield the CPUs of each number of PMD cores, or why the host cannot have so many."""
    for entry in entries:
        if isinstance(entry, str):
            if why := unfit(entry, facts):
                yield Finding("pmd", why, "name one CPU on each core: netplugin host plan shows them")
            continue
        try:
            yield Finding("pmd", f"{entry} PMD cores are CPUs {planned_cpus(entry, facts, nics)}")
        except NetpluginError as error:
            fix = f"take {entry} out of matrix.pmd_cores, or more cores on the NUMA nodes of the NICs"
            yield Finding("pmd", f"{entry} PMD cores cannot be had: {error.detail}", fix)


#: What a run asks of the agent and the host, in the order of the report.
OF_AGENT: tuple[Callable[[Hypervisor, Sequence[Cell]], Iterator[Finding]], ...] = (
    *(about_backends, about_ports, about_placement, about_networks, about_nics, about_cpus),
)


def about_memory(host: Hypervisor, searched: Sequence[Cell], memory_mb: int) -> Iterator[Finding]:
    """Yield whether the nodes of the VMs have hugepages for them, where a cell's VM shares its memory."""
    infos = host.infos(_backends(searched))
    if not any(path.shares_memory for info in infos for path in data_paths(info.name)):
        return
    try:
        nodes: list[int | None] = list(dict.fromkeys(host.node(cell) for cell in searched))
    except NetpluginError:
        nodes = [None]  # a finding of its own
    for node in nodes:
        yield from about_hugepages(memory_mb, "the VM", host.facts, node)


def about_hugepages(memory_mb: int, whose: str, facts: Facts, node: int | None = None) -> Iterator[Finding]:
    """Yield whether one node, or this one, has as many free hugepages of one size."""
    pools = known(facts.memory.pools, None)
    if pools is None or any(known(pool.free, None) is None for pool in pools):
        return  # not known here: a container
    mine = [pool for pool in pools if node in (None, pool.node)]
    most = max((known(pool.free, 0) * pool.size_kb // 1024 for pool in mine), default=0)
    where = "a node" if node is None else f"NUMA node {node}"
    if most >= memory_mb:
        yield Finding("hugepages", f"{most} MB are free on {where}")
        return
    found = f"{whose} needs {memory_mb} MB of hugepages on {where}, and {most} MB are free"
    fix = "netplugin host plan --pmd-cores N --vm-memory-mb MB, then netplugin host apply --yes"
    yield Finding("hugepages", found, fix)


# -- The VNF. --------------------------------------------------------------------------------------


def about_vnfs(
    chosen: Iterable[vnfs.Description], facts: Facts, image: Path | None, ports: int
) -> Iterator[Finding]:
    """Yield what VNFs lack on this host: programs, Python packages, hugepages, the SSH key.

    ``image``: image of the VM, which has keys too, if it is there. ``ports``: of each VNF.
    """
    for vnf in chosen:
        if not isinstance(vnf, vnfs.PlacedDescription):
            continue
        testpmd = isinstance(vnf, vnfs.TestpmdDescription)
        if not testpmd:
            yield about_vpp_papi()
        if isinstance(vnf.machine, SshMachine):
            yield from about_ssh(vnf.machine, image)
        if isinstance(vnf.machine, LocalMachine):
            yield about_program(vnf.binary, "dpdk-dev" if testpmd else "vpp", "vnf")
            if isinstance(vnf, vnfs.TestpmdDescription) and vnf.hugepages:
                yield from about_hugepages(vnf.needs_mb(ports), "testpmd", facts)


def about_vpp_papi() -> Finding:
    if find_spec("vpp_papi") is None:
        return Finding("vpp-papi", "vpp-papi is not installed", "pip install './tools/trex[vpp]'")
    return Finding("vpp-papi", "vpp-papi is installed")


def about_guest(vnf: vnfs.PlacedDescription, machine: SshMachine) -> Iterator[Finding]:
    """Yield what a VNF lacks in its running VM."""
    try:
        there = Ssh(machine, time.monotonic() + _LOG_IN_S)
    except MachineError as error:
        found = f"{machine.user}@{machine.host} cannot be used: {error}"
        yield Finding("ssh", found, machine.fix(str(error)))
        return
    try:
        facts = read_guest(there, vnf)
    except MachineError as error:
        yield Finding("ssh", str(error), f"try it by hand: {where(machine)} true")
        return
    finally:
        there.close()
    yield from (Finding("guest", *lack) for lack in lacks(vnf, facts))
