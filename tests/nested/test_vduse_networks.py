"""VXLAN networks in mode vduse, in an agent that also has ports of dpdkvhostuser on them, over OVS 4.0.

The other host is a network namespace with the kernel's own VXLAN device, on a wire to the underlay's bridge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import namespace, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.vm import Vm
from tests.nested import nics
from tests.nested.vduse_host import OPTIONS, WAIT_S, devices, into, netdev, pings, served_by

pytestmark = [
    pytest.mark.long,
    # A guest of their own: the other tests in it have the machine's own OVS.
    pytest.mark.nested(cpus=2, memory_mb=2400, hugepages=400),
    pytest.mark.timeout(900),
]

UNDERLAY, NIC, WIRE = "br-underlay", "np-u0", "np-u1"
HERE, THERE = "10.9.0.1", "10.9.0.2"
#: Wide enough for VXLAN around 1,450 bytes.
MTU = "1600"
VNI = 5001
#: The last number of the address of the other host's own interface on the network.
FAR = 9


@pytest.fixture(scope="module")
def ovs() -> Iterator[PrivateOvs]:
    with served_by("forky") as private:
        yield private


@contextmanager
def other_host(ovs: PrivateOvs) -> Iterator[str]:
    """A peer on the network; the underlay's bridge has the other end of its wire, and our address."""
    nics.modprobe("veth", "vxlan")
    ends = ["type", "veth", "peer", "name", WIRE, "mtu", MTU]
    run(["ip", "link", "add", NIC, "mtu", MTU, *ends])
    with namespace("np-far") as far:
        run(["ip", "link", "set", WIRE, "netns", far])
        run(["ip", "link", "set", NIC, "up"])
        ovs.vsctl("add-br", UNDERLAY, "--", "set", "bridge", UNDERLAY, "datapath_type=netdev")
        ovs.vsctl("set", "interface", UNDERLAY, f"mtu_request={MTU}", "--", "add-port", UNDERLAY, NIC)
        give_address()
        tunnel = f"type vxlan id {VNI} local {THERE} remote {HERE} dstport 4789 noudpcsum".split()
        for words in (
            ["address", "add", f"{THERE}/24", "dev", WIRE],
            ["link", "set", WIRE, "up"],
            ["link", "add", "vx", "mtu", "1450", *tunnel],
            ["address", "add", f"10.7.0.{FAR}/24", "dev", "vx"],
            ["link", "set", "vx", "up"],
        ):
            run(within(far, ["ip", *words]))
        yield far
        ovs.vsctl("del-br", UNDERLAY)


def give_address() -> None:
    """The bridge's own device may go with vswitchd, and its address with it."""
    wait_for(lambda: Path(f"/sys/class/net/{UNDERLAY}").exists(), WAIT_S, "the bridge has its device")
    run(["ip", "address", "replace", f"{HERE}/24", "dev", UNDERLAY])
    run(["ip", "link", "set", UNDERLAY, "up"])


@pytest.fixture
def agent(ovs: PrivateOvs) -> Iterator[PrivateAgent]:
    """With both backends, each with its worker."""
    options = {
        **OPTIONS,
        "agent": {"enabled_backends": "dpdkvhostuser,vdpa"},
        "ovs": {**OPTIONS["ovs"], "local_ip": HERE},
    }
    with other_host(ovs), PrivateAgent(Path("/run/np-agent-networks"), ovs, options) as running:
        yield running
        for port in call(running, "GET", "/v1/ports"):
            call(running, "DELETE", f"/v1/ports/{port['port_id']}")
        assert ovs.vsctl("list-br").split() == [UNDERLAY] and devices() == ([], [])


def call(agent: PrivateAgent, method: str, path: str, body: Any = None) -> Any:
    status, answer = agent.call(method, path, body)
    assert status in (200, 204), (status, answer)
    return answer


def plug(agent: PrivateAgent, port_id: str, number: int, **fields: Any) -> Any:
    """The binding of a port on the network."""
    spec = netdev(number) | {"network": {"type": "vxlan", "network_id": "blue"}} | fields
    return SimpleNamespace(**call(agent, "PUT", f"/v1/ports/{port_id}", spec)["binding"])


def planned(agent: PrivateAgent) -> list[Any]:
    report = call(agent, "POST", "/v1/reconcile", {"dry_run": True})
    assert report["errors"] == []
    changes: list[Any] = report["changes"]
    return changes


def test_a_network_of_both_backends_and_another_host(agent: PrivateAgent, ovs: PrivateOvs) -> None:
    def meet(source: str, number: int) -> None:
        wait_for(lambda: pings(source, number), WAIT_S, f"{source} reaches {number}", ovs.vswitchd.tail)

    both = {"type": "vxlan", "vni": VNI, "peers": [HERE, THERE]}
    call(agent, "PUT", "/v1/networks/blue", both)
    with namespace("na"), namespace("nb"):
        for number, name in ((1, "a"), (2, "b")):
            into(f"n{name}", plug(agent, name, number), number)
        meet("na", 2)
        meet("na", FAR)
        binding = plug(agent, "v", 3, backend="dpdkvhostuser", attachment=None)
        with Vm("nv", binding.socket_path, "52:54:00:00:00:03", "10.7.0.3", 1450):
            meet("nv", 1)
            meet("nv", FAR)
            assert planned(agent) == []
            call(agent, "PUT", "/v1/networks/blue", {**both, "peers": [HERE]})
            assert not pings("na", FAR, 3) and not pings("nv", FAR, 3), "it is no peer any more"
            call(agent, "PUT", "/v1/networks/blue", both)
            meet("na", FAR)
            # The last port of the one backend goes, and its first comes: the other is not cut.
            for name in ("a", "b"):
                call(agent, "DELETE", f"/v1/ports/{name}")
            assert pings("nv", FAR, 3)
    with namespace("na"):
        into("na", plug(agent, "a", 1), 1)
        call(agent, "DELETE", "/v1/ports/v")
        meet("na", FAR)
        ovs.kill_vswitchd()
        ovs.start_vswitchd()
        give_address()
        meet("na", FAR)
        wait_for(lambda: planned(agent) == [], WAIT_S, "nothing is left to do")
