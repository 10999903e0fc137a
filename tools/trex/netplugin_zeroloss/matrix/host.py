"""What a run reads of its hypervisor: the agent's backends and networks, CPUs and NICs of each cell."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path

from netplugin.api.client import Client
from netplugin.api.errors import Conflict, NetpluginError
from netplugin.api.models import BackendInfo
from netplugin.api.physical_models import PhysicalNetworkInfo
from netplugin.data_path import NoDataPath, data_paths
from netplugin.host.cpus import format_list, parse_list
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.placing.pmd_cores import choose_cores, host_of
from netplugin.tuning.planning.plan import TuningPlan, make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Root, known
from netplugin_zeroloss.journal import NO_BACKEND, Cell
from netplugin_zeroloss.matrix.description import NumaPlacement, RunDescription, pmd_count
from netplugin_zeroloss.matrix.nics import NicNeed, Nics, needs_of
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vnf.contract import VnfCores


def client(description: RunDescription) -> Client:
    """Create the agent's client from the description, or else the environment. Raises: UnusableInput."""
    assert description.agent is not None
    named = {"url": "URL", "token_file": "TOKEN_FILE", "ca": "CA", "cert": "CERT", "key": "KEY"}
    given = {f"NETPLUGIN_{name}": getattr(description.agent, field) for field, name in named.items()}
    settings = {name: str(value) for name, value in given.items() if value is not None}
    try:
        return Client.from_environment({**os.environ, **settings}, description.timeouts.agent)
    except NetpluginError as error:
        raise UnusableInput("agent", str(error)) from error


class Hypervisor:
    """The host of a run, its NICs and its agent. The methods change nothing, and raise NetpluginError."""

    def __init__(
        self, agent: Client, description: RunDescription, vm_id: str, nics: Nics, root: Path
    ) -> None:
        """``root``: below it are /sys and /proc."""
        self.agent, self.description, self.vm_id = agent, description, vm_id
        self.nics, self.root = nics, root

    @cached_property
    def facts(self) -> Facts:
        return read_facts(Root(self.root))

    @property
    def networks(self) -> dict[str, PhysicalNetworkInfo]:
        """The physical networks by name."""
        return {network.name: network for network in self.agent.list_physical_networks()}

    def infos(self, backends: Iterable[str]) -> list[BackendInfo]:
        """Return these backends, as far as the agent has them and they are installed here."""
        infos = {info.name: info for info in self.agent.backends() if _is_installed(info.name)}
        return [infos[name] for name in dict.fromkeys(backends) if name in infos]

    def networks_of(self, backend: str) -> list[str]:
        """Return the physical networks of the ends with this backend, each once."""
        ends = self.description.ends or ()
        found = (end.network_of(backend).physical_network for end in ends)
        return list(dict.fromkeys(name for name in found if name is not None))

    def needs(self, backends: Iterable[str]) -> list[NicNeed]:
        """Return the NICs of these backends at the ends, each with the driver that it needs there."""
        networks, found = self.networks, dict[NicNeed, None]()
        for info in self.infos(backends):
            there = [networks[name] for name in self.networks_of(info.name) if name in networks]
            for network in there:
                found |= dict.fromkeys(needs_of(network, info, self.nics.sys))
        return list(found)

    def unfit(self, backends: Iterable[str]) -> list[NicNeed]:
        """Return those of ``needs`` that have the wrong driver."""
        return [need for need in self.needs(backends) if not need.fits(self.nics.driver(need.address))]

    def rebound(self, backends: Iterable[str]) -> set[str]:
        """Return the backends whose NICs the run rebinds first, which need not be usable yet."""
        return {need.backend for need in self.unfit(backends)} if self.description.rebind else set()

    def most_queues(self, info: BackendInfo) -> int:
        """Return the most queues that a port of a backend can have on each network of the ends.

        A backend reports the queues of its best NIC; where VMs get VFs, those of the network decide.
        """
        gives_vfs = any(path.vm_side == "vfio" for path in data_paths(info.name))
        vfs = self.agent.list_vfs() if gives_vfs else ()
        most = info.features.max_queues
        for network in self.networks_of(info.name):
            there = [vf for vf in vfs if vf.physical_network == network and not vf.left_out]
            most = min(most, max((vf.max_queues for vf in there if vf.max_queues), default=most))
        return most

    # -- CPUs and NUMA nodes ---------------------------------------------------------------------

    def pmd_cpus(self, cell: Cell) -> str | None:
        """Return the CPUs for the PMD cores of a cell, as they are named or planned; None: it has none."""
        for entry in self.description.matrix.pmd_cores if cell.pmd_cores is not None else ():
            if pmd_count(entry) == cell.pmd_cores:
                return entry if isinstance(entry, str) else planned_cpus(entry, self.facts, self._nics(cell))
        return None

    def node(self, cell: Cell) -> int | None:
        """Return the NUMA node for the VM or VNF of a cell; None: no placement is requested."""
        return node_of(NumaPlacement(cell.numa), self.facts, self._nics(cell)) if cell.numa else None

    def cores_on(self, node: int, cell: Cell) -> VnfCores:
        """Return the CPUs of a node for the VNF of a cell."""
        return cores_on(node, self.workers, self.facts, self._nics(cell), self.most_pmd_cores)

    def _nics(self, cell: Cell) -> list[str]:
        """Return the NICs of a cell; a control has those of all backends."""
        backends = self.description.matrix.backends if cell.backend == NO_BACKEND else (cell.backend,)
        return [need.address for need in self.needs(backends)]

    @property
    def workers(self) -> int:
        """How many CPUs of this host handle packets for the VNF."""
        return len(self.description.vnf_cores.vnf_cores().workers) or 1

    @property
    def most_pmd_cores(self) -> int:
        """The most PMD cores of a cell: the VNF's CPUs are the same in all of them."""
        return max(map(pmd_count, self.description.matrix.pmd_cores))


def _is_installed(backend: str) -> bool:
    try:
        return bool(data_paths(backend))
    except NoDataPath:
        return False  # a check reports it


# -- The CPUs of a cell (pure): of its PMD threads, and of its VNF on the NUMA node of the NICs or not. ---


def _plan(count: int, facts: Facts, nics: Collection[str]) -> TuningPlan:
    """Return the plan for so many PMD cores near these NICs. Raises: NetpluginError."""
    intent = {"pmd_cores": count, "nics": tuple(dict.fromkeys(nics))}
    return make_plan(facts, HostIntent.model_validate(intent))


def planned_cpus(count: int, facts: Facts, nics: Collection[str]) -> str:
    """Return one CPU on each of ``count`` whole cores, on the NUMA nodes of the NICs (PCI addresses).

    They are the PMD cores of the plan for so many (``netplugin host plan --pmd-cores``); on a host that
    has no plan, because it has a single core, those that the agent takes. Without NICs: the fastest.

    Raises: NetpluginError if the nodes have fewer cores, or the cores of the host are unknown.
    """
    there = {nic.address for nic in known(facts.network.nics, ())}
    try:
        plan = _plan(count, facts, [nic for nic in nics if nic in there])
    except NetpluginError:
        plan = None
    host = host_of(Scene(facts, plan=plan), {}, ())
    return format_list(cpu for core in choose_cores(count, False, host) for cpu in parse_list(core.cpus))


def unfit(cpus: str, facts: Facts) -> str | None:
    """Return why these CPUs cannot run one PMD thread on each of as many cores; None if they can."""
    named = frozenset(parse_list(cpus))
    online = known(facts.cpus.online, None)
    if online is not None and (offline := named - online):
        return f"CPU {format_list(offline)} of pmd_cores {cpus!r} is not on line"
    for core in known(facts.cpus.cores, ()):
        if len(both := core.cpus & named) > 1:
            return f"CPUs {format_list(both)} of pmd_cores {cpus!r} are threads of one core"
    return None


def node_of(placement: NumaPlacement, facts: Facts, nics: Collection[str]) -> int:
    """Return the node of the NICs (PCI addresses), or the nearest other node with CPUs.

    Raises: Conflict if there is none, or the NICs are not on one node.
    """
    found = {nic.address: known(nic.node, None) for nic in known(facts.network.nics, ())}
    homes = {nic: found.get(nic) for nic in sorted(nics)}
    home = next(iter(homes.values()), None)
    if home is None or len(set(homes.values())) != 1:
        of_each = (f"{n} on {'an unknown node' if at is None else f'node {at}'}" for n, at in homes.items())
        where = ", ".join(of_each) or "they are no PCI devices"
        fix = "take NICs of one node for all ends, or leave matrix.numa out"
        raise Conflict(f"the NICs of the ends are not on one known NUMA node: {where}", step="numa", fix=fix)
    match placement:
        case NumaPlacement.LOCAL:
            return home
        case NumaPlacement.REMOTE:
            others = {core.node for core in known(facts.cpus.cores, ())} - {home}
    if not others:
        why = f"this host has one NUMA node with CPUs, {home}: nothing on it is remote to the NICs"
        raise Conflict(why, step="numa", fix="leave remote out of matrix.numa")
    away = known(facts.cpus.distances, {}).get(home, {})
    return min(others, key=lambda node: (away.get(node, 0), node))


def cores_on(node: int, workers: int, facts: Facts, nics: Collection[str], pmd_cores: int) -> VnfCores:
    """Return CPUs for a VNF on this node: cores for VMs of the plan for so many PMD cores, one CPU of each.

    Raises: NetpluginError if the plan has too few there.
    """
    nodes = _plan(pmd_cores, facts, nics).partition.nodes
    [share] = [each for each in nodes if each.node == node]
    if len(share.vm) < workers:
        has = f"NUMA node {node} has {len(share.vm)} cores for the VNF next to {pmd_cores} PMD cores"
        fix = "name fewer vnf_cores.workers, or fewer matrix.pmd_cores"
        raise Conflict(f"{has}, not {workers}", step="numa", fix=fix)
    main = (*share.emulator, *share.housekeeping)[0].first  # a plan leaves one on each node
    return VnfCores(main, tuple(core.first for core in share.vm[:workers]))
