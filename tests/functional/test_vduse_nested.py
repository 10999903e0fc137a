"""Ports of a VM and a container in mode vduse, in short. The long forms are tests/nested/test_vduse_*.py.

It is here because the OVS of tests/nested lives as long as the tests there, and two cannot share a host.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.driven import Driven
from tests.lab.namespaces import ANSWER_S, namespace, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.vm import DEVICE, Vm
from tests.nested.vduse_host import (
    WAIT_S,
    address,
    agent_on,
    assert_nothing_left,
    delete_refused,
    gone,
    into,
    mac,
    make_spec,
    netdev,
    pings,
    removed,
    served_by,
    settled,
)

# In the guest of those with OVS-DPDK.
pytestmark = [pytest.mark.nested(cpus=2, memory_mb=2560, hugepages=480), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ovs() -> Iterator[PrivateOvs]:
    with served_by("forky") as private:
        yield private


@pytest.fixture
def process(ovs: PrivateOvs) -> Iterator[Driven]:
    with agent_on(ovs, Path("/run/np-vduse-agent")) as made:
        yield made


def test_a_vm_and_a_container_on_one_vlan(process: Driven, ovs: PrivateOvs, tmp_path: Path) -> None:
    """From the plug to the unplug, with a restart of vswitchd between."""

    def meet(why: str) -> None:
        wait_for(lambda: pings("na", 2), WAIT_S, why, ovs.vswitchd.tail)

    with namespace("nb"):
        into("nb", process.put("b", netdev(2)), 2)
        binding: Any = process.put("a", make_spec(1))
        with Vm("na", binding.vhost_vdpa_device, mac(1), address(1), log=tmp_path / "testpmd.log"):
            meet("the VM meets the container")
            process.put("b", netdev(2, 200))
            assert not pings("na", 2, 2), "on another VLAN it does not"
            process.put("b", netdev(2))
            meet("they meet again")
            use(mac(9))
            assert not pings("na", 2, 2), "from another MAC nothing is heard"
            use(mac(1))
            ovs.kill_vswitchd()
            ovs.start_vswitchd()
            process.wait_for_ovs()
            wait_for(lambda: settled(process), WAIT_S, "it is right again")
            meet("they meet after a restart")
            delete_refused(process, "a")
            assert pings("na", 2, wait_s=ANSWER_S), "the VM that holds its device keeps its network"
        wait_for(lambda: gone(process, "a"), WAIT_S, "the port goes with the VM")
        removed(process, "b")
    assert_nothing_left(ovs)


def use(given: str) -> None:
    """Give the VM's NIC a MAC."""
    run(within("na", ["ip", "link", "set", DEVICE, "address", given]))
