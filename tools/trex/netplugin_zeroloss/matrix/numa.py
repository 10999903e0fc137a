"""Where the VNF of a cell is on the host (pure): on the NUMA node of the NICs, or on another one."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from netplugin.api.errors import Conflict, NetpluginError
from netplugin.host.cpus import format_list
from netplugin.tuning.facts import Cpus, Facts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.partition import NodeShare
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.root import known
from netplugin_zeroloss.matrix.axes import NumaPlacement
from netplugin_zeroloss.matrix.findings import Finding
from netplugin_zeroloss.vnf.contract import VnfCores

_STEP = "numa"


def node_of(placement: NumaPlacement, facts: Facts, nics: Collection[str]) -> int:
    """Return the node of the NICs (PCI addresses), or the nearest other node with CPUs.

    Raises: Conflict if there is none, or the NICs are not on one node.
    """
    found = {nic.address: known(nic.node, None) for nic in known(facts.network.nics, ())}
    homes = {found.get(nic) for nic in nics}
    if len(homes) != 1 or None in homes:
        where = ", ".join(f"{nic} on {_node(found.get(nic))}" for nic in sorted(nics))
        raise Conflict(
            f"the NICs of the ends are not on one known NUMA node: {where or 'they are no PCI devices'}",
            step=_STEP,
            fix="take NICs of one node for all ends, or leave matrix.numa out",
        )
    [home] = homes
    assert home is not None
    match placement:
        case NumaPlacement.LOCAL:
            return home
        case NumaPlacement.REMOTE:
            return _other_than(home, facts)


def _other_than(home: int, facts: Facts) -> int:
    others = {core.node for core in known(facts.cpus.cores, ())} - {home}
    if not others:
        raise Conflict(
            f"this host has one NUMA node with CPUs, {home}: nothing on it is remote to the NICs",
            step=_STEP,
            fix="leave remote out of matrix.numa",
        )
    away = known(facts.cpus.distances, {}).get(home, {})
    return min(others, key=lambda node: (away.get(node, 0), node))


def cores_on(node: int, workers: int, facts: Facts, nics: Collection[str], pmd_cores: int) -> VnfCores:
    """Return CPUs for a VNF on this node: cores for VMs of the plan for so many PMD cores, one CPU of each.

    Raises: NetpluginError if the plan has too few there.
    """
    share = _share(node, facts, nics, pmd_cores)
    if len(share.vm) < workers:
        raise Conflict(
            f"NUMA node {node} has {len(share.vm)} cores for the VNF next to {pmd_cores} PMD cores,"
            f" not {workers}",
            step=_STEP,
            fix="name fewer vnf_cores.workers, or fewer matrix.pmd_cores",
        )
    main = (*share.emulator, *share.housekeeping)[0].first  # a plan leaves one on each node
    return VnfCores(main, tuple(core.first for core in share.vm[:workers]))


def findings(
    placement: NumaPlacement, facts: Facts, nics: Collection[str], workers: int, pmd_cores: int
) -> Iterator[Finding]:
    """Yield the node of a placement and its CPUs for the VNF, or why it cannot be had."""
    try:
        node = node_of(placement, facts, nics)
        cores = cores_on(node, workers, facts, nics, pmd_cores)
    except NetpluginError as error:
        yield Finding("numa", f"{placement}: {error.detail}", error.fix or "netplugin host plan")
        return
    cpus: Cpus = frozenset(cores.workers)
    yield Finding("numa", f"{placement} is NUMA node {node}; CPUs {format_list(cpus)} there are for the VNF")


def _share(node: int, facts: Facts, nics: Collection[str], pmd_cores: int) -> NodeShare:
    intent = HostIntent.model_validate({"pmd_cores": pmd_cores, "nics": tuple(dict.fromkeys(nics))})
    [share] = [each for each in make_plan(facts, intent).partition.nodes if each.node == node]
    return share


def _node(node: int | None) -> str:
    return "an unknown node" if node is None else f"node {node}"
