"""The OVSDB keys that configure PMD threads: parsing and formatting (pure).

Defaults and ranges: dpif_netdev_set_config in lib/dpif-netdev.c, and ovs-vswitchd.conf.db(5).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from netplugin.api.pmd_models import AutoLoadBalance, PmdSettings
from netplugin.host.cpus import from_mask
from netplugin.host.ovs_versions import sleep_max

MASK = "pmd-cpu-mask"
ASSIGN = "pmd-rxq-assign"
ISOLATE = "pmd-rxq-isolate"
#: In ``other_config`` of an Interface.
AFFINITY = "pmd-rxq-affinity"
AUTO_LB = {
    "enabled": "pmd-auto-lb",
    "load_threshold": "pmd-auto-lb-load-threshold",
    "improvement_threshold": "pmd-auto-lb-improvement-threshold",
    "interval_minutes": "pmd-auto-lb-rebal-interval",
}
GROUP = "group"
_ASSIGNMENTS = ("roundrobin", "cycles", GROUP)
_PAIR = re.compile(r"(\d{1,9})[:=](\d{1,9})")
#: No number here has more digits.
_DIGITS = 9


def read_settings(other_config: Mapping[str, str]) -> PmdSettings:
    """Parse the settings like OVS: an invalid value means the default."""
    get = other_config.get
    assign = get(ASSIGN, "cycles")
    assign = assign if assign in _ASSIGNMENTS else "cycles"
    default, least = AutoLoadBalance(), get(AUTO_LB["improvement_threshold"])
    return PmdSettings(
        mask=get(MASK),
        rxq_assign=assign,
        # Pinned queues share their thread only with "group".
        rxq_isolate=assign != GROUP or get(ISOLATE, "true").lower() != "false",
        auto_load_balance=AutoLoadBalance(
            enabled=get(AUTO_LB["enabled"], "").lower() == "true",
            load_threshold=_number(get(AUTO_LB["load_threshold"]), default.load_threshold, 100),
            improvement_threshold=_number(least, default.improvement_threshold, 100),
            interval_minutes=_number(get(AUTO_LB["interval_minutes"]), default.interval_minutes, 20_000) or 1,
        ),
        sleep_max=sleep_max(other_config),
    )


def masked(mask: str | None) -> tuple[int, ...]:
    """The CPUs of a mask; empty if there is no mask, or one that OVS cannot parse."""
    try:
        return from_mask(mask or "")
    except ValueError:
        return ()


def threads_by_node(mask: str | None, nodes: Mapping[int, Collection[int]]) -> dict[int, int]:
    """The number of PMD threads on each node that has some. ``nodes``: online CPUs by NUMA node.

    Without a mask, vswitchd runs one thread on each node; with one, it skips CPUs that are not online
    (reconfigure_pmd_threads in lib/dpif-netdev.c).
    """
    cpus = frozenset(masked(mask))
    if not cpus:
        return dict.fromkeys(nodes, 1)
    counts = {node: len(cpus.intersection(here)) for node, here in nodes.items()}
    return {node: count for node, count in counts.items() if count}


def read_affinity(text: str | None) -> dict[int, int]:
    """CPU by queue. A list that does not parse pins nothing (parse_affinity_list in dpif-netdev.c)."""
    pairs = [_PAIR.fullmatch(part) for part in re.split(r"[,\s]+", text or "") if part]
    if not all(pairs):
        return {}
    return {int(pair[1]): int(pair[2]) for pair in pairs if pair}


def affinity_text(pins: Mapping[int, int]) -> str | None:
    """Format pinnings; None means to remove the key."""
    return ",".join(f"{queue}:{cpu}" for queue, cpu in sorted(pins.items())) or None


def _number(text: str | None, default: int, most: int) -> int:
    if text is None or not text.isdecimal() or len(text) > _DIGITS:
        return default
    return int(text) if int(text) <= most else default
