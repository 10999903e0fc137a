"""The components ``links`` and ``nic``: drops at the kernel's devices, and counters of a NIC's driver."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from netplugin_zeroloss.loss.contract import AttributionError, CounterChanges, CounterReading, DropCounters

# -- The component ``links``: frames that the kernel dropped at bridges, taps, uplinks and qdiscs.

#: Disjoint counters (Documentation/networking/statistics.rst in Linux): the kinds of errors are
#: included in rx_errors and tx_errors.
_COUNTS = ("rx_dropped", "tx_dropped", "rx_errors", "tx_errors", "rx_missed_errors", "rx_nohandler")
#: A qdisc includes the drops of its children, so only these attachment points are read.
_ATTACHED = {0xFFFFFFFF: "qdisc_drops", 0xFFFFFFF1: "ingress_drops"}


class LinkCounters(DropCounters):
    """Kernel devices by name; of a bridge also its members at construction time."""

    name = "links"

    def __init__(self, devices: Iterable[str]) -> None:
        """Raises: AttributionError if the kernel does not tell."""
        names, links = set(devices), _dump()[0]
        masters = {link["index"] for link in links if link.get_attr("IFLA_IFNAME") in names}
        members = {link.get_attr("IFLA_IFNAME") for link in links if link.get_attr("IFLA_MASTER") in masters}
        self._names = tuple(sorted(names | members))

    def read(self) -> CounterReading:
        links, qdiscs = _dump()
        return CounterReading(lost_at(self._names, links, qdiscs))


def lost_at(names: Collection[str], links: Iterable[Any], qdiscs: Iterable[Any]) -> dict[str, int]:
    """Return lost frames from netlink messages (pure). Raises: AttributionError if a device disappeared."""
    found = {link.get_attr("IFLA_IFNAME"): link for link in links}
    if missing := set(names) - found.keys():
        raise AttributionError(f"links: there is no device {', '.join(sorted(missing))}")
    names_of = {found[name]["index"]: name for name in names}
    lost: dict[str, int] = {}
    for name in names:
        counts: Mapping[str, int] = found[name].get_attr("IFLA_STATS64") or {}
        lost |= {f"{name}.{count}": int(counts.get(count, 0)) for count in _COUNTS}
    for qdisc in qdiscs:
        device, what = names_of.get(qdisc["index"]), _ATTACHED.get(qdisc["parent"])
        if device is not None and what is not None:
            stats = qdisc.get_attr("TCA_STATS2")
            queue = stats.get_attr("TCA_STATS_QUEUE") if stats is not None else None
            lost[f"{device}.{what}"] = int(queue["drops"]) if queue else 0
    return lost


def _dump() -> tuple[list[Any], list[Any]]:
    from pyroute2 import IPRoute, NetlinkError  # slow to import

    try:
        with IPRoute() as kernel:
            return list(kernel.get_links()), list(kernel.get_qdiscs())
    except (OSError, NetlinkError) as error:
        raise AttributionError(f"links: the kernel does not tell: {error}") from error


# -- The component ``nic``: driver counters of a NIC, as ``ethtool -S`` prints them. --------------

#: Names of driver counters that may count lost frames; which of them overlap is vendor-specific.
_TELLING = re.compile(r"drop|discard|miss|err|fail|no_?buf|out_of|overrun|full|pause|fifo")


class DriverCounters(DropCounters):
    """``devices``: kernel names, each with its counters that count lost frames (often none).

    Names and meanings are driver-specific. Other matching counters are reported if they grew, but do
    not count as lost frames. Some of them are gauges, or are cleared with a queue: one that falls or
    disappears is unusable for this trial and is reported as ``NAME.unusable``, with the decrease.
    """

    name = "nic"

    def __init__(self, devices: Mapping[str, Iterable[str]]) -> None:
        self._devices = {device: tuple(lost) for device, lost in devices.items()}

    def read(self) -> CounterReading:
        lost: dict[str, int] = {}
        loose: dict[str, float] = {}
        for device, names in self._devices.items():
            counts = _statistics(device)
            for name in names:
                if name not in counts:
                    raise AttributionError(f"nic: {device} has no counter {name} (ethtool -S {device})")
                lost[f"{device}.{name}"] = counts[name]
            telling = {n: c for n, c in counts.items() if _TELLING.search(n) and n not in names}
            loose |= {f"{device}.{name}": count for name, count in telling.items()}
        return CounterReading(lost, loose=loose)

    def between(self, before: CounterReading, after: CounterReading, elapsed_s: float) -> CounterChanges:
        found = super().between(before, after, elapsed_s)
        return CounterChanges(found.lost, {name: value for name, value in found.readings.items() if value})


def _statistics(device: str) -> dict[str, int]:
    from pyroute2.ethtool.ioctl import IoctlEthtool  # slow to import

    asking = IoctlEthtool()
    try:
        asking.change_ifname(device)
        return {str(name): int(count) for name, count in asking.get_statistics()}
    except Exception as error:  # pyroute2 has one type per errno
        raise AttributionError(f"nic: {device} tells no statistics: {error!r}") from error
    finally:
        asking.close()
