"""The sriov backend on VFs of QEMU's emulated Intel 82576, behind an emulated IOMMU."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from drivers.vf.kernel import LIBVIRT_STATE
from tests.docs.unit_file import settings
from tests.lab.agent import PrivateAgent
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.namespaces import ANSWER_S, namespace, within
from tests.lab.processes import Daemon, run, wait_for
from tests.lab.traffic_taps import TapVm
from tests.nested import nics
from tests.nested.host_apply import Host
from tests.nested.nics import PF
from tests.nested.vfs import (
    DEADLINE_S,
    FAR,
    NO_MAC,
    VFS,
    driver,
    functions,
    ping,
    vf_info,
    vf_macs,
    whole_state,
)

pytestmark = [pytest.mark.nested, pytest.mark.timeout(600)]

START_S = 180.0


# -- the NIC, the wire, the agent, and the VM ----------------------------------------------------


@pytest.fixture(scope="module")
def one_agent(pf: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateAgent]:
    """One for all tests: without KVM its start takes a while, and on a busy machine a long while."""
    options = {
        "agent": {"enabled_backends": "sriov,linuxbridge", "teaming_backend": "linuxbridge"},
        "sriov": {"devices": f"physnet1:{pf}#0-3,physnet1:{pf}#4-6"},
        "linuxbridge": {"physical_interfaces": f"physnet1:{pf}"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.lab.agent.READY_DEADLINE_S", START_S)
        # With the powers that the systemd unit leaves it, and no others.
        powers = settings()["CapabilityBoundingSet"]
        home = tmp_path_factory.mktemp("agent")
        with PrivateAgent(home, options=options, capabilities=powers) as private:
            yield private


@pytest.fixture
def agent(one_agent: PrivateAgent) -> Iterator[PrivateAgent]:
    """Without ports, before and after."""
    yield one_agent
    ids = [port["port_id"] for port in one_agent.get("/v1/ports")[1]]
    if ids:
        one_agent.call("POST", "/v1/ports:batch", {"delete": ids})
    assert one_agent.get("/v1/ports")[1] == []


def make_spec(number: int = 1, vlan_id: int | None = 100, **fields: Any) -> dict[str, Any]:
    kind = "flat" if vlan_id is None else "vlan"
    return {
        "vm_id": f"vm{number}",
        "mac": f"52:54:00:00:00:{number:02x}",
        "backend": "sriov",
        "network": {"type": kind, "physical_network": "physnet1", "vlan_id": vlan_id},
        **fields,
    }


def put(agent: PrivateAgent, port_id: str, spec: dict[str, Any]) -> Any:
    status, port = agent.call("PUT", f"/v1/ports/{port_id}", spec)
    assert status == 200, port
    return port


def delete(agent: PrivateAgent, port_id: str) -> None:
    assert agent.call("DELETE", f"/v1/ports/{port_id}") == (204, None)


@contextmanager
def vm(address: str, log: Path, queues: int = 1) -> Iterator[Daemon]:
    """dpdk-testpmd in the VM's place: it has the VF open, and answers ARP and pings."""
    args = [
        "stdbuf",
        "-oL",
        "dpdk-testpmd",
        "--lcores",
        "0@0,1@0",
        "-m",
        "128",
        "--in-memory",
        "--no-telemetry",
        "-a",
        address,
        "--",
        "--forward-mode=icmpecho",
        "--auto-start",
        "--total-num-mbufs=4096",
        "--nb-cores=1",
        "--stats-period=5",
        f"--rxq={queues}",
        f"--txq={queues}",
    ]
    with Daemon("testpmd", args, log) as testpmd:
        testpmd.wait_for(lambda: "start packet forwarding" in log.read_text(), DEADLINE_S, "it runs")
        yield testpmd


# -- what a VM gets ------------------------------------------------------------------------------


def test_a_vf_with_its_mac_and_vlan_on_the_wire_and_back(
    pf: str, agent: PrivateAgent, far: str, tmp_path: Path
) -> None:
    before = whole_state(pf, functions())
    [sriov] = [each for each in agent.get("/v1/backends")[1] if each["name"] == "sriov"]
    assert sriov["features"]["max_queues"] == 2
    spec = make_spec(vf={"vlan_qos": 3}, qos={"egress_kbps": 200_000}, queues=2)
    port = put(agent, "nic1", spec)
    binding = port["binding"]
    address = binding["pci_address"]
    assert (binding["vif_type"], binding["vf_index"], binding["pf"]) == ("hostdev", 0, pf)
    reported = vf_info(pf)[0]
    assert reported["address"] == spec["mac"]
    assert (reported["vlan_list"][0]["vlan"], reported["vlan_list"][0]["qos"]) == (100, 3)
    assert (reported["spoofchk"], reported["trust"]) == (True, False)
    assert reported["rate"]["max_tx"] == 200
    assert driver(address) == "vfio-pci"
    with vm(address, tmp_path / "vm.log", queues=2) as testpmd:
        assert spec["mac"].upper() in testpmd.log.read_text()
        wait_for(lambda: ping("10.9.0.5"), DEADLINE_S, "the VM answers on VLAN 100", testpmd.tail)
        assert not ping("10.8.0.5"), "and on no other"
        neighbours = run(within(FAR, ["ip", "neigh", "show", "10.9.0.5"]))
        assert spec["mac"] in neighbours
        [mine] = [v for v in agent.get("/v1/vfs")[1] if v["pci_address"] == address]
        assert (mine["state"], mine["port_id"]) == ("allocated", "nic1")
        status, problem = agent.call("DELETE", "/v1/ports/nic1")
        assert (status, problem["code"]) == (409, "conflict") and "in use" in problem["detail"]
        assert ping("10.9.0.5", wait_s=ANSWER_S), "a late delete takes nothing from a VM that runs"
    wait_for(lambda: agent.get("/v1/ports/nic1")[0] == 404, DEADLINE_S, "the port goes with the VM")
    assert whole_state(pf, functions()) == before


def test_sixteen_plugs_for_seven_vfs(pf: str, agent: PrivateAgent) -> None:
    together = threading.Barrier(16)

    def plug(number: int) -> tuple[int, Any]:
        together.wait()
        return agent.call("PUT", f"/v1/ports/p{number}", make_spec(number + 1))

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(plug, range(16)))
    ports = [port for status, port in answers if status == 200]
    refused = [problem for status, problem in answers if status != 200]
    assert {port["binding"]["pci_address"] for port in ports} == set(functions())
    assert [problem["code"] for problem in refused] == ["capacity_exhausted"] * 9
    assert {vf["state"] for vf in agent.get("/v1/vfs")[1]} == {"claimed"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"qos": {"min_egress_kbps": 50_000}}, []),
        ({"vf": {"link_state": "enable"}}, []),
        ({"vf": {"vlan_proto": "802.1ad"}}, ["vf.vlan_proto"]),
        ({"queues": 3}, ["queues"]),
    ],
)
def test_what_igb_does_not_support_is_refused_and_the_vf_as_before(
    pf: str, agent: PrivateAgent, fields: dict[str, Any], named: list[str]
) -> None:
    before = whole_state(pf, functions())
    status, problem = agent.call("PUT", "/v1/ports/nic1", make_spec(**fields))
    assert (status, problem["code"]) == (409, "unsupported"), problem
    assert [error["field"] for error in problem["errors"]] == named
    assert whole_state(pf, functions()) == before
    assert {vf["state"] for vf in agent.get("/v1/vfs")[1]} == {"available"}
    assert agent.get("/v1/ports")[1] == []


def test_a_vf_is_trusted_or_has_port_security_and_never_both(pf: str, agent: PrivateAgent) -> None:
    """A trusted VF's driver sets its MAC (net/core/rtnetlink.c, IFLA_VF_TRUST), and spoofchk checks
    the MAC that was set."""
    before = whole_state(pf, functions())
    for fields in ({}, {"port_security": {"enabled": True}}):
        status, problem = agent.call("PUT", "/v1/ports/nic1", make_spec(vf={"trusted": True}, **fields))
        assert (status, problem["code"], problem["step"]) == (422, "invalid_request", "validate")
        assert [error["field"] for error in problem["errors"]] == ["vf.trusted"]
    assert agent.get("/v1/ports")[1] == [] and whole_state(pf, functions()) == before
    put(agent, "nic1", make_spec(vf={"trusted": True}, port_security={"enabled": False}))
    assert (vf_info(pf)[0]["spoofchk"], vf_info(pf)[0]["trust"]) == (False, True)
    status, problem = agent.call("PUT", "/v1/ports/nic1", make_spec(vf={"trusted": True}))
    assert status == 422 and agent.get("/v1/ports/nic1")[1]["state"] == "active"
    assert (vf_info(pf)[0]["spoofchk"], vf_info(pf)[0]["trust"]) == (False, True)
    delete(agent, "nic1")
    assert whole_state(pf, functions()) == before


def test_vfs_that_no_vlan_confines_are_reported(pf: str, agent: PrivateAgent) -> None:
    put(agent, "nic1", make_spec(1))
    put(agent, "nic2", make_spec(2, vlan_id=None))
    [reported] = [f for f in agent.get("/v1/host/checks")[1] if f["id"].startswith("vf-flat")]
    assert reported["id"] == f"vf-flat-{PF.pci}" and reported["status"] == "warn"
    assert "(nic2)" in reported["found"] and "igb_set_vf_vlan_msg" in reported["found"]


def test_a_vf_that_the_host_uses_is_not_given_out(pf: str, agent: PrivateAgent) -> None:
    """The first three are up, on a bridge and in a container's network namespace."""
    used = functions()[:3]
    up, bridged, contained = (nics.interface(address) for address in used)
    words = (f"{up} is up", f"{bridged} is enslaved", "in another network namespace")
    before = whole_state(pf, functions())
    run(["ip", "link", "add", "br7", "type", "bridge"])
    with namespace("container"):
        try:
            run(["ip", "link", "set", up, "up"])
            run(["ip", "link", "set", bridged, "master", "br7"])
            run(["ip", "link", "set", contained, "netns", "container"])
            states = {vf["pci_address"]: vf for vf in agent.get("/v1/vfs")[1]}
            for address, why in zip(used, words, strict=True):
                assert states[address]["state"] == "unusable" and why in states[address]["reason"]
                status, problem = agent.call("PUT", "/v1/ports/nic1", make_spec(vf={"pci_address": address}))
                assert (status, problem["code"]) == (409, "conflict") and why in problem["detail"]
            port = put(agent, "nic1", make_spec())
            assert port["binding"]["pci_address"] == functions()[3]
            assert [driver(address) for address in used] == ["igbvf"] * 3
        finally:
            run(["ip", "-n", "container", "link", "set", contained, "netns", "1"])
            run(["ip", "link", "set", up, "down"])
            run(["ip", "link", "del", "br7"])
    delete(agent, "nic1")
    assert whole_state(pf, functions()) == before


def test_a_delete_waits_for_a_nic_that_was_renamed(pf: str, agent: PrivateAgent) -> None:
    before = whole_state(pf, functions())
    address = put(agent, "nic1", make_spec())["binding"]["pci_address"]

    def rename(old: str, new: str) -> None:
        run(["ip", "link", "set", old, "down"])
        run(["ip", "link", "set", old, "name", new])
        run(["ip", "link", "set", new, "up"])

    rename(pf, "renamed")
    try:
        status, problem = agent.call("DELETE", "/v1/ports/nic1")
        assert (status, problem["code"]) == (504, "timeout"), problem
        assert f"there is no NIC {PF.pci}" in problem["detail"]
        assert agent.get("/v1/ports/nic1")[1]["state"] == "removing"
        assert driver(address) == "vfio-pci"
        assert vf_info("renamed")[0]["address"] == make_spec()["mac"]
    finally:
        rename("renamed", pf)
    wait_for(lambda: agent.get("/v1/ports/nic1")[0] == 404, DEADLINE_S, "the port goes")
    assert whole_state(pf, functions()) == before


def test_a_nic_that_is_reset_under_a_running_port(
    pf: str, agent: PrivateAgent, far: str, tmp_path: Path
) -> None:
    """igb has no part in such a reset (``igb_err_handler`` in igb_main.c): it sets its NIC up again
    when its interface is brought up."""
    before = whole_state(pf, functions())
    address = put(agent, "nic1", make_spec())["binding"]["pci_address"]
    with vm(address, tmp_path / "vm.log") as testpmd:
        wait_for(lambda: ping("10.9.0.5"), DEADLINE_S, "the VM answers", testpmd.tail)
        (nics.device(PF.pci) / "reset").write_text("1")
        run(["ip", "link", "set", pf, "down"])
        run(["ip", "link", "set", pf, "up"])
    wait_for(
        lambda: agent.get("/v1/ports/nic1")[1]["state"] == "active",
        DEADLINE_S,
        "it is active again",
    )
    reported = vf_info(pf)[0]
    assert (reported["address"], reported["vlan_list"][0]["vlan"]) == (make_spec()["mac"], 100)
    assert "quarantined" not in {vf["state"] for vf in agent.get("/v1/vfs")[1]}
    with vm(address, tmp_path / "again.log") as testpmd:
        wait_for(lambda: ping("10.9.0.5"), DEADLINE_S, "the VM answers again", testpmd.tail)
    wait_for(lambda: agent.call("DELETE", "/v1/ports/nic1")[0] == 204, DEADLINE_S, "the port goes")
    assert whole_state(pf, functions()) == before


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("PUT", 0.7),
        pytest.param("PUT", 0.3, marks=pytest.mark.long),
        pytest.param("DELETE", 0.5, marks=pytest.mark.long),
    ],
)
def test_killed_amid_a_call(pf: str, agent: PrivateAgent, method: str, part: float) -> None:
    """Every step is in tests/unit/drivers/sriov/test_sriov_crash.py; this is the real host's part of it."""
    before = whole_state(pf, functions())
    started = time.monotonic()
    put(agent, "nic1", make_spec())
    took = time.monotonic() - started
    if method == "PUT":
        delete(agent, "nic1")
    caller = threading.Thread(target=agent.call, args=(method, "/v1/ports/nic1", make_spec()), daemon=True)
    caller.start()
    caller.join(took * part)
    agent.kill()
    caller.join()
    agent.start()
    if method == "PUT":
        put(agent, "nic1", make_spec())
        assert vf_info(pf)[0]["address"] == make_spec()["mac"]
        assert driver(functions()[0]) == "vfio-pci"
    delete(agent, "nic1")
    assert whole_state(pf, functions()) == before


def test_a_nic_that_loses_its_vfs_degrades_its_ports_until_they_are_back(
    pf: str, agent: PrivateAgent
) -> None:
    address = put(agent, "nic1", make_spec())["binding"]["pci_address"]
    numvfs = nics.device(PF.pci) / "sriov_numvfs"
    numvfs.write_text("0")

    def state() -> str:
        return str(agent.get("/v1/ports/nic1")[1]["state"])

    wait_for(lambda: state() == "degraded", DEADLINE_S, "the port is degraded")
    problem = agent.get("/v1/ports/nic1")[1]["error"]
    assert address in problem["detail"] and "has 0 VFs" in problem["detail"]
    [backend] = [b for b in agent.get("/v1/backends")[1] if b["name"] == "sriov"]
    assert not backend["usable"] and "sriov_numvfs" in backend["fix"]
    numvfs.write_text(str(VFS))
    wait_for(lambda: state() == "active", DEADLINE_S, "the port is active")
    assert vf_info(pf)[0]["address"] == make_spec()["mac"]
    assert driver(address) == "vfio-pci"


def test_vfs_made_again_and_given_to_a_container_are_left_to_it(pf: str, agent: PrivateAgent) -> None:
    address = put(agent, "nic1", make_spec(port_security={"enabled": False}))["binding"]["pci_address"]
    agent.kill()
    numvfs = nics.device(PF.pci) / "sriov_numvfs"
    numvfs.write_text("0")
    numvfs.write_text(str(VFS))
    wait_for(lambda: len(vf_macs(pf)) == VFS, DEADLINE_S, "igbvf has chosen its MACs")
    run(["ip", "link", "set", pf, "vf", "0", "mac", "02:00:00:00:99:99", "vlan", "200", "spoofchk", "on"])
    with namespace("container"):
        interface = nics.interface(address)
        run(["ip", "link", "set", interface, "netns", "container"])
        try:
            theirs = vf_info(pf)[0], driver(address)
            agent.start()
            delete(agent, "nic1")
            assert (vf_info(pf)[0], driver(address)) == theirs
        finally:
            run(["ip", "-n", "container", "link", "set", interface, "netns", "1"])
            run(["ip", "link", "set", pf, "vf", "0", "mac", NO_MAC, "vlan", "0"])


def test_another_number_of_vfs_is_refused_while_a_port_has_one(
    pf: str, agent: PrivateAgent, tmp_path: Path
) -> None:
    address = put(agent, "nic1", make_spec())["binding"]["pci_address"]
    vfs = agent.get("/v1/vfs")[1]
    ports = {vf["pci_address"]: vf["port_id"] for vf in vfs if vf["port_id"]}
    result = Host(tmp_path / "journal", ports).apply(pf, 3)
    assert result and address in str(result.reason) and "port nic1 has it" in str(result.reason)
    assert "delete port nic1" in str(result.fix)
    assert (nics.device(PF.pci) / "sriov_numvfs").read_text() == f"{VFS}\n"


def test_what_another_process_changes_is_repaired_at_once(pf: str, agent: PrivateAgent) -> None:
    put(agent, "nic1", make_spec())
    run(["ip", "link", "set", pf, "vf", "0", "vlan", "7"])
    wait_for(lambda: vf_info(pf)[0]["vlan_list"][0]["vlan"] == 100, DEADLINE_S, "it is repaired")


def test_without_autoprobe_a_vf_gets_its_driver_all_the_same(pf: str, agent: PrivateAgent) -> None:
    root = nics.device(PF.pci)
    (root / "sriov_numvfs").write_text("0")
    (root / "sriov_drivers_autoprobe").write_text("0")
    (root / "sriov_numvfs").write_text(str(VFS))
    try:
        before = whole_state(pf, functions())
        address = put(agent, "nic1", make_spec())["binding"]["pci_address"]
        assert driver(address) == "vfio-pci"
        delete(agent, "nic1")
        assert whole_state(pf, functions()) == before and driver(address) is None
    finally:
        (root / "sriov_numvfs").write_text("0")
        (root / "sriov_drivers_autoprobe").write_text("1")
        (root / "sriov_numvfs").write_text(str(VFS))


# -- libvirt -------------------------------------------------------------------------------------

DOMAIN = """
<domain type='qemu'>
  <name>vm1</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices><emulator>/usr/bin/qemu-system-x86_64</emulator></devices>
</domain>
"""


def test_libvirt_starts_a_domain_with_it_and_leaves_it_to_us(pf: str, agent: PrivateAgent) -> None:
    before = whole_state(pf, functions())
    address = put(agent, "nic1", make_spec(vf={"vlan_qos": 3}))["binding"]["pci_address"]
    status, rendered = agent.call("POST", "/v1/vms/vm1:render-domain", {"xml": DOMAIN})
    assert status == 200, rendered
    with PrivateLibvirt() as libvirtd:
        domain = libvirtd.connect().createXML(rendered["xml"])
        interface = etree.fromstring(domain.XMLDesc()).find("devices/interface")
        assert interface.get("type") == "hostdev"
        assert interface.get("managed") in (None, "no")
        [mine] = [v for v in agent.get("/v1/vfs")[1] if v["pci_address"] == address]
        assert mine["state"] == "allocated", "QEMU has its vfio group open"
        # libvirt sets the VLAN once more, without its priority: that is repaired.
        wait_for(lambda: vf_info(pf)[0]["vlan_list"][0].get("qos") == 3, DEADLINE_S, "the priority")
        assert agent.call("DELETE", "/v1/ports/nic1")[0] == 409
        put(agent, "nic1", make_spec(vf={"vlan_qos": 3}))
        domain.destroy()
        assert driver(address) == "vfio-pci", "nobody gave it back to the host's driver"
        reported = vf_info(pf)[0]
        assert reported["address"] == make_spec()["mac"] and reported["vlan_list"][0]["vlan"] == 100
        delete(agent, "nic1")
    assert whole_state(pf, functions()) == before


def test_libvirt_takes_a_vf_together_with_a_virtio_nic(pf: str, agent: PrivateAgent) -> None:
    """The pair as libvirt's and QEMU's: one steps in for the other when the VF is taken out."""
    before = whole_state(pf, functions())
    port = put(agent, "nic1", make_spec(vf={"teaming": True}))
    assert vf_info(pf)[0]["address"] == NO_MAC, "the NIC has it while the VM has the VF"
    assert port["binding"]["standby_port_id"] in {p["port_id"] for p in agent.get("/v1/ports")[1]}
    status, rendered = agent.call("POST", "/v1/vms/vm1:render-domain", {"xml": DOMAIN})
    assert status == 200, rendered
    with PrivateLibvirt() as libvirtd:
        domain = libvirtd.connect().createXML(rendered["xml"])
        stays, goes = etree.fromstring(domain.XMLDesc()).findall("devices/interface")
        assert (stays.get("type"), goes.get("type")) == ("ethernet", "hostdev")
        assert stays.find("teaming").get("type") == "persistent"
        assert goes.find("teaming").get("persistent") == stays.find("alias").get("name")
        command = libvirtd.qemu_log("vm1").read_text()
        assert '"failover":true' in command and "failover_pair_id" in command
        assert vf_info(pf)[0]["address"] == make_spec()["mac"]
        # Deleted now, the VF is given back after libvirt has written what it found at the start.
        assert agent.call("DELETE", "/v1/ports/nic1")[0] == 409
        saved = LIBVIRT_STATE / f"{pf}_vf0"
        assert saved.exists()
        domain.destroy()
        wait_for(lambda: agent.get("/v1/ports")[1] == [], DEADLINE_S, "the ports go")
        assert not saved.exists()
    assert whole_state(pf, functions()) == before


# -- a virtio NIC next to the VF --------------------------------------------------------------------


def answered(log: Path) -> list[int]:
    """The numbers of the pings that were answered, in the order of the answers."""
    return [int(number) for number in re.findall(r"icmp_seq=(\d+) ttl", log.read_text())]


@contextmanager
def with_libvirt(pf: str, mac: str, netns: str | None = None) -> Iterator[None]:
    """What libvirt does around the time that a VM has a VF, but for the MAC at the end: it is that of
    one that found the VM's when it began, as of an agent that did not take it away."""
    saved = LIBVIRT_STATE / f"{pf}_vf0"
    saved.parent.mkdir(parents=True, exist_ok=True)
    saved.touch()
    sets = within(netns, ["ip", "link", "set", pf, "vf", "0", "mac", mac])
    run(sets)
    try:
        yield
    finally:
        saved.unlink()
        run(sets)


def test_frames_are_lost_only_while_a_vf_comes_and_goes(
    pf: str, agent: PrivateAgent, far: str, tmp_path: Path
) -> None:
    """The VM's virtio NIC is on a bridge with the PF, and the wire has no other way to it. Pings go
    all the time; the VM's two NICs are two processes that answer them. A neighbour on that bridge finds
    the VM where it is, too."""
    before = whole_state(pf, functions())
    near_spec = make_spec(2, backend="linuxbridge")
    near_tap = put(agent, "near", near_spec)["binding"]["device"]
    mac, log = make_spec()["mac"], tmp_path / "pings.log"
    binding = put(agent, "nic1", make_spec(vf={"teaming": True}))["binding"]
    standby = agent.get(f"/v1/ports/{binding['standby_port_id']}")[1]["binding"]
    tap = standby["device"]
    run(within(FAR, ["ip", "neigh", "replace", "10.9.0.5", "lladdr", mac, "dev", "wire.100"]))
    pings = within(FAR, ["stdbuf", "-oL", "ping", "-n", "-i", "0.1", "10.9.0.5"])

    def to_tap() -> int:
        return int(Path(f"/sys/class/net/{tap}/statistics/tx_packets").read_text())

    def steady(way: str, through_tap: bool) -> int:
        """Wait until ten pings in a row are answered this way; gives the number of the last."""

        def is_so() -> bool:
            frames, count = to_tap(), len(answered(log))
            stream.wait_for(lambda: len(answered(log)) >= count + 10, DEADLINE_S, way)
            ten = answered(log)[count : count + 10]
            return ten[-1] - ten[0] == 9 and (to_tap() - frames >= 10) is through_tap

        stream.wait_for(is_so, DEADLINE_S, way)
        return answered(log)[-1]

    def wait_near(near: TapVm, through_tap: bool) -> None:
        """Wait until the neighbour's pings are answered this way."""

        def are_so() -> bool:
            frames = to_tap()
            return all(near.pings("10.9.0.5") for _ in range(5)) and (to_tap() - frames >= 5) is through_tap

        wait_for(are_so, DEADLINE_S, f"the neighbour reaches the VM: {'virtio NIC' if through_tap else 'VF'}")

    # The emulated NIC gives what VFs send to the PF only for MACs that the PF has.
    on_pf = [near_spec["mac"], "dev", pf, "self"]
    run(["bridge", "fdb", "add", *on_pf, "permanent"])
    with (
        TapVm("vm", None, tap, mac, "10.9.0.5") as virtio,
        TapVm("near", None, near_tap, near_spec["mac"], "10.9.0.6") as near,
        Daemon("ping", pings, log) as stream,
    ):
        near.ip("neigh", "replace", "10.9.0.5", "lladdr", mac, "dev", "eth0")
        before_it = steady("the virtio NIC answers", through_tap=True)
        wait_near(near, through_tap=True)
        with with_libvirt(pf, mac), vm(binding["pci_address"], tmp_path / "vm.log"):
            with_it = steady("the VF answers", through_tap=False)
            virtio.ip("link", "set", "eth0", "down")  # a guest drops what comes here now
            wait_near(near, through_tap=False)
            virtio.ip("link", "set", "eth0", "up")
        without_it = steady("the virtio NIC answers again", through_tap=True)
        wait_near(near, through_tap=True)
        assert vf_info(pf)[0]["address"] == NO_MAC
    lost = set(range(before_it, without_it)) - set(answered(log))
    comes = {number for number in lost if number < with_it}
    print(f"lost while the VF came: {len(comes)}, while it went: {len(lost - comes)}")
    run(["bridge", "fdb", "delete", *on_pf])
    delete(agent, "near")
    delete(agent, "nic1")
    assert whole_state(pf, functions()) == before
