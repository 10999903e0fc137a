"""Prometheus metrics of the agent, in a registry of its own."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.pmd_figures import pmd_figures
from agents.telemetry.vf_figures import PortCounters, VfFigures
from netplugin.api.errors import NetpluginError
from netplugin.api.models import PortState
from netplugin.pmd.read import PmdReading

_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class _AtScrape(Collector):
    """Metrics that a function makes at each scrape, and not when they are registered."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        return self._make()


class Metrics:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._registry = CollectorRegistry()
        #: The backends whose ports are not reported as failed; None: all.
        self.loaded: Collection[str] | None = None
        #: Makes further lines of a scrape (``counter_text``).
        self._counters: Callable[[], bytes] = bytes
        self._registry.register(_AtScrape(self._ports))
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

    # ``read`` is called at each scrape.

    def watch_failures(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Add the metrics of unexpected errors (see ``Supervisor.failures``)."""
        self._registry.register(_AtScrape(lambda: [_failures(read())]))

    def watch_pmd(self, read: Callable[[], PmdReading | None]) -> None:
        """Add the metrics of PMD threads."""
        self._registry.register(_AtScrape(lambda: pmd_figures(read)))

    def watch_vfs(self, read: Callable[[], Iterable[PortCounters]]) -> None:
        """Add the counters of the ports' virtual functions."""
        self._registry.register(_AtScrape(VfFigures(read).collect))

    def watch_counters(self, read: Callable[[], bytes]) -> None:
        """Add the counters of ports, in the text format."""
        self._counters = read

    def watch_fleet(self, connected: Callable[[], bool], counts: Callable[[], Mapping[str, int]]) -> None:
        """Add whether etcd is read and watched, and the fleet's objects by what became of them."""
        Gauge(
            "netplugin_fleet_connected",
            "1 while the desired state of this host is read from etcd and watched.",
            registry=self._registry,
        ).set_function(lambda: float(connected()))

        def objects() -> Iterator[Metric]:
            family = GaugeMetricFamily(
                "netplugin_fleet_objects",
                "Objects of the fleet: owned (made here), open (to be made), and by why they are not so.",
                labels=["state"],
            )
            for state, count in counts().items():
                family.add_metric([state], count)
            yield family

        self._registry.register(_AtScrape(objects))

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
        return generate_latest(self._registry) + self._counters()

    def _ports(self) -> Iterator[Metric]:
        ports = GaugeMetricFamily(
            "netplugin_ports", "Ports by backend and state.", labels=["backend", "state"]
        )
        counts = Counts((each.spec.backend, self._reported(each).value) for each in self._store.records())
        for labels, count in sorted(counts.items()):
            ports.add_metric(labels, count)
        yield ports
        aside = GaugeMetricFamily(
            "netplugin_store_rows_set_aside", "Rows of the store that could not be read."
        )
        aside.add_metric([], len(self._store.set_aside.all()))
        yield aside

    def _reported(self, record: Record) -> PortState:
        """The state as in the API: that of a port whose backend is not loaded is failed."""
        unseen = self.loaded is not None and record.spec.backend not in self.loaded
        return PortState.FAILED if unseen else record.state


def _failures(counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(
        "netplugin_unexpected_errors",
        "Errors that no code expected, by the thread or loop they happened in. It went on.",
        labels=["where"],
    )
    for where, count in sorted(counts.items()):
        family.add_metric([where], count)
    return family
