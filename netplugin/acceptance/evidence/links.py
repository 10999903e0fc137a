"""The component ``links``: frames that the kernel dropped at bridges, taps, uplinks and qdiscs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from netplugin.acceptance.evidence.contract import EvidenceError, Place, Reading

#: Disjoint counters (Documentation/networking/statistics.rst in Linux): the kinds of errors are
#: included in rx_errors and tx_errors.
_COUNTS = ("rx_dropped", "tx_dropped", "rx_errors", "tx_errors", "rx_missed_errors", "rx_nohandler")
#: A qdisc includes the drops of its children, so only these attachment points are read.
_ROOT, _INGRESS = 0xFFFFFFFF, 0xFFFFFFF1


class Links(Place):
    """Kernel devices by name; of a bridge also its members at construction time."""

    def __init__(self, devices: Iterable[str]) -> None:
        """Raises: EvidenceError if a device does not exist."""
        self._names = tuple(sorted(_with_members(set(devices), _dump()[0])))

    @property
    def name(self) -> str:
        return "links"

    def read(self) -> Reading:
        links, qdiscs = _dump()
        return Reading(lost_at(self._names, links, qdiscs))


def lost_at(names: Iterable[str], links: Iterable[Any], qdiscs: Iterable[Any]) -> dict[str, int]:
    """Return lost frames from netlink messages (pure). Raises: EvidenceError if a device disappeared."""
    lost: dict[str, int] = {}
    names_of: dict[int, str] = {}
    wanted = set(names)
    for link in links:
        name = link.get_attr("IFLA_IFNAME")
        if name not in wanted:
            continue
        names_of[link["index"]] = name
        counts: Mapping[str, int] = link.get_attr("IFLA_STATS64") or {}
        for count in _COUNTS:
            lost[f"{name}.{count}"] = int(counts.get(count, 0))
    if missing := wanted - set(names_of.values()):
        raise EvidenceError(f"links: there is no device {', '.join(sorted(missing))}")
    for qdisc in qdiscs:
        device = names_of.get(qdisc["index"])
        if device is None or qdisc["parent"] not in (_ROOT, _INGRESS):
            continue
        what = "qdisc_drops" if qdisc["parent"] == _ROOT else "ingress_drops"
        lost[f"{device}.{what}"] = _drops(qdisc)
    return lost


def _drops(qdisc: Any) -> int:
    stats = qdisc.get_attr("TCA_STATS2")
    queue = stats.get_attr("TCA_STATS_QUEUE") if stats is not None else None
    return int(queue["drops"]) if queue else 0


def _with_members(devices: set[str], links: Iterable[Any]) -> set[str]:
    links = list(links)
    masters = {link["index"] for link in links if link.get_attr("IFLA_IFNAME") in devices}
    return devices | {
        link.get_attr("IFLA_IFNAME") for link in links if link.get_attr("IFLA_MASTER") in masters
    }


def _dump() -> tuple[list[Any], list[Any]]:
    from pyroute2 import IPRoute, NetlinkError  # slow to import

    try:
        with IPRoute() as kernel:
            return list(kernel.get_links()), list(kernel.get_qdiscs())
    except (OSError, NetlinkError) as error:
        raise EvidenceError(f"links: the kernel does not tell: {error}") from error
