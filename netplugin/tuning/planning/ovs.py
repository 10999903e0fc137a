"""The settings of OVS-DPDK (pure). Rules: Documentation/intro/install/dpdk.rst and vswitch.xml of OVS."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import from_mask, to_mask
from netplugin.tuning.intent import Intent
from netplugin.tuning.live import Live
from netplugin.tuning.planning.hugepages import NodePages
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.root import Fact, Unknown
from netplugin.tuning.steps import Effect, Group, OtherConfig, Step

_TSO = "userspace-tso-enable"


def ovs_settings(
    live: Live, partition: Partition, pages: tuple[NodePages, ...], intent: Intent
) -> Iterator[Step]:
    """None for a host without PMD cores."""
    if not intent.pmd_cores:
        return
    first = min(partition.housekeeping_of(partition.pmd_nodes[0]))
    sizes = {plan.node: plan.ovs_mb for plan in pages}
    memory = ",".join(str(sizes.get(node, 0)) for node in range(max(sizes) + 1))
    yield _step(live, "dpdk-init", "true", Effect.OVS_RESTART, "OVS starts DPDK only if told to")
    yield _mask(
        live, "pmd-cpu-mask", to_mask(partition.polling), Effect.LIVE,
        "one PMD thread on each of these CPUs, on the node of the NIC",
    )  # fmt: skip
    yield _mask(
        live, "dpdk-lcore-mask", to_mask({first}), Effect.OVS_RESTART,
        "DPDK's own threads belong on housekeeping, and take the first CPU there is otherwise",
    )  # fmt: skip
    yield _step(
        live, "dpdk-socket-mem", memory, Effect.OVS_RESTART,
        "MB on each node: the buffers of the MTUs in use and 512 MB for rings and DPDK itself",
    )  # fmt: skip
    yield _step(
        live, "pmd-rxq-assign", _assign(live), Effect.LIVE,
        "queues go to PMD threads by their measured load",
    )  # fmt: skip
    tso = _now(live, _TSO)
    if isinstance(tso, str):
        yield Step(
            Group.OVS, OtherConfig(_TSO), tso, tso, Effect.OVS_RESTART,
            "left as found: it changes what VMs see",
        )  # fmt: skip


def _assign(live: Live) -> str:
    """``group`` came with OVS 2.16 and heeds load without tying queues to cores for good."""
    version = None if isinstance(live.ovs, Unknown) else live.ovs.version
    return "group" if _at_least(version, (2, 16)) else "cycles"


def _at_least(version: str | None, wanted: tuple[int, int]) -> bool:
    words = (version or "0.0").split(".")
    return tuple(int(word) if word.isdigit() else 0 for word in words[:2]) >= wanted


def _now(live: Live, key: str) -> Fact[str | None]:
    return live.ovs if isinstance(live.ovs, Unknown) else live.ovs.other_config.get(key)


def _step(live: Live, key: str, wanted: str, effect: Effect, why: str) -> Step:
    return Step(Group.OVS, OtherConfig(key), _now(live, key), wanted, effect, why)


def _mask(live: Live, key: str, wanted: str, effect: Effect, why: str) -> Step:
    """A mask that means the same CPUs is the same, however it is written."""
    now = _now(live, key)
    if isinstance(now, str):
        try:
            now = to_mask(from_mask(now))
        except ValueError:
            now = Unknown(f"other_config:{key}", f"is no mask: {now[:40]!r}")
    return Step(Group.OVS, OtherConfig(key), now, wanted, effect, why)
