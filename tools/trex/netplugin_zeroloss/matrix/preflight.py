"""What can be wrong before a run, each with its fix, for ``matrix`` and ``doctor``."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from netplugin.api.client import Client
from netplugin.api.errors import NetpluginError
from netplugin.api.models import BackendInfo
from netplugin.api.models import Finding as Check
from netplugin.api.physical_models import PhysicalNetworkInfo
from netplugin.data_path import NoDataPath, data_paths, uplink_parts
from netplugin.tuning.facts import Facts
from netplugin.tuning.root import known
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.generators.contract import GeneratorInfo
from netplugin_zeroloss.journal import Cell
from netplugin_zeroloss.machines.contract import LocalMachine, SshMachine
from netplugin_zeroloss.machines.ssh import ssh_fix
from netplugin_zeroloss.matrix.bench import cells_of_generators, check_bursts
from netplugin_zeroloss.matrix.description import RunDescription
from netplugin_zeroloss.matrix.findings import Finding, of_error
from netplugin_zeroloss.matrix.nics import NicNeed, Nics, needs_of
from netplugin_zeroloss.matrix.pmd_cpus import planned_cpus, unfit
from netplugin_zeroloss.matrix.ports import gives_vfs, most_queues, networks_of, taken
from netplugin_zeroloss.values import GeneratorError, UnusableInput
from netplugin_zeroloss.vnf import contract as vnfs

_AGENT_FIX = "systemctl start netplugin-agent"

# -- The agent: itself, its backends, the ports of the run. ----------------------------------------


def about_agent(agent: Client, rebound: Collection[str] = ()) -> Iterator[Finding]:
    """Yield whether the agent answers and is ready; ``rebound``: backends whose NICs the run rebinds first,
    which need not be usable yet."""
    try:
        readiness = agent.ready()
    except NetpluginError as error:
        yield Finding("agent", error.detail, "; ".join(filter(None, (_AGENT_FIX, error.fix))))
        return
    named = [] if readiness.ready else readiness.reasons
    reasons = [reason for reason in named if reason.partition(":")[0] not in rebound]
    if not reasons:
        yield Finding("agent", f"{agent.url} answers and is ready")
    for reason in reasons:
        yield Finding("agent", f"it is not ready: {reason}", "netplugin host check, and the agent's log")


def about_backends(
    agent: Client, description: RunDescription, searched: Sequence[Cell], rebound: Collection[str]
) -> Iterator[Finding]:
    """Yield what the backends of the run lack; ``rebound``: those whose NICs the run rebinds first.

    Raises: NetpluginError.
    """
    infos = {info.name: info for info in agent.backends()}
    for name in dict.fromkeys(cell.backend for cell in searched):
        info = infos.get(name)
        if info is None:
            has = ", ".join(sorted(infos)) or "none"
            fix = f"add {name} to enabled_backends in netplugin.conf and start the agent again"
            yield Finding("agent", f"it has no backend {name!r}; it has {has}", fix)
            continue
        try:
            with_vfs = gives_vfs(name)
        except NoDataPath as problem:
            yield Finding("agent", str(problem), f"install the package of {name} here, or leave it out")
            continue
        yield from _about_networks(description, info)
        if name in rebound:
            continue
        if not info.usable:
            found = f"backend {name} is not usable there: {info.reason}"
            yield Finding("agent", found, info.fix or "netplugin backend list")
            continue
        queues = max(cell.queues for cell in searched if cell.backend == name)
        vfs = agent.list_vfs() if with_vfs else ()
        most = most_queues(info, networks_of(description.ends or (), name), vfs)
        if queues > most and name not in description.matrix.fewer_queues:
            fix = f"add it to matrix.fewer_queues, which takes {most}; or other queues"
            yield Finding("agent", f"backend {name} has {most} queues at most, not {queues}", fix)


def _about_networks(description: RunDescription, info: BackendInfo) -> Iterator[Finding]:
    for end in description.ends or ():
        kind = end.network_of(info.name).type
        if info.usable and kind not in info.features.networks:
            found = f"backend {info.name} has no {kind} networks (end {end.port_id})"
            fix = f"give the end another network for it: networks: {{{info.name}: ..}}"
            yield Finding("agent", found, fix)


def about_ports(agent: Client, description: RunDescription, vm_id: str) -> Iterator[Finding]:
    """Yield the ports of others that have the ids of the run's. Raises: NetpluginError."""
    mine = {end.port_id for end in description.ends or ()}
    for port in agent.list_ports():
        if port.port_id in mine and port.spec.vm_id != vm_id:
            yield Finding("agent", taken(port), f"netplugin port delete {port.port_id}, or another port_id")


def about_plan(agent: Client) -> Iterator[Finding]:
    """Yield whether the host has a CPU plan, by which the agent places a VM. Raises: NetpluginError."""
    plan = next((each for each in agent.checks() if each.id == "plan"), None)
    if plan is None:
        yield Finding(
            "plan",
            "the host has no CPU plan, by which the VM of each cell is placed",
            "set [host] pmd_cores in netplugin.conf (netplugin host plan --pmd-cores N shows the plan) and"
            " restart the agent; or vm.policy: {pin: false}, which leaves the VM unplaced",
        )
    elif plan.status == "ok":
        yield Finding("plan", f"the VM is placed by the host's plan: {plan.found}")
    else:
        yield of_check(plan)


def of_check(check: Check) -> Finding:
    """Return the finding for a check of the agent that failed."""
    return Finding("host", f"{check.found}; expected: {check.expected}", check.fix or "netplugin host check")


# -- Networks, NICs and PMD cores. -----------------------------------------------------------------


def needs(
    networks: Mapping[str, PhysicalNetworkInfo],
    description: RunDescription,
    backends: Iterable[BackendInfo],
    sys: Path,
) -> list[NicNeed]:
    """Return the NICs of these backends at the ends, each with the driver that it needs there."""
    found: dict[NicNeed, None] = {}
    for backend in backends:
        for name in networks_of(description.ends or (), backend.name):
            try:
                found |= dict.fromkeys(needs_of(networks[name], backend, sys) if name in networks else ())
            except NoDataPath:
                break  # about_backends reports it
    return list(found)


def about_networks(
    networks: Mapping[str, PhysicalNetworkInfo],
    description: RunDescription,
    backends: Iterable[BackendInfo],
    unfit: Sequence[NicNeed],
) -> Iterator[Finding]:
    """Yield what the physical networks of the ends lack for the backends, with what the agent finds of their
    devices; not the NICs with the wrong driver (``unfit``), which ``about_nics`` reports."""
    addresses = {need.address for need in unfit}
    for each in backends:
        backend = each.name
        try:
            parts = uplink_parts(backend, each.features.virtual_functions)
        except NoDataPath:
            continue  # about_backends reports it
        for name in networks_of(description.ends or (), backend):
            info = networks.get(name)
            if info is None or (parts and not any(getattr(info, part) for part in parts)):
                part = "/".join(sorted(parts))
                yield Finding(
                    "network",
                    f"physical network {name} has no {part} part for backend {backend}"
                    if info
                    else f"the agent has no physical network {name}",
                    "netplugin physical-network put, or [ovs], [linuxbridge] and [sriov] in netplugin.conf",
                )
                continue
            mine = {f"physical-network-{name}-{device}" for device in _devices(info, parts)}
            for wrong in info.findings:
                device = wrong.id.removeprefix(f"physical-network-{name}-")
                without_nic = ":" not in device and any(need.backend == backend for need in unfit)
                if wrong.id in mine and device not in addresses and not without_nic:
                    yield Finding("nic", wrong.found, wrong.fix or "netplugin physical-network show")


def _devices(info: PhysicalNetworkInfo, parts: Collection[str]) -> Iterator[str]:
    if "ovs" in parts and info.ovs:
        yield from (entry.partition(",")[0].lower() for entry in info.ovs.devices)
    if "sriov" in parts and info.sriov:
        yield from (entry.partition("#")[0].lower() for entry in info.sriov.devices)
    if "linuxbridge" in parts and info.linuxbridge and info.linuxbridge.interface:
        yield info.linuxbridge.interface


def about_nics(nics: Nics, needs: Sequence[NicNeed], rebind: bool) -> Iterator[Finding]:
    """Yield the NICs with the wrong driver, or what is in the way of binding them to the right one."""
    backends: dict[tuple[str, bool], list[str]] = {}
    for need in needs:
        if not need.fits(nics.driver(need.address)):
            backends.setdefault((need.address, need.dpdk), []).append(need.backend)
            if rebind:
                try:
                    yield from nics.obstacles(need)
                except NetpluginError as error:
                    yield of_error("nic", error, "run it as root")
    for (address, dpdk), names in backends.items() if not rebind else ():
        driver = nics.driver(address) or "no driver"
        fix = f"set-override {address} vfio-pci" if dpdk else f"unset-override {address}"
        yield Finding(
            "nic",
            f"{address} is bound to {driver}, and it must be bound to"
            f" {'vfio-pci' if dpdk else 'its kernel driver'} for {', '.join(names)}",
            f"driverctl {fix}; or rebind: true in the description, if other cells need {driver}",
        )


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


# -- Generator and VNF. ----------------------------------------------------------------------------


_GENERATORS = {
    "trex-stl": "start TRex there (t-rex-64 -i), or name trex_dir and trex_cfg; docs/zeroloss/generators.md",
    "trex-stf": "unpack TRex in trex_dir; docs/zeroloss/generators.md",
    "tcpreplay": "apt-get install tcpreplay; name interfaces that are there and up (ip link)",
    "exec": "run the command by hand, and give it a line: docs/zeroloss/generators.md",
    "sim": "netplugin-zeroloss evaluate --help lists the devices",
}


def about_generators(chosen: Iterable[tuple[generators.Description, Cell]]) -> Iterator[Finding]:
    """Start and stop each distinct generator, and yield why it cannot be used, or not for some cells."""
    for description, cells in cells_of_generators(chosen):
        try:
            with generators.make(description) as made:
                info = made.info
        except (UnusableInput, GeneratorError) as error:
            fix = _GENERATORS[description.type]
            if isinstance(description, generators.TrexStf) and isinstance(description.machine, SshMachine):
                yield from _about_ssh(description.machine)
                fix = f"{ssh_fix(description.machine, str(error))}; {fix}"
            yield Finding("generator", str(error), fix)
            continue
        yield from _about_bursts(info, cells)


def _about_bursts(info: GeneratorInfo, cells: Iterable[Cell]) -> Iterator[Finding]:
    refused = set()
    for cell in cells:
        try:
            check_bursts(info, cell)
        except UnusableInput as error:
            refused.add(str(error))
    for found in sorted(refused):
        fix = "take trex-stl without a profile, or exclude these cells: exclude: [{burst: N, frame: ..}]"
        yield Finding("generator", found, fix)


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
            yield from _about_ssh(vnf.machine, image)
        if isinstance(vnf.machine, LocalMachine):
            yield from about_program(vnf.binary, "dpdk-dev" if testpmd else "vpp", "vnf")
            if isinstance(vnf, vnfs.TestpmdDescription) and vnf.hugepages:
                yield from about_hugepages(vnf.needs_mb(ports), "testpmd", facts)


def about_program(program: str, package: str, part: str) -> Iterator[Finding]:
    """Yield whether a program of a Debian package is installed."""
    there = shutil.which(program)
    if there is None:
        found = f"{program} is not installed here, or not in PATH"
        yield Finding(part, found, f"apt-get install {package}")
    else:
        yield Finding(part, f"{program} is {there}")


def about_vpp_papi() -> Finding:
    if find_spec("vpp_papi") is None:
        return Finding("vpp-papi", "vpp-papi is not installed", "pip install './tools/trex[vpp]'")
    return Finding("vpp-papi", "vpp-papi is installed")


def _about_ssh(machine: SshMachine, image: Path | None = None) -> Iterator[Finding]:
    yield from about_program("ssh", "openssh-client", "ssh")
    for name in filter(None, (machine.key, machine.known_hosts)):
        path = Path(name)
        if path.parent == image and not path.parent.exists():
            continue  # that it is missing is a finding of the image
        try:
            private = name == machine.key and path.stat().st_mode & 0o077
            path.open("rb").close()
        except OSError as error:
            fix = f"ssh-keygen -t ed25519 -N '' -f {name}, and ssh-copy-id -i {name}.pub {machine.user}@VM"
            if name != machine.key:
                fix = f"ssh-keyscan -p {machine.port} {machine.host} >> {name}"
            yield Finding("ssh", f"{name}: {error.strerror}", fix)
            continue
        if private:
            yield Finding("ssh", f"others may read the key {name}, so ssh refuses it", f"chmod 600 {name}")


def about_hugepages(memory_mb: int, whose: str, facts: Facts, node: int | None = None) -> Iterator[Finding]:
    """Yield whether one node, or this one, has as many free hugepages of one size."""
    pools = known(facts.memory.pools, None)
    if pools is None or any(known(pool.free, None) is None for pool in pools):
        return  # not known here: a container
    mine = [pool for pool in pools if node in (None, pool.node)]
    most = max((known(pool.free, 0) * pool.size_kb // 1024 for pool in mine), default=0)
    where = "a node" if node is None else f"NUMA node {node}"
    if most < memory_mb:
        found = f"{whose} needs {memory_mb} MB of hugepages on {where}, and {most} MB are free"
        fix = "netplugin host plan --pmd-cores N --vm-memory-mb MB, then netplugin host apply --yes"
        yield Finding("hugepages", found, fix)
    else:
        yield Finding("hugepages", f"{most} MB are free on {where}")


def shares_memory(searched: Sequence[Cell]) -> bool:
    """Whether the VM of some cell shares its memory, for which the agent asks for hugepages."""
    for backend in {cell.backend for cell in searched}:
        with suppress(NoDataPath):  # about_backends reports it
            if any(path.shares_memory for path in data_paths(backend)):
                return True
    return False


def journalled(searched: Sequence[Cell], infos: Iterable[BackendInfo]) -> dict[str, Any]:
    """Return the facts about the backends of the cells, for the journal."""
    used = {cell.backend for cell in searched}
    return {info.name: dict(info.facts) for info in infos if info.name in used}
