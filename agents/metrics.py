"""Prometheus metrics of the agent, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agents.metrics_pmd import PmdFigures
from agents.metrics_vfs import PortCounters, VfFigures
from agents.store import Store
from netplugin.errors import NetpluginError
from netplugin.models import PortState
from netplugin.pmd.read import Reading

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
            told = PortState.FAILED if unseen else record.state
            key = (record.spec.backend, told.value)
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
            "netplugin_operations", "Port operations by outcome: ok, or an error's code.",
            ["backend", "operation", "outcome"], registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "netplugin_operation_seconds", "Port operations: the time of each part, and in all.",
            ["backend", "operation", "part"], buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self._changes = Counter(
            "netplugin_changes",
            "Changes made to the host, by why: plug, undo, drift, network, orphan.",
            ["backend", "change", "why"], registry=self._registry,
        )  # fmt: skip

    def count_as_failed_but(self, loaded: Collection[str]) -> None:
        """Report ports of all other backends as failed."""
        self._ports.loaded = loaded

    def watch_failures(self, failures: Callable[[], Mapping[str, int]]) -> None:
        """Add the metrics of unexpected errors (see ``Supervisor.failures``)."""
        self._registry.register(_Failures(failures))

    def watch_pmd(self, read: Callable[[], Reading | None]) -> None:
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
