"""Which frames of a VM come out of OVS-DPDK, and where: sent by a VM's NIC, looked for on the wire."""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from drivers.ovs.filters import port_cookie
from netplugin.host.flow import COOKIE_MARK
from netplugin.host.names import UPLINK, VHOST, device_name
from tests.functional import isolation_frames as frames
from tests.functional.conftest import BASE, make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import namespace, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import cpu_seconds, run, wait_for
from tests.lab.raw_frames import Arrival, Ear, hearing, marked, mouth, send_all
from tests.lab.vm import DEVICE as NIC
from tests.lab.vm import Vm

FAR = "np-far"
BRIDGE = "br-phys1"
#: A bridge of the operator's own; a port of his own on ours, and one that he does not name.
THEIRS, SERVICE, UNNAMED = "br-theirs", "np-svc", "np-any"
PORT = device_name(VHOST, "p1")
UPLINK_DEVICE = "net_pcap0,rx_iface_in=nic0,tx_iface=nic0"
NIC0 = device_name(UPLINK, UPLINK_DEVICE)
ANOTHER = "52:54:00:00:aa:09"
OWN_MAC: dict[str, Any] = {}
ADDRESSES = {"allowed_addresses": frames.ADDRESSES}
UNFILTERED = {"enabled": False}
ROLES = {"roles": ["router", "dhcp_server"]}


@dataclass
class Lab:
    """One port whose spec a test changes, its VM, and the wire behind the uplink."""

    ovs: PrivateOvs
    agent: PrivateAgent
    wire: Ear
    _out: list[socket.socket] = field(default_factory=list)

    @property
    def out(self) -> socket.socket:
        return self._out[0]

    def plug(self, security: Mapping[str, Any], vlan_id: int | None = None) -> None:
        self.put("p1", make_spec(1, vlan_id=vlan_id, port_security=security))
        assert self.planned() == []

    def put(self, port_id: str, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        status, body = self.agent.call("PUT", f"/v1/ports/{port_id}", spec)
        assert status == 200, body
        binding: Mapping[str, Any] = body["binding"]
        return binding

    @contextmanager
    def vm(self, port_id: str, spec: Mapping[str, Any]) -> Iterator[socket.socket]:
        """A VM on a port; what is written to the socket leaves by its NIC."""
        binding, name = self.put(port_id, spec), f"vm-{port_id}"
        with Vm(name, binding["socket_path"], frames.MAC, frames.IP4, tagged=True):
            # Its kernel says nothing by itself: frames are counted.
            run(within(name, ["sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"]))
            self.ovs.wait_connected(binding["device"])
            with mouth(name, NIC) as out:
                yield out

    def planned(self) -> list[Any]:
        status, report = self.agent.call("POST", "/v1/reconcile", {"dry_run": True})
        assert status == 200 and report["errors"] == [], report
        changes: list[Any] = report["changes"]
        return changes

    def send(self, tried: Mapping[str, bytes]) -> dict[str, list[Arrival]]:
        return send_all(self.out, self.wire, tried, frames.plain())

    def dies(self, out: socket.socket, port: str, frame: bytes) -> bool:
        """Whether a frame does not come out that enters by this port of the bridge."""
        number, self.wire.given = self.wire.given, self.wire.given + 1
        before = self.entered(port)

        def enters() -> bool:
            out.send(marked(frame, number))
            return self.entered(port) >= before + 3

        wait_for(enters, 60, f"the frames are at {port}")
        self.wire.listen(time.monotonic() + 0.5)
        return not self.wire.of(number)

    def comes(self, out: socket.socket, frame: bytes) -> None:
        """Wait until a frame comes out."""
        number, self.wire.given = self.wire.given, self.wire.given + 1

        def received() -> bool:
            out.send(marked(frame, number))
            self.wire.listen(time.monotonic() + 0.2)
            return bool(self.wire.of(number))

        wait_for(received, 60, "the frame comes out")

    def entered(self, port: str) -> int:
        return self._counted(port, "rx pkts")

    def left(self, port: str) -> int:
        """What the bridge sent there, whether the device took it or not."""
        return self._counted(port, "tx pkts") + self._counted(port, "tx pkts=[^:]*drop")

    def still(self) -> tuple[int, int]:
        """How many frames have come from the VM and left by the uplink, when nothing is between.

        That is when as many are counted after vswitchd has polled in vain, for half a second of its CPU time.
        """
        pid = self.ovs.vswitchd.pid

        def same() -> tuple[int, int] | None:
            counted, polled = (self.entered(PORT), self.left(NIC0)), cpu_seconds(pid)
            wait_for(lambda: cpu_seconds(pid) > polled + 0.5, 60, "vswitchd polls")
            return counted if counted == (self.entered(PORT), self.left(NIC0)) else None

        found = wait_for(same, 60, "no frame comes any more")
        assert found is not None
        return found

    def _counted(self, port: str, what: str) -> int:
        shown = self.ovs.ofctl("dump-ports", BRIDGE, port)
        return int(re.findall(rf"{what}=(\d+)", shown)[0])

    def findings(self) -> dict[str, dict[str, Any]]:
        return {found["id"]: found for found in self.agent.get("/v1/host/checks")[1]}

    def passes(self, tried: Mapping[str, bytes]) -> set[str]:
        """The names of those that came out."""
        return {name for name, found in self.send(tried).items() if found}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, BASE / "ovs", ignore_errors=True)
        stack.callback(shutil.rmtree, BASE / "agent", ignore_errors=True)
        stack.enter_context(namespace(FAR))
        run(["ip", "link", "add", "nic0", "type", "veth", "peer", "name", "wire0", "netns", FAR])
        run(["ip", "link", "set", "nic0", "up"])
        run(within(FAR, ["ip", "link", "set", "wire0", "up"]))
        ovs = stack.enter_context(PrivateOvs(BASE / "ovs"))
        run(["ip", "link", "add", "nic1", "type", "veth", "peer", "name", "wire1", "netns", FAR])
        run(["ip", "link", "set", "nic1", "up"])
        run(within(FAR, ["ip", "link", "set", "wire1", "up"]))
        uplinks = f"'\"physnet1:{UPLINK_DEVICE}\"'"
        options = {
            "uplinks": uplinks,
            "service_ports": SERVICE,
            "bridge_mappings": f"physnet1:{BRIDGE},physnet2:{THEIRS}",
        }
        agent = PrivateAgent(BASE / "agent", ovs, {"ovs": options})
        stack.enter_context(agent)
        made = Lab(ovs, agent, stack.enter_context(hearing(FAR, "wire0")))
        made._out.append(stack.enter_context(made.vm("p1", make_spec(1, vlan_id=None))))
        yield made


@pytest.mark.parametrize("vlan_id", [None, 100])
def test_only_untagged_frames_enter(lab: Lab, vlan_id: int | None) -> None:
    """Whatever the filter; and what enters has the port's own VLAN on the wire, and no other."""
    for security in (UNFILTERED, OWN_MAC, ADDRESSES):
        lab.plug(security, vlan_id)
        found = lab.send({**frames.tags(), "no tag": frames.plain()})
        out = {name: {a.vlans for a in arrivals} for name, arrivals in found.items() if arrivals}
        assert out == {"no tag": {(vlan_id,) if vlan_id else ()}}, security


@pytest.mark.parametrize("security", [OWN_MAC, ADDRESSES], ids=["own MAC", "addresses"])
def test_a_vm_is_no_router_dhcp_server_or_switch_unless_configured(
    lab: Lab, security: Mapping[str, Any]
) -> None:
    # Without it OVS drops these by itself where it switches: it is the filter that is to be seen.
    routers, servers = frames.of_router(), frames.of_dhcp_server()
    switches = {**frames.of_bridges(), **frames.reserved()}
    harmless = frames.harmless()
    lab.plug(security)
    lab.ovs.vsctl("set", "bridge", BRIDGE, "other_config:forward-bpdu=true")
    try:
        tried = {**routers, **servers, **switches, **frames.lies()}
        assert lab.passes({**tried, **harmless}) == harmless.keys()
        lab.plug({**security, **ROLES})
        found = lab.passes({**tried, **harmless})
    finally:
        lab.ovs.vsctl("remove", "bridge", BRIDGE, "other_config", "forward-bpdu")
    unclear = {"a first fragment without its last header"}
    assert not found & (switches.keys() | frames.lies().keys())
    assert found >= harmless.keys() | servers.keys() | (routers.keys() - unclear)


def test_a_vm_that_has_addresses_sends_from_no_other(lab: Lab) -> None:
    lab.plug(ADDRESSES)
    assert lab.passes(frames.of_others_addresses()) == set()
    lab.plug(OWN_MAC)
    tried = frames.of_others_addresses()
    assert lab.passes(tried) == tried.keys(), "without addresses the MAC alone is looked at"


def test_addresses_that_no_bridge_forwards_are_not_forwarded_without_a_filter_either(
    lab: Lab,
) -> None:
    lab.plug(UNFILTERED)
    lab.ovs.vsctl("set", "bridge", BRIDGE, "other_config:forward-bpdu=true")
    try:
        free = {**frames.of_router(), **frames.of_dhcp_server()}
        assert lab.passes({**frames.reserved(), **free}) == free.keys()
    finally:
        lab.ovs.vsctl("remove", "bridge", BRIDGE, "other_config", "forward-bpdu")


# -- ports without a mark -------------------------------------------------------------------------


@contextmanager
def added(ovs: PrivateOvs, *names: str) -> Iterator[None]:
    """Ports of somebody's on our bridge, up."""
    for name in names:
        ovs.vsctl("add-port", BRIDGE, name, "--", "set", "interface", name, "type=internal")
        run(["ip", "link", "set", name, "up"])
    try:
        yield
    finally:
        for name in names:
            ovs.vsctl("del-port", name)


def test_a_bridge_takes_nothing_from_a_port_that_is_not_ours(lab: Lab) -> None:
    """Neither from its own internal port; but from those that the operator names."""
    lab.plug(OWN_MAC)
    run(["ip", "link", "set", BRIDGE, "up"])
    with added(lab.ovs, SERVICE, UNNAMED), ExitStack() as stack:
        lab.agent.call("POST", "/v1/reconcile", {})
        for name, of_port in ((UNNAMED, UNNAMED), (BRIDGE, "LOCAL")):
            out = stack.enter_context(mouth(None, name))
            assert lab.dies(out, of_port, frames.plain(ANOTHER, frames.EVERYBODY)), name
        out = stack.enter_context(mouth(None, SERVICE))
        lab.comes(out, frames.plain(ANOTHER, frames.EVERYBODY))
        findings = lab.findings()
        unmanaged, service = findings["unmanaged-ports"], findings[f"service-port-{SERVICE}"]
        assert unmanaged["status"] == "warn" and UNNAMED in unmanaged["found"]
        assert SERVICE not in unmanaged["found"] and BRIDGE in unmanaged["found"]
        assert service["status"] == "warn" and "trunk" in service["found"]
        lab.ovs.vsctl("set", "port", SERVICE, "tag=7", "vlan_mode=access")
        assert lab.findings()[f"service-port-{SERVICE}"]["status"] == "ok"
    run(["ip", "link", "set", BRIDGE, "down"])
    assert not {"unmanaged-ports", f"service-port-{SERVICE}"} & lab.findings().keys()


def test_a_port_that_has_lost_its_mark_sends_nothing(lab: Lab) -> None:
    """And then it does again, datapath flows that overlap or not: OVS 3.1.0 brings one of them alone
    to its new actions (``drivers.ovs.apply``)."""
    lab.plug(OWN_MAC)
    assert lab.passes({"its own": frames.plain()}) == {"its own"}, "there is a datapath flow for it"
    ids = lab.ovs.vsctl("get", "port", PORT, "external_ids").strip()
    lab.ovs.vsctl("clear", "port", PORT, "external_ids")
    try:
        lab.agent.call("POST", "/v1/reconcile", {})
        for mac in (ANOTHER, frames.MAC):
            assert lab.dies(lab.out, PORT, frames.plain(mac, frames.EVERYBODY)), mac
        assert PORT in lab.findings()["unmanaged-ports"]["found"]
        # The wider flow, which drops what comes from the port, has now most hits: of two that match,
        # a PMD thread finds it first from its next second on (dpcls_sort_subtable_vector).
        for _ in range(30):
            lab.out.send(frames.plain(to=frames.EVERYBODY))
            time.sleep(0.05)
    finally:
        lab.ovs.vsctl("set", "port", PORT, f"external_ids={ids}")
    wait_for(lambda: lab.planned() == [], 60, "the port is as it should be again")
    assert lab.passes({"its own": frames.plain()}) == {"its own"}


# -- the table of MACs ----------------------------------------------------------------------------


def test_a_vm_that_invents_macs_crowds_out_its_own_alone(lab: Lab) -> None:
    """OVS evicts from the port that has most entries (lib/mac-learning.c)."""
    lab.plug(UNFILTERED)
    lab.ovs.vsctl("set", "bridge", BRIDGE, "other_config:mac-table-size=512")
    near, far = "52:54:00:00:aa:01", "52:54:00:00:aa:02"
    with added(lab.ovs, SERVICE), ExitStack() as stack:
        lab.agent.call("POST", "/v1/reconcile", {})
        service = stack.enter_context(mouth(None, SERVICE))
        wire = stack.enter_context(mouth(FAR, "wire0"))
        nosy = stack.enter_context(hearing("vm-p1", NIC))
        victim = stack.enter_context(hearing(None, SERVICE))
        known = lambda: {near, far} <= set(lab.ovs.appctl("fdb/show", BRIDGE).split())  # noqa: E731

        def learnt() -> bool:
            # Again each time: the first frames may come before the new port forwards.
            for out, mac in ((service, near), (wire, far)):
                out.send(frames.plain(mac, frames.EVERYBODY))
            return known()

        wait_for(learnt, 60, "the bridge knows both")

        def crowd() -> bool:
            for number in range(2048):
                lab.out.send(frames.plain(f"52:54:01:00:{number >> 8:02x}:{number & 255:02x}"))
            shown = lab.ovs.appctl("fdb/stats-show", BRIDGE)
            return int(re.findall(r"evicted MAC entries *: (\d+)", shown)[0]) > 1024

        wait_for(crowd, 90, "the table is full")
        assert known(), "the entries of others are there"
        wire.send(marked(frames.plain(far, near), 1 << 20))
        arrived = lambda: victim.listen(time.monotonic() + 0.2) or victim.of(1 << 20)  # noqa: E731
        wait_for(lambda: bool(arrived()), 60, "the frame is where it should be")
        nosy.listen(time.monotonic() + 0.5)
        assert nosy.of(1 << 20) == [], "and nowhere else"
    lab.ovs.vsctl("remove", "bridge", BRIDGE, "other_config", "mac-table-size")


# -- while flows are made again -------------------------------------------------------------------


@contextmanager
def streaming(lab: Lab) -> Iterator[None]:
    """The VM sends all the time, what its filter lets pass."""
    stop = threading.Event()

    def stream() -> None:
        while not stop.wait(0.001):
            lab.out.send(frames.plain())

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(90)


def test_flows_of_an_older_agent_are_replaced_and_nothing_is_dropped(lab: Lab) -> None:
    """OVS counts at both ends of the bridge: what a receiver misses on a busy machine is no matter."""
    lab.plug(OWN_MAC)
    lab.agent.stop()
    cookie, ofport = port_cookie("p1"), lab.ovs.get("Interface", PORT, "ofport")
    of_port = f"cookie={cookie:#x},in_port={ofport}"
    older = [
        f"delete cookie={cookie:#x}/-1",
        f"delete cookie={COOKIE_MARK:#x}/-1",
        f"add {of_port},priority=100,dl_src={frames.MAC},actions=NORMAL",
        f"add {of_port},priority=110,arp,dl_src={frames.MAC},arp_sha={frames.MAC},actions=NORMAL",
        f"add {of_port},priority=109,arp,actions=drop",
        f"add cookie={COOKIE_MARK:#x},priority=100,in_port=LOCAL,actions=NORMAL",
        f"add cookie={COOKIE_MARK:#x},priority=100,in_port={NIC0},actions=NORMAL",
    ]
    file = lab.agent.directory / "older.flows"
    file.write_text("\n".join(older) + "\n")
    lab.ovs.ofctl("set-frags", BRIDGE, "normal")
    lab.ovs.ofctl("--bundle", "add-flows", BRIDGE, file)
    # One queue leads here: what other tests sent has come before this.
    assert lab.passes({"its own": frames.plain()}) == {"its own"}
    entered, left = lab.still()
    with streaming(lab):
        wait_for(lambda: lab.entered(PORT) > entered, 60, "frames go on by the older flows")
        before = lab.entered(PORT)
        lab.agent.start()
        wait_for(lambda: lab.planned() == [], 60, "the flows are as they should be")
        after = lab.entered(PORT)
        wait_for(lambda: lab.entered(PORT) > after, 60, "frames go on by the new ones")
    assert after > before, "frames came while flows were replaced"
    wait_for(
        lambda: lab.left(NIC0) - left == lab.entered(PORT) - entered,
        60,
        "all that came from the VM has left by the uplink",
    )
    assert "in_port=LOCAL" not in lab.ovs.ofctl("dump-flows", BRIDGE)
    assert lab.passes({"tag": frames.tags()["VID 0, VID 200"]}) == set()


# -- elsewhere ------------------------------------------------------------------------------------


def test_on_a_bridge_of_the_operators_no_tag_enters_either(lab: Lab) -> None:
    """Its flows are his, and decide on the rest."""
    lab.ovs.vsctl(
        "add-br",
        THEIRS,
        "--",
        "set",
        "bridge",
        THEIRS,
        "datapath_type=netdev",
        "--",
        "add-port",
        THEIRS,
        "np-nic1",
        "--",
        "set",
        "interface",
        "np-nic1",
        "type=dpdk",
        'options:dpdk-devargs="net_pcap1,rx_iface_in=nic1,tx_iface=nic1"',
    )
    try:
        where = {"physical_network": "physnet2"}
        spec = make_spec(1, vlan_id=None, port_security=UNFILTERED, network=where)
        with hearing(FAR, "wire1") as wire, lab.vm("p2", spec) as out:
            found = send_all(out, wire, frames.tags(), frames.plain())
            assert {name for name, arrivals in found.items() if arrivals} == set()
            assert "fragments-br-theirs" in lab.findings()
            assert lab.ovs.ofctl("get-frags", THEIRS).strip() == "normal"
        assert lab.agent.call("DELETE", "/v1/ports/p2")[0] == 204
        assert "0x6e70" not in lab.ovs.ofctl("dump-flows", THEIRS)
    finally:
        lab.ovs.vsctl("del-br", THEIRS)
