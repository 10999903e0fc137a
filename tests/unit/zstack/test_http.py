"""ZStack's calls over HTTP, with the real agent over backends in memory."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from agents.api import http
from agents.telemetry.metrics import Metrics
from agents.zstack import ZstackCalls
from netplugin.api import zstack_mapping as mapping
from netplugin.api.errors import HostError, NetpluginError
from netplugin.api.models import Binding, PortSpec
from netplugin.backend import Change, Intent
from netplugin.host.usability import Usability
from tests.unit.agent import DEADLINE_S, Agent, agent, served_agent
from tests.unit.fakes import FakeBackend, FakeHost, Seen
from tests.unit.zstack.conftest import add_nic
from tests.unit.zstack.test_plugin import BRIDGE, MAPPED, PORT, VM, bridge, nic

CREATE = {"bridgeName": BRIDGE, "physicalInterfaceName": "enp3s0f0", "l2NetworkUuid": "f" * 32}
OVSDPDK = "/network/ovsdpdk/"
ADD, DELETE, SYNC = (OVSDPDK + name for name in ("addvhostuserclient", "deletevhostuserclient", "sync"))


class Switch(FakeBackend):
    """A backend with physical networks, and no VM on any of its ports but those in ``connected``."""

    network_parts: ClassVar[Mapping[str, bool]] = {"ovs": True, "linuxbridge": True}
    connected: ClassVar[set[str]] = set()

    def check_network(self, name: str, spec: Any) -> None:
        pass

    def network_faults(self, observed: Any) -> Mapping[str, NetpluginError]:
        return {}

    def network_remains(self, name: str, observed: Any) -> Sequence[str]:
        return ()

    def network_holders(self, name: str) -> Sequence[str]:
        return ()

    def observe(self, ports: Collection[str] | None, deadline: float) -> Seen:
        seen = super().observe(ports, deadline)
        found = {
            name: replace(port, details={"connected": name in self.connected})
            for name, port in seen.ports.items()
        }
        return replace(seen, ports=found)

    def binding(self, intent: Intent) -> Binding:
        path = f"/run/vhost/{intent.port_id}"
        return super().binding(intent).model_copy(update={"socket_path": path})


@dataclass
class Platform:
    """A management node that calls the agent directly."""

    agent: Agent
    host: FakeHost
    url: str
    options: SimpleNamespace
    headers: dict[str, str] = field(default_factory=dict)

    def post(self, path: str, body: object, method: str = "POST") -> tuple[int, Any]:
        data = json.dumps(body).encode() if method != "GET" else None
        request = urllib.request.Request(self.url + path, data, self.headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def ok(self, path: str, body: object) -> Any:
        status, answer = self.post(path, body)
        assert status == 200 and answer["success"] is True and answer["error"] == "", answer
        return answer

    def refused(self, path: str, body: object) -> tuple[int, str]:
        status, answer = self.post(path, body)
        assert status >= 400, answer
        return status, answer["detail"]

    def fields(self, path: str, body: object) -> list[str]:
        status, answer = self.post(path, body)
        assert status == 422, answer
        return [error["field"] for error in answer["errors"]]

    def ports(self) -> dict[str, PortSpec]:
        return {record.port_id: record.spec for record in self.agent.store.records()}

    def networks(self) -> dict[str, Any]:
        return {network["name"]: network for network in self.post("/v1/physical-networks", None, "GET")[1]}


@contextmanager
def served(directory: Path, *callbacks: str) -> Iterator[Platform]:
    host = FakeHost()
    options = SimpleNamespace(
        hold_mac=True, roles=[], mtu=1500, interfaces={}, bond_file=str(directory / "dpdk-bond.yaml")
    )
    backends = {"dpdkvhostuser": Switch("dpdkvhostuser", host), "vdpa": Switch("vdpa")}
    with agent(directory, backends=backends, callback_allow=callbacks) as running:
        calls = ZstackCalls(running.service, options)
        app = http.build(running.service, running.tasks, Metrics(running.store), calls)
        with served_agent(replace(running, app=app)) as url:
            yield Platform(running, host, url, options)


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    monkeypatch.setattr(mapping, "SYSFS", str(tmp_path / "sys"))
    monkeypatch.setattr(Switch, "connected", set())
    add_nic(tmp_path / "sys", "enp3s0f0", "0000:03:00.0")
    with served(tmp_path) as running:
        yield running


@pytest.fixture
def network(platform: Platform) -> Platform:
    platform.ok(OVSDPDK + "createbridge", CREATE)
    return platform


def nics(*given: dict[str, Any], vm: str = VM) -> dict[str, Any]:
    return {"vmUuid": vm, "nics": list(given)}


# -- NICs --------------------------------------------------------------------------------------------


def test_a_nic_becomes_what_the_plugin_makes_of_it(network: Platform) -> None:
    for fields, expected in MAPPED:
        vdpa = fields.get("type") == "vDPA"
        network.ok(OVSDPDK + "generatevdpa" if vdpa else ADD, nics(nic(**fields)))
        want = PortSpec.model_validate_json(json.dumps({**PORT, **expected}))
        assert network.ports() == {"vnic12.0": want}, fields
        network.ok(OVSDPDK + "deletevdpa" if vdpa else DELETE, {"vmUuid": VM})
        assert network.ports() == {}


def test_plug_twice_and_unplug_one_and_all(network: Platform) -> None:
    both = nics(nic(), nic(nicInternalName="vnic12.1", mac="fa:46:e8:1b:ab:01"), nic(type="VF"))
    for _ in range(2):
        assert set(network.ok(ADD, both)) == {"success", "error"}
    written = len(network.host.written)
    assert written == 2, "the same NICs again are not written again"
    network.ok(ADD, nics(nic(nicInternalName="vnic13.0", mac="fa:46:e8:1b:ab:02"), vm="other"))
    network.ok(DELETE, {"vmUuid": VM, "nicInternalName": "vnic12.1"})
    assert set(network.ports()) == {"vnic12.0", "vnic13.0"}
    network.ok(OVSDPDK + "deletevdpa", {"vmUuid": VM})
    assert set(network.ports()) == {"vnic12.0", "vnic13.0"}, "these are no vDPA NICs"
    for _ in range(2):
        network.ok(DELETE, {"vmUuid": VM})
    assert set(network.ports()) == {"vnic13.0"}


def test_the_paths_of_vdpa_nics(network: Platform) -> None:
    answer = network.ok(OVSDPDK + "generatevdpa", nics(nic(type="vDPA"), nic(nicInternalName="vnic12.1")))
    assert answer["vdpaPaths"] == ["/run/vhost/vnic12.0"]
    network.ok(OVSDPDK + "deletevdpa", {"vmUuid": VM})
    assert network.ports() == {}


def test_a_call_that_fails_leaves_none_of_its_nics(network: Platform) -> None:
    network.ok(ADD, nics(nic()))

    def refuse(change: Change) -> None:
        if "vnic12.2" in change.ports and getattr(change, "spec", None) is not None:
            raise HostError("no memory for a queue", step="apply", fix="reserve hugepages")

    network.host.on_apply = refuse
    three = nics(*(nic(nicInternalName=f"vnic12.{n}", mac=f"fa:46:e8:1b:ab:0{n}") for n in (0, 1, 2)))
    status, detail = network.refused(ADD, three)
    assert (status, detail) == (502, "no memory for a queue")
    assert set(network.ports()) == set(network.host.ports) == {"vnic12.0"}, "that one was there before"


def test_the_nic_of_another_vm_stays_its_own(network: Platform) -> None:
    network.ok(ADD, nics(nic()))
    second = nic(nicInternalName="vnic12.1", mac="fa:46:e8:1b:ab:01")
    status, detail = network.refused(ADD, nics(second, nic(), vm="another"))
    assert status == 409 and "vm_id" in detail
    assert {name: spec.vm_id for name, spec in network.ports().items()} == {"vnic12.0": VM}
    network.ok(DELETE, {"vmUuid": "another", "nicInternalName": "vnic12.0"})
    assert set(network.ports()) == {"vnic12.0"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"vlanId": "many"}, "vlanId"),
    ({"vlanId": 5000}, "network.vlan_id"),
    ({"vlanId": True}, "vlanId"),
    ({"mtu": "100"}, "network.mtu"),
    ({"mtu": 1500.5}, "mtu"),
    ({"mtu": -1}, "mtu"),
    ({"mac": "banana"}, "mac"),
    ({"nicInternalName": "../vnic"}, "nicInternalName"),
    ({"bridgeName": "br/x"}, "bridgeName"),
    ({"ips": ["10.0.0.300"], "cleanTraffic": True}, "port_security.allowed_addresses.0.ip"),
    ({"vHostAddOn": {"queueNum": "2", "rxBufferSize": 300}, "driverType": "virtio"}, "rx_queue_size"),
    ({"vHostAddOn": {"queueNum": "two"}}, "vHostAddOn.queueNum"),
]


def test_a_field_that_is_not_valid_is_named_and_nothing_is_plugged(network: Platform) -> None:
    for wrong, named in WRONG:
        second = nic(**{"nicInternalName": "vnic12.1", "mac": "fa:46:e8:1b:ab:01", **wrong})
        assert f"nics.1.{named}" in network.fields(ADD, nics(nic(), second)), wrong
    assert network.ports() == {} and network.host.written == []


def test_a_nic_without_its_bridge(platform: Platform) -> None:
    status, detail = platform.refused(ADD, nics(nic()))
    assert (status, detail) == (404, f"no physical network has the bridge {BRIDGE}")
    linux = {"linuxbridge": {}, "bridge": BRIDGE}
    assert platform.post("/v1/physical-networks/linux", linux, "PUT")[0] == 200
    assert platform.refused(ADD, nics(nic())) == (status, detail), "it is no bridge of OVS"


def test_the_options_for_nics_without_clean_traffic(network: Platform) -> None:
    network.options.hold_mac, network.options.roles = False, ["router", "dhcp_server"]
    network.ok(ADD, nics(nic()))
    security = network.ports()["vnic12.0"].port_security
    assert (security.enabled, security.roles) == (False, ("dhcp_server", "router"))


# -- bridges -----------------------------------------------------------------------------------------


def test_a_bridge_is_made_once_checked_and_removed(platform: Platform) -> None:
    for _ in range(2):
        platform.ok(OVSDPDK + "createbridge", {**CREATE, "mtu": 9000})
    found = platform.networks()[BRIDGE]
    assert (found["bridge"], found["mtu"], found["keep"]) == (BRIDGE, 9000, True)
    assert found["ovs"] == {"devices": ["0000:03:00.0"], "bond": None}
    platform.ok(OVSDPDK + "checkbridge", CREATE)
    platform.ok(ADD, nics(nic()))
    assert platform.refused(OVSDPDK + "deletebridge", CREATE)[0] == 409
    platform.ok(DELETE, {"vmUuid": VM})
    for _ in range(2):
        platform.ok(OVSDPDK + "deletebridge", CREATE)
    assert platform.networks() == {}
    assert platform.refused(OVSDPDK + "checkbridge", CREATE)[0] == 404


def test_a_bridge_with_another_uplink_is_not_changed(network: Platform, tmp_path: Path) -> None:
    add_nic(tmp_path / "sys", "enp4s0", "0000:04:00.0")
    before = network.networks()
    for call in ("createbridge", "checkbridge"):
        answer = network.refused(OVSDPDK + call, {**CREATE, "physicalInterfaceName": "enp4s0"})
        assert answer == (409, f"bridge {BRIDGE} has the uplink 0000:03:00.0, not enp4s0")
    assert network.networks() == before
    named = network.fields(OVSDPDK + "createbridge", {"bridgeName": "br_x", "physicalInterfaceName": "x"})
    assert named == ["physicalInterfaceName"]


def test_bonds_are_those_of_the_file(platform: Platform, tmp_path: Path) -> None:
    add_nic(tmp_path / "sys", "enp3s0f1", "0000:03:00.1")
    file = Path(platform.options.bond_file)
    file.write_text(
        "- bond: {name: bond1, mode: 1, id: 0, slaves: [enp3s0f0, enp3s0f1]}\n"
        "- bond: {name: bond2, mode: 2, id: 1, slaves: [enp3s0f0, enp3s0f1]}\n"
    )
    body = {"bridgeName": "br_bond1", "physicalInterfaceName": "bond1"}
    platform.ok(OVSDPDK + "createbridge", body)
    made = platform.networks()["br_bond1"]["ovs"]
    assert made == {"devices": ["0000:03:00.0", "0000:03:00.1"], "bond": "active-backup"}
    assert platform.fields(
        OVSDPDK + "createbridge", {**body, "physicalInterfaceName": "bond2", "bridgeName": "b"}
    ) == ["mode"]
    file.write_text("- name: bond1\n")
    assert platform.refused(OVSDPDK + "createbridge", body)[0] == 502


# -- the host ----------------------------------------------------------------------------------------


def test_a_sync_makes_repairs_and_removes_only_what_zstack_left(
    network: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        network.ok(ADD, nics(nic(nicInternalName=f"vnic{number}.0", mac=f"fa:46:e8:1b:ab:1{number}")))
    ours = {**PORT, "mac": "fa:46:e8:1b:ab:20", "port_name": None}
    request = urllib.request.Request(
        f"{network.url}/v1/ports/tester", json.dumps(ours).encode(), method="PUT"
    )
    urllib.request.urlopen(request, timeout=DEADLINE_S).close()
    theirs = PortSpec.model_validate_json(json.dumps(ours))
    network.host.ports["vnic9.0"] = theirs  # by hand: not in the store, without our mark
    monkeypatch.setattr(Switch, "connected", {"vnic2.0"})
    listed = {"ovsBridgeInfo": [bridge(nic(nicInternalName="vnic3.0", mac="fa:46:e8:1b:ab:13"), nic())]}
    answer = network.ok(SYNC, listed)
    assert answer["removed"] == [], "they are young: their VMs may be starting"
    assert set(answer["kept"]) == {"vnic1.0", "vnic2.0"}
    monkeypatch.setattr(mapping, "YOUNG_S", 0)
    answer = network.ok(SYNC, listed)
    assert (answer["removed"], answer["kept"]) == (["vnic1.0"], ["vnic2.0"])
    assert set(network.ports()) == {"vnic2.0", "vnic3.0", "vnic12.0", "tester"}


def test_a_sync_names_all_that_fails_and_does_the_rest(network: Platform) -> None:
    nobody = bridge(name="br_x", interface="x")
    wrong = nic(nicInternalName="vnic12.2", mac="fa:46:e8:1b:ab:02", mtu=5)
    status, detail = network.refused(SYNC, {"ovsBridgeInfo": [nobody, bridge(wrong, nic())]})
    assert status == 502 and detail.startswith("2 failed: br_x: x is no PCI network interface"), detail
    assert "; vnic12.2: ovsBridgeInfo.1.ports.0.network.mtu: " in detail
    assert set(network.ports()) == {"vnic12.0"}


def test_what_is_checked_and_left_alone(network: Platform, tmp_path: Path) -> None:
    for size, number in (("2048", "512"), ("1048576", "1")):
        pages = tmp_path / f"sys/kernel/mm/hugepages/hugepages-{size}kB/nr_hugepages"
        pages.parent.mkdir(parents=True)
        pages.write_text(number)
    resources = {"reserveSize": "2097152", "pageSize": 2048.0, "socketMem": "1024.0"}
    assert network.ok(OVSDPDK + "resource/configure", resources)["findings"] is not None
    status, detail = network.refused(OVSDPDK + "resource/configure", {"reserveSize": 2097153.0})
    assert (status, detail) == (507, "this host has 2097152 kB of hugepages, not 2097153")
    generate = {"physicalInterfaceName": "enp3s0f0", **resources, "virtPartNum": 0}
    assert network.ok("/hostvirtualnetworkinterface/generate", generate)["vfsInfo"] == []
    status, detail = network.refused("/hostvirtualnetworkinterface/generate", {**generate, "virtPartNum": 8})
    assert (status, detail) == (409, "enp3s0f0 has 0 virtual functions, not 8")
    network.ok("/hostvirtualnetworkinterface/ungenerate", generate)
    wrong = network.fields("/host/ovs/cpu-pin/update", {"ovsCpuPinning": "0xzz"})
    assert wrong == ["ovsCpuPinning"]
    assert network.fields("/host/ovs/cpu-pin/update", {}) == ["ovsCpuPinning"]
    assert network.host.written == []


def test_a_backend_that_is_not_usable_says_why(network: Platform) -> None:
    network.host.usability = Usability(False, "DPDK is not initialized", "set dpdk-init")
    for call, body in (("createbridge", CREATE), ("checkbridge", CREATE), ("resource/configure", {})):
        assert network.refused(OVSDPDK + call, body) == (503, "dpdkvhostuser: DPDK is not initialized")


def test_interfaces_are_netdevs_bonds_or_dpdks(network: Platform, tmp_path: Path) -> None:
    path = "/network/checkphysicalnetworkinterface"
    add_nic(tmp_path / "sys", "enp8s0", "0000:08:00.0", driver="vfio-pci", netdev=False)
    network.options.interfaces = {"enp8s0": "0000:08:00.0"}
    Path(network.options.bond_file).write_text("- bond: {name: bond1, mode: 1, slaves: [enp3s0f0]}\n")
    network.ok(path, {"interfaceNames": ["enp3s0f0", "enp8s0", "bond1"]})
    status, answer = network.post(path, {"interfaceNames": ["enp3s0f0", "enp9s0"]})
    assert (status, answer["success"], answer["failedInterfaceNames"]) == (200, False, ["enp9s0"])
    assert answer["error"] == "not on this host, and no NIC that DPDK has: enp9s0"


# -- asynchronous calls ------------------------------------------------------------------------------


def test_the_result_of_an_asynchronous_call_is_zstacks_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "SYSFS", str(tmp_path / "sys"))
    add_nic(tmp_path / "sys", "enp3s0f0", "0000:03:00.0")
    with served(tmp_path, "http://127.0.0.1:1/") as platform:
        bodies = {
            "t1": (OVSDPDK + "createbridge", CREATE),
            "t2": (OVSDPDK + "generatevdpa", nics(nic(type="vDPA"))),
            "t3": (ADD, nics(nic(bridgeName="br_none"))),
            "t4": ("/network/checkphysicalnetworkinterface", {"interfaceNames": ["enp9s0"]}),
        }
        results = {}
        for name, (path, body) in bodies.items():
            platform.headers = {"taskuuid": name, "callbackurl": "http://127.0.0.1:1/cb"}
            assert platform.post(path, body) == (200, None)
            platform.headers = {}
            results[name] = _result(platform, name)
    assert results["t1"] == {"success": True, "error": "", "status": 200}
    assert results["t2"] == {
        "success": True,
        "error": "",
        "status": 200,
        "vdpaPaths": ["/run/vhost/vnic12.0"],
    }
    failed = results["t3"]
    assert (failed["success"], failed["status"]) == (False, 404)
    assert failed["error"] == "no physical network has the bridge br_none"
    assert (results["t4"]["success"], results["t4"]["failedInterfaceNames"]) == (False, ["enp9s0"])


def _result(platform: Platform, name: str) -> Any:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        _, task = platform.post(f"/v1/tasks/{name}", None, "GET")
        if task["result"] is not None:
            return task["result"]
    raise AssertionError(f"task {name} is not done")
