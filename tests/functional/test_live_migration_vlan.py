"""A guest on a VLAN network under traffic migrates between two hypervisors with OVS-DPDK."""

from __future__ import annotations

import pytest

from tests.bench.live_migration import moved_under_traffic, row
from tests.lab.hypervisor import OVS_BACKEND, Nic
from tests.lab.mishaps import assert_one_side
from tests.lab.traveller import Traveller, Way
from tests.lab.two_hosts import MTU, PEER, PEER_DEVICE, two_hosts
from tests.lab.vlan_wire import carry_vlan

VLAN = 100


@pytest.mark.long
def test_a_guest_on_a_vlan_network_migrates_there_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    with two_hosts([OVS_BACKEND]) as hosts:
        carry_vlan(PEER, PEER_DEVICE, VLAN)
        traveller = Traveller(hosts, Nic(OVS_BACKEND, 3, vlan_id=VLAN, mtu=MTU))
        traveller.boot()
        traveller.configure()
        for way in (Way.AUTO, Way.MANUAL, Way.AUTO):
            figures = moved_under_traffic(traveller, way)
            with capsys.disabled():
                print(f"\n  {way.value}: {row(figures.cells())}", end="")
            assert figures.stream_survived
            assert_one_side(traveller)
