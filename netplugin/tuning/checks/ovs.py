"""Check a running OVS-DPDK: isolated, planned and enough PMD threads; NUMA node and load of queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.api.pmd_models import PmdState
from netplugin.host.cpus import format_list, from_mask
from netplugin.pmd.findings import findings
from netplugin.pmd.settings import read_settings
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Cpus
from netplugin.tuning.live import OvsLive
from netplugin.tuning.root import Unknown, known

# -- Check a running OVS-DPDK: PMD threads on isolated and planned CPUs, and enough for the queues.


def ovs(scene: Scene) -> Iterator[Finding]:
    """OVS findings; none if OVS was not queried or has no DPDK."""
    live = scene.live.ovs
    if isinstance(live, Unknown) or not live.dpdk_initialized:
        return
    yield from _lcores(live)
    try:
        mask = frozenset(from_mask(live.other_config.get("pmd-cpu-mask", "")))
    except ValueError:
        yield Finding(
            id="pmd-mask",
            status="fail",
            found=f"pmd-cpu-mask is {live.other_config['pmd-cpu-mask']!r}",
            expected="a hexadecimal mask of CPUs",
            fix="netplugin host plan has one",
        )
        return
    if not mask:
        yield Finding(
            id="pmd-mask",
            status="warn",
            found="pmd-cpu-mask is not set: one PMD thread a node, where OVS likes",
            expected="whole isolated cores of the NIC's node",
            fix="netplugin host plan has a mask",
        )
        return
    yield from _mask(scene, mask)
    yield from _queues(live, mask)


def _lcores(live: OvsLive) -> Iterator[Finding]:
    """With the mask, all non-PMD threads of OVS share one CPU (ovs-vswitchd.conf.db(5), dpdk-lcore-mask)."""
    mask = live.other_config.get("dpdk-lcore-mask")
    if mask:
        yield Finding(
            id="lcore-mask",
            status="warn",
            found=f"dpdk-lcore-mask is {mask}: it pins OVS's main, handler "
            "and revalidator threads to one CPU",
            expected="no dpdk-lcore-mask: OVS uses its own CPUs",
            fix="ovs-vsctl remove Open_vSwitch . other_config dpdk-lcore-mask, then restart OVS",
        )


def _mask(scene: Scene, mask: Cpus) -> Iterator[Finding]:
    facts = scene.facts.cpus
    isolated = known(facts.isolated, None)
    bare = mask - (isolated or frozenset())
    if isolated is not None:
        fix = f"boot with these in isolcpus: {format_list(mask)}"
        yield Finding(
            id="pmd-isolated",
            status="warn" if bare else "ok",
            found=f"PMD threads on CPUs {format_list(mask)}, isolated are {format_list(isolated) or 'none'}",
            expected="all CPUs of pmd-cpu-mask isolated",
            fix=fix if bare else None,
        )
    gone = mask - known(facts.online, mask)
    if gone:
        yield Finding(
            id="pmd-mask",
            status="fail",
            found=f"CPUs {format_list(gone)} of pmd-cpu-mask are not on line",
            expected="CPUs that are on line",
            fix="netplugin host plan has a mask",
        )
    if scene.plan and scene.plan.partition.pmd:
        away = mask - scene.plan.partition.pmd
        if away:
            yield Finding(
                id="pmd-cores",
                status="warn",
                found=f"PMD threads on CPUs {format_list(mask)}",
                expected=f"within the plan's PMD cores {format_list(scene.plan.partition.pmd)}",
                fix="ovs-vsctl set Open_vSwitch . other_config:pmd-cpu-mask=... as planned",
            )


def _queues(live: OvsLive, mask: Cpus) -> Iterator[Finding]:
    """Two queues of one port on the same PMD thread add a poll and no throughput."""
    queues = Counter(queue.port for pmd in live.pmds for queue in pmd.queues if queue.enabled)
    for port, count in sorted(queues.items()):
        if count > len(mask):
            yield Finding(
                id="queues",
                status="warn",
                found=f"{port} has {count} receive queues for {len(mask)} PMD threads",
                expected="no more queues than PMD threads",
                fix=f"ovs-vsctl set Interface {port} options:n_rxq={len(mask)}, or fewer queues in the VM",
            )


# -- Check receive queues on PMD threads: NUMA node, load balance, unpolled queues. ---------------


def pmd(scene: Scene) -> Iterator[Finding]:
    """PMD findings; none if OVS was not queried or has no PMD threads."""
    live = scene.live.ovs
    if not isinstance(live, Unknown):
        settings = read_settings(live.other_config)
        yield from findings(PmdState(cpus="", cores=live.pmds, settings=settings, unpolled=live.unpolled))
