"""Prometheus metrics of PMD threads, read from OVS at each scrape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from netplugin.api.errors import NetpluginError
from netplugin.pmd.read import PmdReading

LOG = logging.getLogger(__name__)
_THREAD = ["cpu", "numa_node"]
_QUEUE = ["port", "queue", "cpu"]


def pmd_figures(read: Callable[[], PmdReading | None]) -> list[Metric]:
    """The metrics, without affecting the rest of the scrape; if OVS does not answer, only ``up`` 0.

    ``read`` takes about a second at most; it returns None if no backend uses OVS.
    """
    up = GaugeMetricFamily("netplugin_pmd_up", "Whether OVS reported its PMD threads.")
    figures: list[Metric] = []
    try:
        reading = read()
        if reading is None:
            return []
        figures = [*_threads(reading), *_queues(reading)]
    except NetpluginError as away:
        LOG.debug("no figures of PMD threads: %s", away)
    except Exception:
        LOG.exception("unexpected")
    up.add_metric([], bool(figures))
    return [up, *figures]


def _threads(reading: PmdReading) -> Iterator[Metric]:
    since = "since it started or its statistics were cleared"
    gauge, counter = partial(GaugeMetricFamily, labels=_THREAD), partial(CounterMetricFamily, labels=_THREAD)
    busy = gauge(
        "netplugin_pmd_busy_ratio",
        f"Cycles of a PMD thread that went to polls with packets, of all it used, {since}.",
    )
    cost = GaugeMetricFamily(
        "netplugin_pmd_cycles_per_packet",
        f"Cycles of a PMD thread for each packet, {since}: of polls with packets, and of all.",
        labels=[*_THREAD, "of"],
    )
    overhead = gauge(
        "netplugin_pmd_overhead_ratio",
        "Cycles of a PMD thread that are no queue's own, of the last minute.",
    )
    isolated = gauge("netplugin_pmd_isolated", "Whether a PMD thread polls pinned queues alone.")
    packets = counter("netplugin_pmd_packets", "Packets that a PMD thread received.")
    upcalls = CounterMetricFamily(
        "netplugin_pmd_upcalls",
        "Packets that had no flow in the datapath, and those lost for it.",
        labels=[*_THREAD, "outcome"],
    )
    cycles = counter("netplugin_pmd_cycles", "Cycles that a PMD thread used, sleep left out.")
    for core in reading.state.cores:
        thread = [str(core.cpu), str(core.numa_node)]
        isolated.add_metric(thread, core.isolated)
        _add(busy, thread, core.busy_percent, 100)
        _add(cost, [*thread, "processing"], core.processing_cycles_per_packet)
        _add(cost, [*thread, "all"], core.cycles_per_packet)
        _add(overhead, thread, core.overhead_percent, 100)
        if counted := reading.counters.get(core.cpu):
            packets.add_metric(thread, counted.packets)
            cycles.add_metric(thread, counted.cycles)
            upcalls.add_metric([*thread, "all"], counted.upcalls)
            upcalls.add_metric([*thread, "lost"], counted.lost_upcalls)
    yield from (busy, cost, overhead, isolated, packets, upcalls, cycles)


def _queues(reading: PmdReading) -> Iterator[Metric]:
    usage = GaugeMetricFamily(
        "netplugin_pmd_rxq_usage_ratio",
        "Cycles of its PMD thread that a receive queue took, of the last minute.",
        labels=_QUEUE,
    )
    away = GaugeMetricFamily(
        "netplugin_pmd_numa_mismatches",
        "Receive queues polled from another NUMA node than that of their port.",
    )
    unpolled = GaugeMetricFamily("netplugin_pmd_unpolled_queues", "Receive queues that no PMD thread polls.")
    for core in reading.state.cores:
        for queue in core.queues:
            labels = [queue.port, str(queue.queue), str(core.cpu)]
            _add(usage, labels, queue.usage_percent, 100)
    queues = (queue for core in reading.state.cores for queue in core.queues)
    away.add_metric([], sum(queue.numa_mismatch for queue in queues))
    unpolled.add_metric([], len(reading.state.unpolled))
    yield from (usage, away, unpolled)


def _add(family: GaugeMetricFamily, labels: list[str], value: float | None, divisor: int = 1) -> None:
    if value is not None:
        family.add_metric(labels, value / divisor)
