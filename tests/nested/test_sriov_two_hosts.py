"""A VM with a VF migrates between two agents, each with a PF, a namespace and a store of its own.

Its virtio NIC is on a bridge with the PF. A peer on each host tells what reaches the VM there: a MAC that
is left in the switch of a NIC takes the frames of the peer on that host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import namespace, within
from tests.lab.processes import run, wait_for
from tests.lab.traffic_taps import TapVm
from tests.nested import nics
from tests.nested.nics import PF, WIRE, Nic
from tests.nested.test_sriov import START_S, make_spec, put, vm, with_libvirt
from tests.nested.vfs import DEADLINE_S, driver, vf_info

pytestmark = [pytest.mark.nested, pytest.mark.long, pytest.mark.timeout(900)]

SPEC = make_spec(vf={"teaming": True})
MAC, ADDRESS = SPEC["mac"], "10.9.0.5"


@dataclass(frozen=True)
class Host:
    """``name`` is that of its namespace."""

    name: str
    pf: str
    functions: list[str]
    agent: PrivateAgent
    peer: TapVm

    def state(self) -> Any:
        """All of its VFs, and its ports."""
        drivers = {each: driver(each) for each in self.functions}
        return vf_info(self.pf, self.name), drivers, self.agent.get("/v1/ports")[1]

    def step(self, phase: str, status: int = 200, **fields: Any) -> Any:
        answer, body = self.agent.call("POST", "/v1/ports/nic1:migrate", {"phase": phase, **fields})
        assert answer == status, body
        return body

    def phase(self) -> str:
        return str(self.agent.get("/v1/ports/nic1")[1]["migration"]["phase"])

    def is_killed(self) -> None:
        """Its agent is killed and started again."""
        self.agent.kill()
        self.agent.start()

    def has_mac(self) -> bool:
        """Whether the switch of the NIC has the VM's MAC for a VF."""
        return MAC in {vf["address"] for vf in vf_info(self.pf, self.name).values()}

    @contextmanager
    def runs(self) -> Iterator[None]:
        """The VM runs here, with its virtio NIC."""
        standby = self.agent.get("/v1/ports/nic1")[1]["binding"]["standby_port_id"]
        tap = self.agent.get(f"/v1/ports/{standby}")[1]["binding"]["device"]
        with TapVm("vm", self.name, tap, MAC, ADDRESS):
            yield


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    nics.modprobe("vfio-pci", "8021q")
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr("tests.lab.agent.READY_DEADLINE_S", START_S)
        home = tmp_path_factory.mktemp("hosts")
        yield (
            stack.enter_context(host("np-one", PF, home / "one", 11)),
            stack.enter_context(host("np-two", WIRE, home / "two", 12)),
        )


@contextmanager
def host(name: str, nic: Nic, directory: Path, number: int) -> Iterator[Host]:
    with ExitStack() as stack:
        stack.enter_context(namespace(name))
        pf = nics.interface(nic.pci)
        run(["ip", "link", "set", pf, "netns", name])
        stack.callback(run, within(name, ["ip", "link", "set", pf, "netns", "1"]))
        run(within(name, ["ip", "link", "set", pf, "up"]))
        functions = stack.enter_context(nics.virtual_functions(nic, 3))
        # On the emulated NIC frames of this VLAN reached the other PF only once a VF of each had it.
        run(within(name, ["ip", "link", "set", pf, "vf", "2", "vlan", "100"]))
        # It was reset for its VFs.
        carrier = within(name, ["cat", f"/sys/class/net/{pf}/carrier"])
        wait_for(lambda: run(carrier).strip() == "1", DEADLINE_S, f"{pf} has a carrier")
        options = {
            "agent": {"enabled_backends": "sriov,linuxbridge", "teaming_backend": "linuxbridge"},
            "sriov": {"devices": f"physnet1:{pf}#0-1"},
            "linuxbridge": {"physical_interfaces": f"physnet1:{pf}"},
        }
        agent = stack.enter_context(PrivateAgent(directory, options=options, netns=name))
        spec = make_spec(number, backend="linuxbridge")
        tap = put(agent, "peer", spec)["binding"]["device"]
        # Its VLAN device would outlive the namespace for a while, and keep the next test from making one.
        stack.callback(agent.call, "DELETE", "/v1/ports/peer")
        peer = stack.enter_context(TapVm(f"{name}-peer", name, tap, spec["mac"], f"10.9.0.{number}"))
        # The neighbour is known for good: where the VM is found is up to the NICs and bridges alone.
        peer.ip("neigh", "replace", ADDRESS, "lladdr", MAC, "dev", "eth0")
        yield Host(name, pf, functions, agent, peer)


def wait_reached(hosts: tuple[Host, Host], why: str) -> None:
    """From the peers on both hosts."""
    for each in hosts:
        wait_for(lambda peer=each.peer: peer.pings(ADDRESS), DEADLINE_S, f"{each.name}: {why}")


def is_unreached(hosts: tuple[Host, Host]) -> bool:
    return not any(each.peer.pings(ADDRESS) for each in hosts)


def test_a_vf_is_claimed_there_before_it_is_given_up_here(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    one, two = hosts
    before = one.state()
    first = put(one.agent, "nic1", SPEC)["binding"]["pci_address"]
    with one.runs():
        wait_reached(hosts, "the VM is reached by its virtio NIC")
        with with_libvirt(one.pf, MAC, one.name), vm(first, tmp_path / "one.log"):
            second = two.step("prepare", port=SPEC)["binding"]["pci_address"]
            assert driver(second) == "vfio-pci" and not two.has_mac()
            assert one.has_mac(), "the source has given up nothing"
            one.step("leave", 409)
        wait_for(lambda: not one.has_mac(), DEADLINE_S, "the NIC of the source has forgotten the MAC")
        wait_reached(hosts, "the virtio NIC has its frames, also those from the source's NIC")
        two.is_killed()
        assert two.phase() == "prepared" and driver(second) == "vfio-pci" and not two.has_mac()
        wait_reached(hosts, "the destination has taken nothing")
        one.step("leave")
        one.is_killed()
        assert one.phase() == "left" and is_unreached(hosts)
    with two.runs():
        assert is_unreached(hosts), "it is closed on both"
        two.step("activate")
        wait_reached(hosts, "it runs at the destination, and the source's NIC sends it on")
        two.is_killed()
        assert two.phase() == "activated"
        wait_reached(hosts, "the agent was killed after activate")
        assert "hostdev" in two.step("commit")["binding"]["interface_xml"]
        one.step("commit", 204)
        assert one.state() == before
        with with_libvirt(two.pf, MAC, two.name), vm(second, tmp_path / "two.log"):
            assert two.has_mac() and not one.has_mac()
            wait_for(lambda: one.peer.pings(ADDRESS), DEADLINE_S, "the VM has its VF there")
        wait_for(lambda: not two.has_mac(), DEADLINE_S, "and gives it back")
    assert two.agent.call("DELETE", "/v1/ports/nic1")[0] == 204


def test_an_aborted_migration_leaves_nothing_at_the_destination(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    here, there = one.state(), two.state()
    put(one.agent, "nic1", SPEC)
    with one.runs():
        two.step("prepare", port=SPEC)
        one.step("leave")
        for each in hosts:
            each.is_killed()
        assert (one.phase(), two.phase()) == ("left", "prepared") and is_unreached(hosts)
        two.step("abort", 204)
        assert two.state() == there
        one.step("abort")
        wait_reached(hosts, "it is open again at the source")
        one.is_killed()
        wait_reached(hosts, "the agent was killed after abort")
    assert one.agent.call("DELETE", "/v1/ports/nic1")[0] == 204
    assert one.state() == here
