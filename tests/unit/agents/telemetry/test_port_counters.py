"""Counters of ports in the API and in a scrape, and a host that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from prometheus_client.parser import text_string_to_metric_families

from agents.telemetry.counter_text import counter_text
from agents.telemetry.port_counters import BackendCounters
from netplugin.api.counter_models import Place, Traffic
from netplugin.api.models import PortSpec
from netplugin.backend import Intent
from netplugin.counters import Reading, Readings, Source
from tests.unit.agent import SPEC, agent, caller, served_agent
from tests.unit.fakes import FakeBackend, FakeHost

PORT = {Traffic.PACKETS_FROM_VM: 7, Traffic.BYTES_FROM_VM: 700, Traffic.RING_RETRIES: 2}
DROPS = {Place.GUEST_RING_FULL: 3, Place.TOO_LARGE: 0}


class Counting(FakeBackend):
    """Has counted the same of each port, by an uplink with a name that needs escapes."""

    name: ClassVar[str] = "counting"

    def __init__(self, host: FakeHost) -> None:
        super().__init__("counting", host)
        self.goes_on = threading.Event()
        self.goes_on.set()

    def port_counters(self, intents: Sequence[Intent], deadline: float) -> Readings:
        self.goes_on.wait(20.0)
        sources = {"port": Source(PORT, "1", 60.0), "drops": Source(DROPS, "1", 30.0)}
        uplink = Reading({"device": Source({Place.MISSED: 9}, "2", 90.0)}, network="physnet1")
        return Readings({intent.port_id: Reading(sources, ('a"b',)) for intent in intents}, {'a"b': uplink})


def of_vm1(backend: Counting, *ids: str) -> BackendCounters:
    spec = PortSpec.model_validate({**SPEC, "backend": "counting"})
    return BackendCounters(
        "counting", backend, lambda: [Intent(port_id, spec, stamp="s/1") for port_id in ids]
    )


def test_the_lines_of_a_scrape() -> None:
    text = counter_text([of_vm1(Counting(FakeHost()), "p1").known(10.0)]).decode()
    labels = 'port="p1",vm="vm-1",network="physnet1",backend="counting"'
    uplink = r'device="a\"b",network="physnet1",backend="counting"'
    samples = {line for line in text.splitlines() if not line.startswith("#") and "_seconds" not in line}
    assert samples == {
        f'netplugin_port_packets_total{{{labels},direction="from_vm"}} 7',
        f'netplugin_port_bytes_total{{{labels},direction="from_vm"}} 700',
        f"netplugin_port_ring_retries_total{{{labels}}} 2",
        f'netplugin_port_dropped_total{{{labels},place="guest_ring_full"}} 3',
        f'netplugin_uplink_dropped_total{{{uplink},place="missed"}} 9',
    }
    since = {
        line.split(" ")[0]: float(line.split(" ")[1])
        for line in text.splitlines()
        if "since_seconds{" in line
    }
    assert abs(since[f'netplugin_counters_since_seconds{{{labels},source="port"}}'] - time.time() + 60) < 3
    assert abs(since[f'netplugin_counters_since_seconds{{{labels},source="drops"}}'] - time.time() + 30) < 3


def test_the_text_is_what_prometheus_reads() -> None:
    text = counter_text([of_vm1(Counting(FakeHost()), "p1", "p2").known(10.0)]).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["netplugin_port_packets"].type == "counter"
    assert {s.labels["port"] for s in families["netplugin_port_packets"].samples} == {"p1", "p2"}
    assert families["netplugin_uplink_dropped"].samples[0].labels["device"] == 'a"b'
    assert families["netplugin_counters_read_seconds"].samples[0].labels == {"backend": "counting"}


def test_a_host_that_does_not_answer_leaves_what_is_known() -> None:
    backend = Counting(FakeHost())
    counters = of_vm1(backend, "p1")
    backend.goes_on.clear()
    assert counters.known(0.05).at is None, "nothing is known yet"
    backend.goes_on.set()
    known = counters.known(10.0)
    backend.goes_on.clear()
    begun = time.monotonic()
    assert counters.known(0.1) is known and time.monotonic() - begun < 5.0
    assert counters.known(0.0) is known
    backend.goes_on.set()


def test_a_port_that_is_made_again_under_the_same_id_begins_again() -> None:
    backend, stamps = Counting(FakeHost()), iter(["s/1", "s/1", "s/2"])
    counters = of_vm1(backend, "p1")
    intents = counters._intents
    counters._intents = lambda: [
        Intent(i.port_id, i.spec, stamp=stamp) for i in intents() for stamp in [next(stamps)]
    ]
    first, second, third = (counters.known(10.0).ports["p1"] for _ in range(3))
    assert first.tracks["port"].since == second.tracks["port"].since != third.tracks["port"].since


def test_the_api_has_the_counters_of_a_port_and_of_its_uplinks(tmp_path: Path) -> None:
    counting = Counting(FakeHost())
    backends = {"counting": counting, "fake": FakeBackend("fake", FakeHost())}
    with agent(tmp_path, backends=backends) as made, served_agent(made) as url, caller(url) as client:
        for name, backend in (("p1", "counting"), ("p2", "fake")):
            assert client.put(f"/v1/ports/{name}", json={**SPEC, "backend": backend}).status_code == 200
        found: dict[str, Any] = client.get("/v1/ports/p1/counters").json()
        counted = found["counters"]
        assert (counted["packets_from_vm"], counted["packets_to_vm"], counted["ring_retries"]) == (7, 0, 2)
        [drop] = counted["drops"]
        assert (drop["place"], drop["packets"]) == ("guest_ring_full", 3)
        assert counted["since"] < drop["since"] < found["read_at"]
        assert [uplink["device"] for uplink in found["uplinks"]] == ['a"b']
        assert client.get("/v1/ports/p2/counters").json()["code"] == "unsupported"
        assert client.get("/v1/ports/p3/counters").status_code == 404
        assert 'netplugin_port_packets_total{port="p1"' in client.get("/metrics").text
