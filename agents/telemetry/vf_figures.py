"""Prometheus counters of the ports' virtual functions, read from the NICs at each scrape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric

from agents.telemetry.slow_reading import SlowReading
from netplugin.api.models import VfCounters

LOG = logging.getLogger(__name__)
_LABELS = ["port", "pci_address", "direction"]


@dataclass(frozen=True, slots=True)
class PortCounters:
    """The counters of a port's virtual function."""

    port_id: str
    pci_address: str
    counters: VfCounters


class VfFigures:
    """Collects the counters without affecting the other metrics of a scrape.

    If the NICs cannot be read, the counters are missing. The kernel reads them under RTNL, its
    global lock for network devices, without a timeout: a NIC that is being reset blocks the reader.
    Therefore a single separate thread reads them, and a scrape waits for it for ``wait_s`` seconds.
    """

    def __init__(self, read: Callable[[], Iterable[PortCounters]], wait_s: float = 2.0) -> None:
        self._reading = SlowReading("vf-counters", lambda: list(read()))
        self._wait_s = wait_s

    def collect(self) -> list[Metric]:
        try:
            found = self._reading.begin().result(self._wait_s)
        except TimeoutError:
            LOG.warning("no counters of virtual functions: a NIC does not answer in time")
            return []
        except Exception as wrong:
            LOG.warning("no counters of virtual functions: %s", wrong)
            return []
        return [
            _family("packets", "Packets", found, lambda c: (c.rx_packets, c.tx_packets)),
            _family("bytes", "Bytes", found, lambda c: (c.rx_bytes, c.tx_bytes)),
            _family("dropped", "Packets dropped", found, lambda c: (c.rx_dropped, c.tx_dropped)),
        ]


def _family(
    name: str,
    what: str,
    found: Iterable[PortCounters],
    values: Callable[[VfCounters], tuple[int, int]],
) -> Metric:
    family = CounterMetricFamily(
        f"netplugin_vf_{name}",
        f"{what} of a port's virtual function, as its NIC counts them; rx is what it receives.",
        labels=_LABELS,
    )
    for each in found:
        for direction, value in zip(("rx", "tx"), values(each.counters), strict=True):
            family.add_metric([each.port_id, each.pci_address, direction], value)
    return family
