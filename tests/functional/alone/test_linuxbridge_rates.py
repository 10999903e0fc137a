"""Rates of a port, through the agent: what a VM receives and sends, counted in bytes that arrive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from netplugin.host.names import SHAPER, TAP, device_name
from tests.lab.namespaces import ANSWER_S
from tests.lab.processes import wait_for
from tests.lab.switch import switch
from tests.lab.traffic_hosts import Host, host, make_spec
from tests.lab.traffic_taps import TapVm

NETWORK = {"type": "flat", "physical_network": "physnet1", "mtu": 9000}
RATE = 100_000
A, B = "10.0.0.1", "10.0.0.2"
#: What is offered: twice the rate, for a second and more.
LOAD = {"count": 3000, "size": 8900, "kbps": 2 * RATE}
TAP_A, SHAPER_A = device_name(TAP, "a"), device_name(SHAPER, "a")


@pytest.fixture(scope="module")
def hypervisor() -> Iterator[Host]:
    with switch(), host(1, interfaces="physnet1:", tunnels=False) as made:
        yield made


@pytest.fixture
def vms(hypervisor: Host) -> Iterator[tuple[TapVm, TapVm]]:
    before = hypervisor.links()
    with ExitStack() as stack:
        vms = (
            stack.enter_context(hypervisor.vm("a", spec(), A)),
            stack.enter_context(hypervisor.vm("b", make_spec(2, NETWORK), B)),
        )
        assert vms[0].reaches(B)
        yield vms
    hypervisor.unplug("a", "b")
    assert hypervisor.links() == before


def spec(**qos: int) -> dict[str, Any]:
    security = {"allowed_addresses": [{"ip": A}]}
    return make_spec(1, NETWORK, qos=qos, port_security=security)


def qdisc(host: Host, device: str) -> dict[str, Any]:
    """The root qdisc with its counters."""
    found = host.json("tc", "-j", "-s", "qdisc", "show", "dev", device)
    root: dict[str, Any] = next(entry for entry in found if entry.get("root"))
    return root


def arrived_kbps(sender: TapVm, receiver: TapVm, to: str) -> float:
    """The rate at which a fixed load arrives, over the time that it took to arrive."""
    with receiver.listening() as arrivals:
        sender.stream(to, **LOAD)
        arrivals.settle()
    return arrivals.kbps


def test_each_direction_has_its_rate(hypervisor: Host, vms: tuple[TapVm, TapVm]) -> None:
    a, b = vms
    # At most half of what arrives without one in this moment, so that there is something to take away.
    rate = min(RATE, int(min(arrived_kbps(a, b, B), arrived_kbps(b, a, A)) / 2))
    for qos, sender, receiver, to, device in (
        ({"egress_kbps": rate}, a, b, B, SHAPER_A),
        ({"ingress_kbps": rate}, b, a, A, TAP_A),
    ):
        details = hypervisor.plug("a", spec(**qos))["observed"]
        assert {k: details[k] for k in qos} == qos
        got = arrived_kbps(sender, receiver, to)
        assert qdisc(hypervisor, device)["drops"] > 0, "more was offered than the rate"
        assert 0.5 * rate < got < 1.5 * rate


def test_one_direction_changes_without_the_other(hypervisor: Host, vms: tuple[TapVm, TapVm]) -> None:
    a, _ = vms
    hypervisor.plug("a", spec(ingress_kbps=RATE, egress_kbps=RATE))
    assert a.pings(B, wait_s=ANSWER_S)
    before = {device: qdisc(hypervisor, device) for device in (TAP_A, SHAPER_A)}
    hypervisor.plug("a", spec(ingress_kbps=RATE, egress_kbps=RATE // 2))
    after = {device: qdisc(hypervisor, device) for device in (TAP_A, SHAPER_A)}
    assert after[TAP_A]["options"] == before[TAP_A]["options"]
    assert after[SHAPER_A]["options"]["rate"] * 2 == before[SHAPER_A]["options"]["rate"]
    for device, found in before.items():
        assert after[device]["handle"] == found["handle"] == "6e70:"
        assert after[device]["packets"] >= found["packets"] > 0, "the same one, changed in place"
    hypervisor.plug("a", spec(ingress_kbps=RATE))
    assert SHAPER_A not in hypervisor.links() and a.pings(B, wait_s=ANSWER_S)
    assert "mirred" not in hypervisor.sh("tc", "filter", "show", "dev", TAP_A, "ingress")
    hypervisor.plug("a", spec())
    assert qdisc(hypervisor, TAP_A)["kind"] != "tbf" and a.pings(B, wait_s=ANSWER_S)


def test_the_filter_holds_on_a_port_with_rates(hypervisor: Host, vms: tuple[TapVm, TapVm]) -> None:
    a, b = vms
    hypervisor.plug("a", spec(egress_kbps=RATE))
    assert a.pings(B, wait_s=ANSWER_S)
    a.ip("address", "add", "10.0.0.66/32", "dev", "eth0")
    b.ip("neighbour", "replace", "10.0.0.66", "lladdr", a.mac, "dev", "eth0")
    with b.listening() as arrivals:
        spoofed = a.sent_from("10.0.0.66", B)
        honest = a.stream(B, count=1, size=100, kbps=1000)
        arrivals.settle()
    assert spoofed == honest == 1 and len(arrivals.numbers) == 1


@pytest.mark.parametrize(
    "break_it",
    [
        ["tc", "qdisc", "del", "dev", TAP_A, "root"],
        ["tc", "qdisc", "del", "dev", TAP_A, "ingress"],
        ["tc", "filter", "del", "dev", TAP_A, "ingress"],
        ["tc", "qdisc", "del", "dev", SHAPER_A, "root"],
        ["ip", "link", "del", SHAPER_A],
        ["ip", "link", "set", SHAPER_A, "down"],
    ],
    ids=" ".join,
)
def test_a_rate_that_is_taken_away_is_back_at_once(
    hypervisor: Host, vms: tuple[TapVm, TapVm], break_it: list[str]
) -> None:
    """The kernel tells; the agent looks at everything only once a minute."""
    hypervisor.plug("a", spec(ingress_kbps=RATE, egress_kbps=RATE))
    whole = state(hypervisor)
    hypervisor.sh(*break_it)
    wait_for(lambda: state(hypervisor) == whole, 30, "the limits are back")
    assert vms[0].pings(B, wait_s=ANSWER_S)


def state(host: Host) -> object:
    if SHAPER_A not in host.links():
        return None
    turned = host.sh("tc", "filter", "show", "dev", TAP_A, "ingress")
    kinds = [qdisc(host, device)["options"] for device in (TAP_A, SHAPER_A)]
    return kinds, f"Redirect to device {SHAPER_A}" in turned, host.link(SHAPER_A)["flags"]


@pytest.mark.parametrize(
    ("qos", "status", "code"),
    [
        ({"egress_kbps": 8}, 422, "invalid_request"),
        ({"ingress_kbps": 400_000_001}, 422, "invalid_request"),
        ({"min_egress_kbps": 100_000}, 409, "unsupported"),
    ],
)
def test_a_rate_that_cannot_be_is_refused(
    hypervisor: Host, qos: dict[str, int], status: int, code: str
) -> None:
    before = hypervisor.links()
    found, problem = hypervisor.put("a", spec(**qos))
    assert (found, problem["code"]) == (status, code) and hypervisor.links() == before


def test_rates_of_any_size_are_kept(hypervisor: Host) -> None:
    """Beyond 34 Gbit/s a rate no longer fits the 32 bits that tc once had for it."""
    for kbps in (1_000, 9_999_999, 100_000_000, 400_000_000):
        observed = hypervisor.plug("a", spec(ingress_kbps=kbps, egress_kbps=kbps))["observed"]
        assert (observed["ingress_kbps"], observed["egress_kbps"]) == (kbps, kbps)
        for device in (TAP_A, SHAPER_A):
            assert qdisc(hypervisor, device)["options"]["rate"] == kbps * 125
        assert hypervisor.changes() == []
    hypervisor.unplug("a")
