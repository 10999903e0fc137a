"""The facts of a machine in a few lines, for people."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import format_list
from netplugin.tuning.facts import CpuFacts, Facts, HostNic, Live, MemoryFacts
from netplugin.tuning.root import Unknown, known


def summary(facts: Facts, live: Live) -> list[str]:
    """A line for each part of the machine; what cannot be read is left out and counted."""
    kernel = facts.kernel
    isolated = known(facts.cpus.isolated, None)
    lines = [
        f"CPUs: {', '.join(_cpus(facts.cpus))}",
        f"memory: {', '.join(_memory(facts.memory))}",
        f"kernel: {known(kernel.release, 'unknown')}{', real-time' if known(kernel.realtime, False) else ''}"
        f", {f'CPUs {format_list(isolated)} isolated' if isolated else 'no CPU isolated'}"
        f", IOMMU {'on' if known(facts.iommu.groups, 0) else 'off'}",
        *(f"NIC: {_nic(nic)}" for nic in known(facts.network.nics, ())),
        f"OVS: {_ovs(live)}",
        f"VMs: {_silent(live.domains) if isinstance(live.domains, Unknown) else len(live.domains)}",
    ]
    unknown = len(facts.unknown())
    return [*lines, f"{unknown} facts cannot be read: see those below that are unknown"] if unknown else lines


def _cpus(cpus: CpuFacts) -> Iterator[str]:
    yield f"{len(known(cpus.online, frozenset()))} online"
    cores = known(cpus.cores, ())
    yield f"{len(cores)} cores, NUMA nodes: {len({core.node for core in cores})}"
    yield f"SMT {'on' if known(cpus.smt, None) else 'off'}"
    yield known(cpus.model, "of an unknown model")


def _memory(memory: MemoryFacts) -> Iterator[str]:
    nodes = known(memory.nodes, ())
    yield f"{sum(node.total_kb for node in nodes) / 1024**2:.1f} GiB"
    pools = [pool for pool in known(memory.pools, ()) if known(pool.total, 0)]
    for pool in pools:
        free, total = known(pool.free, "?"), known(pool.total, "?")
        yield f"{free} of {total} hugepages of {pool.size_kb} kB free on node {pool.node}"
    if not pools:
        yield "no hugepages"


def _nic(nic: HostNic) -> str:
    name = f"{'/'.join(nic.interfaces)} " if nic.interfaces else ""
    node = known(nic.node, None)
    words = [nic.driver or "no driver", "no NUMA node" if node is None else f"node {node}"]
    if total := known(nic.total_vfs, None):
        words.append(f"{known(nic.vfs, None) or 0} of {total} VFs")
    return f"{name}{nic.address} ({', '.join(words)})"


def _silent(daemon: Unknown) -> str:
    return f"{'not running' if daemon.missing else 'no answer'} ({daemon.reason})"


def _ovs(live: Live) -> str:
    ovs = live.ovs
    if isinstance(ovs, Unknown):
        return _silent(ovs)
    dpdk = f"DPDK {ovs.dpdk_version or 'of unknown version'}" if ovs.dpdk_initialized else "no DPDK"
    return f"{ovs.version or 'of unknown version'}, {dpdk}, {len(ovs.pmds)} PMD threads"
