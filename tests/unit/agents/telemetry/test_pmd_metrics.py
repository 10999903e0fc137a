"""Figures of PMD threads in a scrape, and scrapes that OVS cannot hurt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from agents.api import http
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from netplugin.api.errors import OperationTimeout
from netplugin.api.pmd_models import UnpolledQueue
from netplugin.pmd.read import PmdCounters, PmdReading
from tests.unit.agent import DEADLINE_S, agent
from tests.unit.core.pmd_states import core, queue, state

READING = PmdReading(
    state(
        core(
            2,
            queue("nic", 0, 60, port_numa_node=1),
            queue("vm", 3, None),
            busy_percent=62.5,
            cycles_per_packet=500.0,
            processing_cycles_per_packet=200.5,
            overhead_percent=2,
        ),
        core(3, busy_percent=None, isolated=True),
        unpolled=(UnpolledQueue(port="x", queue=0),),
    ),
    {2: PmdCounters(1000, 5000, 3000, 0, 7, 1)},
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "agent.db")
    yield made
    made.close()


def scrape(store: Store, read: Callable[[], PmdReading | None]) -> list[str]:
    metrics = Metrics(store)
    metrics.watch_pmd(read)
    text = metrics.render().decode()
    assert "netplugin_ports" in text, "the rest is there"
    return sorted(line for line in text.splitlines() if line.startswith("netplugin_pmd"))


def test_the_figures(store: Store) -> None:
    thread = 'cpu="2",numa_node="0"'
    assert set(scrape(store, lambda: READING)) == {
        "netplugin_pmd_up 1.0",
        f"netplugin_pmd_busy_ratio{{{thread}}} 0.625",
        f'netplugin_pmd_cycles_per_packet{{{thread},of="all"}} 500.0',
        f'netplugin_pmd_cycles_per_packet{{{thread},of="processing"}} 200.5',
        f"netplugin_pmd_overhead_ratio{{{thread}}} 0.02",
        f"netplugin_pmd_isolated{{{thread}}} 0.0",
        'netplugin_pmd_isolated{cpu="3",numa_node="0"} 1.0',
        f"netplugin_pmd_packets_total{{{thread}}} 1000.0",
        f"netplugin_pmd_cycles_total{{{thread}}} 5000.0",
        f'netplugin_pmd_upcalls_total{{{thread},outcome="all"}} 7.0',
        f'netplugin_pmd_upcalls_total{{{thread},outcome="lost"}} 1.0',
        'netplugin_pmd_rxq_usage_ratio{cpu="2",port="nic",queue="0"} 0.6',
        "netplugin_pmd_numa_mismatches 1.0",
        "netplugin_pmd_unpolled_queues 1.0",
    }


def test_without_ovs_there_is_up_0_alone(store: Store) -> None:
    def away() -> PmdReading:
        raise OperationTimeout("ovs-vswitchd did not answer in time", step="vswitchd")

    def mistaken() -> PmdReading:
        raise KeyError("a mistake of ours")

    assert scrape(store, away) == scrape(store, mistaken) == ["netplugin_pmd_up 0.0"]
    assert scrape(store, lambda: None) == [], "no backend uses OVS"


def test_a_scrape_that_waits_for_ovs_holds_up_nothing_else(tmp_path: Path) -> None:
    """The answer to /healthz comes while the scrape waits, and is what ends the waiting."""
    answered = threading.Event()

    def waits() -> PmdReading | None:
        assert answered.wait(DEADLINE_S)
        return READING

    with agent(tmp_path) as running:
        metrics = Metrics(running.store)
        metrics.watch_pmd(waits)
        app = http.build(running.service, running.tasks, metrics)

        async def both() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
                scraped = asyncio.create_task(client.get("/metrics"))
                await asyncio.sleep(0)
                assert (await client.get("/healthz")).status_code == 200
                answered.set()
                return await scraped

        assert "netplugin_pmd_up 1.0" in asyncio.run(both()).text


def test_a_scrape_does_not_connect_to_ovs(tmp_path: Path) -> None:
    """Where no backend uses it, nobody else may begin to."""
    with agent(tmp_path) as running:
        assert running.service.pmd.scraped() is None
