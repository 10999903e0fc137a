"""Bonds as uplinks: made from the configuration, reported, and carrying on when a link dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.functional.conftest import BASE, make_spec
from tests.functional.hosts_ovs import Host, clean, host, nic
from tests.lab.namespaces import connect, within
from tests.lab.processes import run, wait_for
from tests.lab.switch import SWITCH, switch, wire
from tests.lab.testpmd import Forward, Testpmd, TestpmdOptions

GATEWAY = "10.0.0.100"


def _findings(on: Host) -> dict[str, dict[str, Any]]:
    status, found = on.agent.get("/v1/host/checks")
    assert status == 200
    return {finding["id"]: finding for finding in found}


def _uplink(on: Host) -> tuple[str, str, str, int]:
    """The name, mode, LACP and number of members of the one uplink."""
    name = on.ovs.vsctl(
        "--bare", "--columns=name", "find", "Port", "external_ids:netplugin-uplink=physnet1"
    ).strip()
    mode, lacp = (on.ovs.get("Port", name, column) for column in ("bond_mode", "lacp"))
    members = on.ovs.vsctl("get", "Port", name, "interfaces").count(",") + 1
    return name, mode, lacp, members


def _restart(on: Host, **values: str) -> None:
    on.agent.stop()
    on.agent.groups["ovs"].update(values)
    on.agent.start()


@contextmanager
def _gateway() -> Iterator[None]:
    """Somebody on the switch itself, untagged, who answers pings."""
    run(within(SWITCH, ["ip", "address", "add", f"{GATEWAY}/24", "dev", "sw"]))
    yield


def test_one_device_becomes_a_bond_and_its_mode_changes_at_the_agents_start() -> None:
    with switch(), host(1, uplinks=["eth2"]) as one, _gateway(), clean(one):
        with one.vm("a", make_spec(1, vlan_id=None), "10.0.0.1") as a:
            wait_for(lambda: a.pings(GATEWAY), 20, "the VM reaches the switch")
            single = _uplink(one)
            assert single[1:] == ("[]", "[]", 1)
            wire(one.name, "eth3")
            two = "'" + ",".join(f'"physnet1:{nic(n, f"eth{n + 1}")}"' for n in (1, 2)) + "'"
            _restart(one, uplinks=two)
            name, *bond = _uplink(one)
            assert name != single[0] and bond == ["active-backup", "off", 2]
            assert one.planned() == []
            wait_for(lambda: a.pings(GATEWAY), 20, "the VM reaches the switch over the bond")
            hash_of = _findings(one)["bond-hash"]
            assert hash_of["status"] == "ok" and "one of its 2 links carries all" in hash_of["found"]
            _restart(one, bonds="physnet1:balance-slb")
            assert _uplink(one) == (name, "balance-slb", "off", 2)
            hash_of = _findings(one)["bond-hash"]
            assert hash_of["status"] == "warn" and "1 of them for 2 links" in hash_of["found"]
            one.plug("b", make_spec(2, vlan_id=None))
            assert _findings(one)["bond-hash"]["status"] == "ok"
            _restart(one, uplinks=f"'\"physnet1:{nic(1, 'eth2')}\"'")
            assert _uplink(one) == single
            wait_for(lambda: a.pings(GATEWAY), 20, "the VM reaches the switch over one device")


@contextmanager
def _cable(on: Host, number: int) -> Iterator[Testpmd]:
    """A cable that can be cut: testpmd between a vhost-user NIC of OVS and the switch.

    DPDK's other drivers of kernel devices say that a link is up whatever the device says.
    """
    path, end = BASE / on.name / f"cable{number}", f"cable{number}"
    run(within(SWITCH, ["ip", "link", "add", end, "type", "veth", "peer", "name", f"{end}-sw"]))
    for device in (end, f"{end}-sw"):
        run(within(SWITCH, ["ip", "link", "set", device, "up"]))
    run(within(SWITCH, ["ip", "link", "set", f"{end}-sw", "master", "sw"]))
    options = TestpmdOptions(forward=Forward.IO, wire=end, netns=SWITCH, mac=f"02:00:00:00:00:0{number}")
    with Testpmd(path, options) as cable:
        yield cable


def test_a_link_that_dies_is_reported_and_traffic_goes_on() -> None:
    entries = [f'"physnet1:net_vhost{n},iface={BASE / "np-h1" / f"cable{n}"},client=1"' for n in (1, 2)]
    more = {"uplinks": "'" + ",".join(entries) + "'"}
    with (
        switch(),
        host(1, more=more) as one,
        _gateway(),
        clean(one),
        _cable(one, 1) as first,
        _cable(one, 2) as second,
        one.vm("a", make_spec(1, vlan_id=None), "10.0.0.1") as a,
    ):
        wait_for(lambda: a.pings(GATEWAY), 30, "the VM reaches the switch")
        wait_for(lambda: "bond-link-down" not in _findings(one), 30, "both links are up")
        name = _uplink(one)[0]
        active = one.ovs.appctl("bond/show", name).split("active member mac: ")[1].split("\n")[0]
        cut = first if _member(one, 1) in active else second
        cut.kill()
        wait_for(lambda: "bond-link-down" in _findings(one), 30, "the dead link is reported")
        reported = _findings(one)["bond-link-down"]
        assert reported["status"] == "warn" and "traffic goes on over" in reported["found"]
        wait_for(lambda: a.pings(GATEWAY), 30, "the VM reaches the switch over the other link")
        assert one.agent.get("/v1/ports/a")[1]["state"] == "active"
        cut.start()
        wait_for(lambda: "bond-link-down" not in _findings(one), 30, "the link is back")


def _member(on: Host, number: int) -> str:
    """The name of the member with this device."""
    return on.ovs.vsctl(
        "--bare",
        "--columns=name",
        "find",
        "Interface",
        f'options:dpdk-devargs="net_vhost{number},iface={BASE / on.name / f"cable{number}"},client=1"',
    ).strip()


def test_lacp_with_a_switch_that_does_it_and_one_that_does_not() -> None:
    more = {"bonds": "physnet1:lacp"}
    eth = ["eth2", "eth3"]
    with (
        switch(),
        host(1, uplinks=eth, cabled=False, more=more) as one,
        host(2, uplinks=eth, cabled=False, more=more) as other,
        clean(one, other),
    ):
        for device in eth:
            connect(one.name, device, other.name, device)
        one.plug("a", make_spec(1, vlan_id=100))
        assert _uplink(one)[1:] == ("balance-tcp", "active", 2)
        wait_for(lambda: "bond-lacp" in _findings(one), 60, "the missing LACP peer is reported")
        reported = _findings(one)["bond-lacp"]
        assert reported["status"] == "fail" and "does not answer LACP" in reported["found"]
        one.agent.call("POST", "/v1/reconcile", {})
        assert one.agent.get("/v1/ports/a")[1]["state"] == "degraded"
        with (
            one.vm("a", make_spec(1, vlan_id=100), "10.0.0.1") as a,
            other.vm("b", make_spec(2, vlan_id=100), "10.0.0.2") as b,
        ):
            wait_for(lambda: a.pings(b.address), 90, "the VMs reach each other over the bonds")
            wait_for(lambda: "bond-lacp" not in _findings(one), 60, "LACP is negotiated")
            assert _findings(one)["bond-hash"]["status"] == "ok"
            one.agent.call("POST", "/v1/reconcile", {})
            assert one.agent.get("/v1/ports/a")[1]["state"] == "active"
