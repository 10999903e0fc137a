"""Plan the settings of OVS-DPDK (pure). Source: OVS Documentation/intro/install/dpdk.rst and vswitch.xml."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import from_mask, to_mask
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.live import Live
from netplugin.tuning.planning import sources
from netplugin.tuning.planning.hugepages import NodePages, is_per_port
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.root import Fact, Unknown
from netplugin.tuning.steps import Effect, Group, OtherConfig, Step

LCORES = "dpdk-lcore-mask"
_TSO, _PER_PORT = "userspace-tso-enable", "per-port-memory"


def ovs_settings(
    live: Live, partition: Partition, pages: tuple[NodePages, ...], intent: HostIntent
) -> Iterator[Step]:
    """Steps for ``other_config``; none for a host without PMD cores."""
    if not intent.pmd_cores:
        return
    sizes = {plan.node: plan.ovs_mb for plan in pages}
    memory = ",".join(str(sizes.get(node, 0)) for node in range(max(sizes) + 1))
    yield _step(
        live,
        "dpdk-init",
        "true",
        Effect.OVS_RESTART,
        "OVS starts DPDK only if configured to",
        sources.OVS_CONFIG,
    )
    yield _mask(live, partition)
    if isinstance(_now(live, LCORES), str):
        yield _step(
            live,
            LCORES,
            None,
            Effect.OVS_RESTART,
            "it pins OVS's main, handler and revalidator threads to one CPU; without it they run on those "
            "that services have",
            sources.OVS_CONFIG,
        )
    yield _step(
        live,
        "dpdk-socket-mem",
        memory,
        Effect.OVS_RESTART,
        "MB on each node: the buffers of "
        f"{'each port' if is_per_port(live) else 'the MTUs in use'} and 512 MB for rings and DPDK itself",
        f"{sources.OVS_CONFIG}; {sources.OVS_MEMORY}; the 512 MB: {sources.OWN}",
    )
    yield _step(
        live,
        "pmd-rxq-assign",
        _assign(live),
        Effect.LIVE,
        "queues go to PMD threads by their measured load",
        sources.OVS_PMD,
    )
    for key, why in (
        (_TSO, "left as found: it changes what VMs see"),
        (_PER_PORT, "left as found: the memory is planned for it"),
    ):
        now = _now(live, key)
        if isinstance(now, str):
            yield _step(live, key, now, Effect.OVS_RESTART, why, sources.OVS_CONFIG)


def _assign(live: Live) -> str:
    """``group``, new in OVS 2.16, assigns queues by load without a fixed number of queues per PMD thread."""
    version = None if isinstance(live.ovs, Unknown) else live.ovs.version
    return "group" if _at_least(version, (2, 16)) else "cycles"


def _at_least(version: str | None, wanted: tuple[int, int]) -> bool:
    words = (version or "0.0").split(".")
    return tuple(int(word) if word.isdigit() else 0 for word in words[:2]) >= wanted


def _now(live: Live, key: str) -> Fact[str | None]:
    return live.ovs if isinstance(live.ovs, Unknown) else live.ovs.other_config.get(key)


def _step(live: Live, key: str, wanted: str | None, effect: Effect, why: str, source: str) -> Step:
    return Step(Group.OVS, OtherConfig(key), _now(live, key), wanted, effect, why, source)


def _mask(live: Live, partition: Partition) -> Step:
    """The step for pmd-cpu-mask; masks are normalised before they are compared."""
    key = "pmd-cpu-mask"
    now = _now(live, key)
    if isinstance(now, str):
        try:
            now = to_mask(from_mask(now))
        except ValueError:
            now = Unknown(f"other_config:{key}", f"is no mask: {now[:40]!r}")
    return Step(
        Group.OVS,
        OtherConfig(key),
        now,
        to_mask(partition.polling),
        Effect.LIVE,
        "one PMD thread on each of these CPUs, on the nodes of the NICs and of VMs",
        f"{sources.OVS_CONFIG}; {sources.OVS_SCHEDULING}",
    )
