"""Rates: what a VM may send and receive is policed, read back, and changed one way at a time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netplugin.host.names import VHOST, device_name
from tests.functional.conftest import make_spec
from tests.functional.hosts_ovs import Host, clean, host
from tests.functional.test_plug_ovs import _transactions, rows
from tests.lab.processes import wait_for
from tests.lab.switch import switch
from tests.lab.testpmd import Forward, Testpmd, TestpmdOptions
from tests.lab.vm import Vm

RATE = 100_000  # kbit/s
BURST_S = 0.8
#: The part of what this machine carries in this moment that a limit leaves: there is something to take away.
PART = 6
BRIDGE = "br-phys1"
FRAME = 1400


@pytest.fixture(scope="module")
def single() -> Iterator[Host]:
    with switch(), host(1) as one:
        yield one


@pytest.fixture
def hypervisor(single: Host) -> Iterator[Host]:
    with clean(single):
        yield single
    assert rows(single.ovs, "QoS", "type") == [], "no row of QoS is left behind"


def _spec(number: int, **qos: Any) -> dict[str, Any]:
    return make_spec(number, qos=qos)


def _carried(sender: Vm, receiver: Vm, seconds: float = 1.0) -> tuple[float, float, float]:
    """Megabits offered and carried, and the seconds that it took: a load of many frames in a row."""
    with receiver.receives() as ear:
        sent = 0
        start = time.monotonic()
        while (spent := time.monotonic() - start) < seconds:
            sender.send(receiver.mac, 500, FRAME)
            sent += 500
            ear.listen()
        ear.settle()
    return sent * (FRAME + 14) * 8 / 1e6, ear.bytes * 8 / 1e6, spent


def _allowed(kbps: float, seconds: float) -> float:
    """Megabits that a policer lets through in that time: its bucket, and what flows into it."""
    return kbps / 1e3 * (seconds + BURST_S)


def test_rates_are_enforced_each_way(hypervisor: Host) -> None:
    with (
        hypervisor.vm("a", _spec(1), "10.0.0.1") as a,
        hypervisor.vm("b", _spec(2), "10.0.0.2") as b,
    ):
        wait_for(lambda: a.pings(b.address), 20, "one VM reaches the other")
        _, carried, seconds = _carried(a, b)
        low = int(carried / seconds * 1e3 / PART)
        for limited in ({"a": {"egress_kbps": low}}, {"b": {"ingress_kbps": low}}):
            for number, port in enumerate(("a", "b"), start=1):
                hypervisor.plug(port, _spec(number, **limited.get(port, {})))
            offered, carried, seconds = _carried(a, b)
            assert carried < 1.5 * _allowed(low, seconds), (limited, offered, carried, seconds)
            assert carried > 0.5 * min(offered, _allowed(low, seconds)), (limited, offered, carried, seconds)
            # The other direction has no limit.
            offered, carried, seconds = _carried(b, a)
            assert carried > 0.5 * offered or carried > 1.5 * _allowed(low, seconds), limited


def test_a_limit_holds_against_a_vm_that_sends_as_fast_as_it_can(hypervisor: Host) -> None:
    """Counted by OVS where it hands frames to the other VM."""
    specs = {"a": _spec(1), "b": _spec(2)}
    a, b = (hypervisor.plug(port, spec)["binding"] for port, spec in specs.items())
    # The VMs share a CPU: what one may send until its turn is over is what the rings hold.
    sends = TestpmdOptions(
        forward=Forward.TXONLY, mac=specs["a"]["mac"], to=specs["b"]["mac"], ring_size=1024
    )
    takes = TestpmdOptions(forward=Forward.RXONLY, mac=specs["b"]["mac"], ring_size=1024)
    with Testpmd(Path(b["socket_path"]), takes), Testpmd(Path(a["socket_path"]), sends):
        for binding in (a, b):
            hypervisor.ovs.wait_connected(binding["device"])
        limit = int(_rate(hypervisor, b["device"], 20_000_000) / PART)
        measured = limit * 1000 // 8  # what a limit gives in a second
        for port, direction in (("a", "egress_kbps"), ("b", "ingress_kbps")):
            hypervisor.plug(port, {**specs[port], "qos": {direction: limit}})
            rate = _rate(hypervisor, b["device"], measured)
            assert 0.5 * limit < rate < 1.5 * limit, (port, direction, limit)
            hypervisor.plug(port, specs[port])
            assert _rate(hypervisor, b["device"], measured) > 2 * limit, "it is taken away again"


def _rate(hypervisor: Host, device: str, measured: int) -> float:
    """kbit/s that the VM is given, over so many bytes after those that a full bucket lets through."""
    start = _given(hypervisor, device) + measured
    wait_for(lambda: _given(hypervisor, device) > start, 60, "the bucket is empty")
    before, began, doubt = _looked(hypervisor, device)

    def found() -> float | None:
        now, ended, more = _looked(hypervisor, device)
        elapsed = ended - began
        precise = now > before + measured and doubt + more < elapsed / 10
        return (now - before) * 8 / 1000 / elapsed if precise else None

    rate = wait_for(found, 60, "it was measured")
    assert rate is not None
    return rate


def _looked(hypervisor: Host, device: str) -> tuple[int, float, float]:
    """What OVS has handed to the VM, and when that was: seconds, give or take so many."""
    begun = time.monotonic()
    given = _given(hypervisor, device)
    half = (time.monotonic() - begun) / 2
    return given, begun + half, half


def _given(hypervisor: Host, device: str) -> int:
    """Bytes that OVS has handed to the VM."""
    shown = hypervisor.ovs.ofctl("dump-ports", BRIDGE, device)
    return int(re.search(r"tx pkts=\d+, bytes=(\d+)", shown)[1])  # type: ignore[index]


def test_the_request_is_in_the_rows_and_vswitchd_took_it(hypervisor: Host) -> None:
    ovs, name = hypervisor.ovs, device_name(VHOST, "p1")
    hypervisor.plug("p1", _spec(1, ingress_kbps=RATE, egress_kbps=2 * RATE))
    (qos,) = rows(ovs, "QoS", "_uuid", "type", "other_config", "external_ids")
    assert qos["type"] == "egress-policer"
    assert qos["other_config"] == {"cir": "12500000", "cbs": "10000000"}
    assert qos["external_ids"]["netplugin-port"] == "p1"
    assert "cir: 12500000" in ovs.appctl("qos/show", name)
    assert ovs.get("Interface", name, "ingress_policing_rate") == str(2 * RATE)
    assert ovs.get("Interface", name, "ingress_policing_burst") == str(160_000)
    assert hypervisor.planned() == []
    before = _transactions(ovs)
    hypervisor.plug("p1", _spec(1, ingress_kbps=RATE, egress_kbps=2 * RATE))
    assert _transactions(ovs) == before


def test_one_direction_changes_and_the_other_stays(hypervisor: Host) -> None:
    ovs, name = hypervisor.ovs, device_name(VHOST, "p1")
    hypervisor.plug("p1", _spec(1, ingress_kbps=RATE, egress_kbps=RATE))
    qos = ovs.vsctl("list", "QoS")
    hypervisor.plug("p1", _spec(1, ingress_kbps=RATE, egress_kbps=7 * RATE))
    assert ovs.vsctl("list", "QoS") == qos
    interface = ovs.vsctl("--columns=ingress_policing_rate,ingress_policing_burst", "list", "Interface", name)
    hypervisor.plug("p1", _spec(1, egress_kbps=7 * RATE))
    assert rows(ovs, "QoS", "type") == []
    assert "not configured" in ovs.appctl("qos/show", name)
    assert interface == ovs.vsctl(
        "--columns=ingress_policing_rate,ingress_policing_burst", "list", "Interface", name
    )
    hypervisor.plug("p1", _spec(1))
    assert ovs.get("Interface", name, "ingress_policing_rate") == "0"


def test_impossible_rates_are_refused(hypervisor: Host) -> None:
    for qos in (
        {"ingress_kbps": 0},
        {"egress_kbps": -1},
        {"ingress_kbps": 11},
        {"egress_kbps": 10**10},
    ):
        status, error = hypervisor.put("p1", _spec(1, **qos))
        assert (status, error["code"]) == (422, "invalid_request"), qos
    status, error = hypervisor.put("p1", _spec(1, egress_kbps=RATE, min_egress_kbps=1000))
    assert (status, error["code"]) == (409, "unsupported")
    assert hypervisor.agent.get("/v1/ports/p1")[0] == 404


def test_foreign_rows_of_qos(hypervisor: Host) -> None:
    """One on our port is drift; one elsewhere is not ours to touch; ours without a port goes."""
    ovs, name = hypervisor.ovs, device_name(VHOST, "p1")
    hypervisor.plug("p1", _spec(1, ingress_kbps=RATE))
    ovs.vsctl("add-br", "br-theirs", "--", "set", "bridge", "br-theirs", "datapath_type=netdev")
    theirs = ovs.vsctl(
        "set",
        "port",
        "br-theirs",
        "qos=@q",
        "--",
        "--id=@q",
        "create",
        "qos",
        "type=linux-htb",
        "other_config:max-rate=7",
    ).strip()
    ovs.vsctl("set", "port", name, f"qos={theirs}")
    wait_for(lambda: "cir: 12500000" in ovs.appctl("qos/show", name), 30, "our policer is back")
    wait_for(lambda: hypervisor.planned() == [], 30, "and nothing is left to do")
    assert len(rows(ovs, "QoS", "type")) == 2
    ovs.vsctl("del-port", name)
    wait_for(lambda: name in ovs.vsctl("list-ports", "br-phys1"), 30, "the port is back")
    wait_for(lambda: len(rows(ovs, "QoS", "type")) == 2, 30, "with one row of QoS, not two")
    assert hypervisor.agent.call("DELETE", "/v1/ports/p1")[0] == 204
    (left,) = rows(ovs, "QoS", "type", "other_config")
    assert json.dumps(left) == json.dumps({"type": "linux-htb", "other_config": {"max-rate": "7"}})
    assert ovs.vsctl("get", "port", "br-theirs", "qos").strip() == theirs
    ovs.vsctl("clear", "port", "br-theirs", "qos", "--", "destroy", "qos", theirs)
    ovs.vsctl("del-br", "br-theirs")
