"""Prometheus metrics of the agent, of PMD threads and of VFs, in a registry of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agents.store.store import Store
from netplugin.api.errors import NetpluginError
from netplugin.api.models import PortState, VfCounters
from netplugin.api.pmd_models import PmdCore
from netplugin.pmd.read import PmdReading

# -- Prometheus metrics of the agent, in a registry of its own. -----------------------------------


_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class _Ports(Collector):
    """The number of ports, counted at each scrape."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: Ports of other backends count as failed; None: no restriction.
        self.loaded: Collection[str] | None = None

    def collect(self) -> list[Metric]:
        family = GaugeMetricFamily(
            "netplugin_ports", "Ports by backend and state.", labels=["backend", "state"]
        )
        counts: dict[tuple[str, str], int] = {}
        for record in self._store.records():
            unseen = self.loaded is not None and record.spec.backend not in self.loaded
            # Same state as in the API: no backend manages the port.
            reported = PortState.FAILED if unseen else record.state
            key = (record.spec.backend, reported.value)
            counts[key] = counts.get(key, 0) + 1
        for (backend, state), count in sorted(counts.items()):
            family.add_metric([backend, state], count)
        aside = GaugeMetricFamily(
            "netplugin_store_rows_set_aside", "Rows of the store that could not be read."
        )
        aside.add_metric([], len(self._store.set_aside.all()))
        return [family, aside]


class _Failures(Collector):
    """Unexpected errors, counted by the supervisor and read at each scrape."""

    def __init__(self, failures: Callable[[], Mapping[str, int]]) -> None:
        self._failures = failures

    def collect(self) -> list[Metric]:
        family = CounterMetricFamily(
            "netplugin_unexpected_errors",
            "Errors that no code expected, by the thread or loop they happened in. It went on.",
            labels=["where"],
        )
        for where, count in sorted(self._failures().items()):
            family.add_metric([where], count)
        return [family]


class Metrics:
    def __init__(self, store: Store) -> None:
        self._registry = CollectorRegistry()
        self._ports = _Ports(store)
        self._registry.register(self._ports)
        self._operations = Counter(
            "netplugin_operations",
            "Port operations by outcome: ok, or an error's code.",
            ["backend", "operation", "outcome"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "netplugin_operation_seconds",
            "Port operations: the time of each part, and in all.",
            ["backend", "operation", "part"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._changes = Counter(
            "netplugin_changes",
            "Changes made to the host, by why: plug, undo, drift, network, orphan.",
            ["backend", "change", "why"],
            registry=self._registry,
        )

    def count_as_failed_but(self, loaded: Collection[str]) -> None:
        """Report ports of all other backends as failed."""
        self._ports.loaded = loaded

    def watch_failures(self, failures: Callable[[], Mapping[str, int]]) -> None:
        """Add the metrics of unexpected errors (see ``Supervisor.failures``)."""
        self._registry.register(_Failures(failures))

    def watch_pmd(self, read: Callable[[], PmdReading | None]) -> None:
        """Add the metrics of PMD threads; ``read`` is called at each scrape (see ``PmdFigures``)."""
        self._registry.register(PmdFigures(read))

    def watch_vfs(self, read: Callable[[], Iterable[PortCounters]]) -> None:
        """Add the counters of the ports' virtual functions; ``read`` is called at each scrape."""
        self._registry.register(VfFigures(read))

    def watch_credentials(self, stale: Callable[[], bool]) -> None:
        Gauge(
            "netplugin_credentials_stale",
            "1 if the files of tokens or certificates cannot be used, and what was before is.",
            registry=self._registry,
        ).set_function(lambda: float(stale()))

    def served(
        self,
        backend: str,
        operation: str,
        timings_ms: Mapping[str, float],
        error: NetpluginError | None,
    ) -> None:
        outcome = error.code if error else "ok"
        self._operations.labels(backend, operation, outcome).inc()
        for part, spent in timings_ms.items():
            self._seconds.labels(backend, operation, part).observe(spent / 1e3)

    def changed(self, backend: str, change: str, why: str) -> None:
        self._changes.labels(backend, change, why).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)


# -- Prometheus metrics of PMD threads, read from OVS at each scrape. -----------------------------


LOG = logging.getLogger(__name__)
_THREAD = ["cpu", "numa_node"]
_QUEUE = ["port", "queue", "cpu"]


class PmdFigures(Collector):
    """Collects the metrics without affecting the rest of the scrape; without OVS, only ``up`` 0."""

    def __init__(self, read: Callable[[], PmdReading | None]) -> None:
        """``read`` takes about a second at most; it returns None if no backend uses OVS."""
        self._read = read

    def describe(self) -> list[Metric]:
        """Empty, so that registering the collector does not query OVS."""
        return []

    def collect(self) -> list[Metric]:
        up = GaugeMetricFamily("netplugin_pmd_up", "Whether OVS reported its PMD threads.")
        try:
            reading = self._read()
            if reading is None:
                return []
            figures = [*_threads(reading), *_queues(reading)]
        except NetpluginError as away:
            LOG.debug("no figures of PMD threads: %s", away)
            figures = []
        except Exception:
            LOG.exception("unexpected")
            figures = []
        up.add_metric([], bool(figures))
        return [up, *figures]


def _threads(reading: PmdReading) -> Iterator[Metric]:
    since = "since it started or its statistics were cleared"
    busy = GaugeMetricFamily(
        "netplugin_pmd_busy_ratio",
        f"Cycles of a PMD thread that went to polls with packets, of all it used, {since}.",
        labels=_THREAD,
    )
    cost = GaugeMetricFamily(
        "netplugin_pmd_cycles_per_packet",
        f"Cycles of a PMD thread for each packet, {since}: of polls with packets, and of all.",
        labels=[*_THREAD, "of"],
    )
    overhead = GaugeMetricFamily(
        "netplugin_pmd_overhead_ratio",
        "Cycles of a PMD thread that are no queue's own, of the last minute.",
        labels=_THREAD,
    )
    isolated = GaugeMetricFamily(
        "netplugin_pmd_isolated", "Whether a PMD thread polls pinned queues alone.", labels=_THREAD
    )
    packets = CounterMetricFamily(
        "netplugin_pmd_packets", "Packets that a PMD thread received.", labels=_THREAD
    )
    upcalls = CounterMetricFamily(
        "netplugin_pmd_upcalls",
        "Packets that had no flow in the datapath, and those lost for it.",
        labels=[*_THREAD, "outcome"],
    )
    cycles = CounterMetricFamily(
        "netplugin_pmd_cycles", "Cycles that a PMD thread used, sleep left out.", labels=_THREAD
    )
    for core in reading.state.cores:
        thread = _labels(core)
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


def _labels(core: PmdCore) -> list[str]:
    return [str(core.cpu), str(core.numa_node)]


def _add(family: GaugeMetricFamily, labels: list[str], value: float | None, divisor: int = 1) -> None:
    if value is not None:
        family.add_metric(labels, value / divisor)


# -- Prometheus counters of the ports' virtual functions, read from the NICs at each scrape. ------


_LABELS = ["port", "pci_address", "direction"]


@dataclass(frozen=True, slots=True)
class PortCounters:
    """The counters of a port's virtual function."""

    port_id: str
    pci_address: str
    counters: VfCounters


class VfFigures(Collector):
    """Collects the counters without affecting the other metrics of a scrape.

    If the NICs cannot be read, the counters are missing. The kernel reads them under RTNL, its
    global lock for network devices, without a timeout: a NIC that is being reset blocks the reader.
    Therefore a single separate thread reads them, and a scrape waits for it for ``wait_s`` seconds.
    """

    def __init__(self, read: Callable[[], Iterable[PortCounters]], wait_s: float = 2.0) -> None:
        self._read = read
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._reading: Future[list[PortCounters]] | None = None

    def describe(self) -> list[Metric]:
        """Empty, so that registering the collector does not query the NICs."""
        return []

    def collect(self) -> list[Metric]:
        try:
            found = self._begin().result(self._wait_s)
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

    def _begin(self) -> Future[list[PortCounters]]:
        """The read in progress, or a new one."""
        with self._lock:
            if self._reading is None or self._reading.done():
                reading: Future[list[PortCounters]] = Future()
                threading.Thread(
                    target=self._fill, args=(reading,), name="vf-counters", daemon=True
                ).start()  # raises if no thread can be created; then there is no read
                self._reading = reading
            return self._reading

    def _fill(self, reading: Future[list[PortCounters]]) -> None:
        try:
            reading.set_result(list(self._read()))
        except Exception as wrong:
            reading.set_exception(wrong)


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
