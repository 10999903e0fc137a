"""A VM behind a relay (``vdpa``) migrates between two agents, each with a PF, an OVS-DPDK and a store.

A neighbour on another VF of each NIC tells what reaches the VM: a MAC that is in the switch of a NIC takes
the frames of the neighbour there, wherever the VM runs. The VM is dpdk-testpmd, which answers ARP and pings.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drivers.vdpa.model import BRIDGE
from drivers.vf.memory import provisional_mac
from netplugin.host.announcement import announcement
from netplugin.host.ovs_rows import MAC_MARK
from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import entered, namespace, pings, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run, wait_for
from tests.lab.testpmd import Testpmd, TestpmdOptions
from tests.nested import nics
from tests.nested.nics import PF, WIRE, Nic
from tests.nested.vfs import DEADLINE_S, driver, vf_info

pytestmark = [
    pytest.mark.nested(cpus=2, memory_mb=2560, hugepages=400),
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

START_S = 240.0
MAC, ADDRESS = "52:54:00:00:00:01", "10.9.0.5"
SPEC: dict[str, Any] = {
    "vm_id": "vm1",
    "mac": MAC,
    "backend": "vdpa",
    "network": {"type": "vlan", "physical_network": "physnet1", "vlan_id": 100},
}
#: OVS must open the VF again for another MAC, also on this NIC.
TRUSTED = SPEC | {"vf": {"trusted": True}, "port_security": {"enabled": False}}
_RARP = 0x8035


@dataclass(frozen=True)
class Host:
    """``name`` is that of its namespace; the neighbour is in one of its own."""

    name: str
    pf: str
    functions: list[str]
    ovs: PrivateOvs
    agent: PrivateAgent

    @property
    def neighbour(self) -> str:
        return f"{self.name}-peer"

    def reaches(self) -> bool:
        """Whether the VM answers the neighbour here."""
        return pings(self.neighbour, ADDRESS)

    def state(self) -> Any:
        """All of its VFs, its ports, and its bridges."""
        drivers = {each: driver(each) for each in self.functions}
        ports = self.agent.get("/v1/ports")[1]
        return vf_info(self.pf, self.name), drivers, ports, self.ovs.vsctl("list-br")

    def step(self, phase: str, status: int = 200, **fields: Any) -> Any:
        answer, body = self.agent.call("POST", "/v1/ports/nic1:migrate", {"phase": phase, **fields})
        assert answer == status, body
        return body

    def port(self) -> Any:
        return self.agent.get("/v1/ports/nic1")[1]

    def phase(self) -> str:
        return str(self.port()["migration"]["phase"])

    def is_killed(self) -> None:
        """Its agent is killed and started again."""
        self.agent.kill()
        self.agent.start()

    def mac(self) -> str:
        """The MAC of the port's VF in the switch of the NIC."""
        return str(vf_info(self.pf, self.name)[self.port()["binding"]["vf_index"]]["address"])

    def is_closed(self) -> bool:
        """Whether the port forwards nothing: its VF has not the VM's MAC, and its flows drop all."""
        flows = self.ovs.ofctl("dump-flows", BRIDGE)
        assert (self.mac() == MAC) == ("output" in flows), flows
        assert self.mac() in (MAC, provisional_mac(MAC))
        return "output" not in flows

    def opened_with(self) -> str:
        """The MAC with which OVS has the VF open, where it says so."""
        [name] = self.ovs.vsctl("--bare", "--columns=name", "find", "Interface", "type=dpdk").split()
        return self.ovs.get("Interface", name, f"external_ids:{MAC_MARK}")

    @contextmanager
    def runs(self) -> Iterator[None]:
        """The VM runs here: its rings are there."""
        binding = self.port()["binding"]
        with Testpmd(Path(binding["socket_path"]), TestpmdOptions(mac=MAC, core=0)):
            self.ovs.wait_connected(binding["device"], DEADLINE_S)
            yield


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    nics.modprobe("vfio-pci", "8021q", "igbvf")
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
        stack.enter_context(neighbour(f"{name}-peer", name, pf, functions[0], number))
        config = {"per-port-memory": "true"}
        ovs = stack.enter_context(PrivateOvs(Path(f"/run/{name}"), other_config=config, netns=name))
        options = {
            "agent": {"enabled_backends": "vdpa", "operation_timeout": "120"},
            "sriov": {"devices": f"physnet1:{pf}#1-2"},
            "vdpa": {"guest_hugepages": "false"},
            "ovs": {"timeout": "60"},
        }
        agent = stack.enter_context(PrivateAgent(directory, ovs, options, netns=name))
        yield Host(name, pf, functions, ovs, agent)


@contextmanager
def neighbour(name: str, pf_host: str, pf: str, function: str, number: int) -> Iterator[None]:
    """A host on a VF, in the VLAN of the VM, which knows the VM's MAC for good."""
    setting = ["mac", f"52:54:00:00:0f:{number:02x}", "vlan", "100"]
    run(within(pf_host, ["ip", "link", "set", pf, "vf", "0", *setting]))
    (nics.device(function) / "driver_override").write_text("igbvf")
    Path("/sys/bus/pci/drivers_probe").write_text(function)
    with namespace(name):
        run(["ip", "link", "set", nics.interface(function), "netns", name, "name", "eth0"])
        for words in (
            "link set eth0 up",
            f"address add 10.9.0.{number}/24 dev eth0",
            f"neigh replace {ADDRESS} lladdr {MAC} dev eth0",
        ):
            run(within(name, ["ip", *words.split()]))
        yield


@contextmanager
def announced(at: Host) -> Iterator[Callable[[], int]]:
    """How often the neighbour there has heard where the VM is, from now on."""
    with entered(at.neighbour):
        ear = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_RARP))
    count = 0

    def received() -> int:
        nonlocal count
        while True:
            try:
                count += ear.recv(2048, socket.MSG_DONTWAIT) == announcement(MAC)
            except BlockingIOError:
                return count

    with ear:
        yield received


def wait_reached(hosts: tuple[Host, Host], why: str) -> None:
    """By the neighbours on both hosts."""
    for each in hosts:
        wait_for(each.reaches, DEADLINE_S, f"{each.name}: {why}", each.ovs.vswitchd.tail)


def milliseconds(do: Callable[[], object]) -> int:
    """How long it takes."""
    began = time.monotonic()
    do()
    return round((time.monotonic() - began) * 1e3)


def is_unreached(hosts: tuple[Host, Host]) -> bool:
    return not any(each.reaches() for each in hosts)


def plug(host: Host, spec: dict[str, Any]) -> None:
    status, body = host.agent.call("PUT", "/v1/ports/nic1", spec)
    assert status == 200, body


@pytest.mark.parametrize("spec", [SPEC, TRUSTED], ids=["open", "opened-again"])
def test_the_mac_goes_with_the_vm(hosts: tuple[Host, Host], spec: dict[str, Any]) -> None:
    one, two = hosts
    before = one.state(), two.state()
    marked = "" if spec is SPEC else provisional_mac(MAC)
    plug(one, spec)
    with one.runs():
        wait_reached(hosts, "the VM runs at the source")
        two.step("prepare", port=spec)
        assert two.is_closed() and not one.is_closed() and two.opened_with() == marked
        wait_reached(hosts, "the prepared VF takes nothing, also of its own NIC")
        two.is_killed()
        assert two.phase() == "prepared" and two.is_closed()
        wait_reached(hosts, "the destination has taken nothing")
    left_ms = milliseconds(lambda: one.step("leave"))
    assert one.is_closed() and one.opened_with() == marked
    one.is_killed()
    assert one.phase() == "left" and one.is_closed()
    with two.runs(), announced(one) as received:
        assert is_unreached(hosts), "it is closed on both"
        assert received() == 0
        activated_ms = milliseconds(lambda: two.step("activate"))
        reached_ms = milliseconds(lambda: wait_reached(hosts, "it runs at the destination"))
        print(
            f"leave {left_ms} ms, activate {activated_ms} ms, both neighbours answered {reached_ms} ms later"
        )
        assert not two.is_closed() and one.is_closed() and two.opened_with() == ""
        wait_for(lambda: received() >= 5, DEADLINE_S, "the network has heard of it")
        two.is_killed()
        assert two.phase() == "activated"
        wait_reached(hosts, "the agent was killed after activate")
        two.step("commit")
        one.step("commit", 204)
        assert one.state() == before[0]
        wait_reached(hosts, "the migration is over")
        assert two.agent.call("POST", "/v1/reconcile", {"dry_run": True})[1]["changes"] == []
    assert two.agent.call("DELETE", "/v1/ports/nic1")[0] == 204
    assert two.state() == before[1]


def test_the_agents_follow_the_guest(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    plug(one, SPEC)
    with one.runs():
        wait_reached(hosts, "the VM runs at the source")
        two.step("prepare", port=SPEC, activation="auto")
        one.step("leave", activation="auto")
        assert (one.phase(), two.phase()) == ("leaving", "prepared")
        wait_reached(hosts, "until it stops there")
    wait_for(lambda: one.phase() == "left", DEADLINE_S, "its guest has stopped")
    wait_for(one.is_closed, DEADLINE_S, "and its MAC has left the NIC")
    assert two.is_closed()
    with two.runs():
        reached_ms = milliseconds(lambda: wait_reached(hosts, "it runs at the destination"))
        print(f"both neighbours answered {reached_ms} ms after OVS had the rings")
        assert two.phase() == "activated" and not two.is_closed()
        two.step("commit")
        one.step("commit", 204)
    assert two.agent.call("DELETE", "/v1/ports/nic1")[0] == 204


def test_an_aborted_migration_gives_the_mac_back(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    before = one.state(), two.state()
    plug(one, SPEC)
    with one.runs():
        two.step("prepare", port=SPEC)
        one.step("leave")
        for each in hosts:
            each.is_killed()
        assert (one.phase(), two.phase()) == ("left", "prepared") and is_unreached(hosts)
        two.step("abort", 204)
        assert two.state() == before[1]
        with announced(two) as received:
            one.step("abort")
            wait_reached(hosts, "it is open again at the source")
            wait_for(lambda: received() >= 5, DEADLINE_S, "the network has heard of it")
        one.is_killed()
        wait_reached(hosts, "the agent was killed after abort")
    assert one.agent.call("DELETE", "/v1/ports/nic1")[0] == 204
    assert one.state() == before[0]
