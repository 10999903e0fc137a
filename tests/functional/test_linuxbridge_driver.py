"""The linuxbridge backend on the real kernel: links, rules, and the frames of two VMs."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import queue
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oslo_config import cfg

from agents.ports.converge import Converged
from drivers.linuxbridge.driver import LinuxBridge
from drivers.linuxbridge.options import GROUP, OPTIONS
from netplugin.api.errors import BackendUnavailable, InvalidRequest, Unsupported
from netplugin.api.models import Network, PortSpec
from netplugin.backend import Change, Intent
from netplugin.host.links import kind_unavailable
from netplugin.host.names import BRIDGE, TAP, device_name, provisional_mac
from netplugin.host.shared import Host
from netplugin.host.usability import Wake
from tests.lab.loop import converge_alone
from tests.lab.processes import run, wait_for

WIRE, FAR_END = "lbwire0", "lbwire1"
BROADCAST = "ff:ff:ff:ff:ff:ff"
MAC_A, MAC_B, OTHER = "52:54:00:00:00:0a", "52:54:00:00:00:0b", "52:54:00:00:00:66"
LINK_LOCAL = "fe80::5054:ff:fe00:a"
HELLO = 0x88B5  # an EtherType for experiments


# -- what a VM does ------------------------------------------------------------------------------


class Vm:
    """Has a tap open as QEMU has: frames go in and out behind a header for offloads."""

    def __init__(self, port_id: str, mac: str, queues: int = 1, name: str = "") -> None:
        self.mac = mac
        # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR, and with several queues IFF_MULTI_QUEUE
        flags = 0x0002 | 0x1000 | 0x4000 | (0x0100 if queues > 1 else 0)
        request = struct.pack("16sH22x", (name or device_name(TAP, port_id)).encode(), flags)
        self.queues = [os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK) for _ in range(queues)]
        for descriptor in self.queues:
            fcntl.ioctl(descriptor, 0x400454CA, request)

    def send(self, frame: bytes) -> None:
        os.write(self.queues[0], bytes(10) + frame.ljust(60, b"\0"))

    def receive(self, seconds: float) -> bytes | None:
        ready, _, _ = select.select(self.queues, [], [], seconds)
        return os.read(ready[0], 65536)[10:] if ready else None

    def close(self) -> None:
        for descriptor in self.queues:
            os.close(descriptor)


class Wire:
    """The far end of the uplink."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.bind((FAR_END, 0))

    def send(self, frame: bytes) -> None:
        self._socket.send(frame.ljust(60, b"\0"))

    def receive(self, seconds: float) -> bytes | None:
        ready, _, _ = select.select([self._socket], [], [], seconds)
        return self._socket.recv(65536) if ready else None

    def close(self) -> None:
        self._socket.close()


def frame(kind: int, payload: bytes, source: str = MAC_A, to: str = BROADCAST) -> bytes:
    return mac(to) + mac(source) + struct.pack("!H", kind) + payload


def mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def ip(text: str) -> bytes:
    return ipaddress.ip_address(text).packed


def arp(sender_mac: str, sender_ip: str, target_ip: str = "10.0.0.9", operation: int = 1) -> bytes:
    head = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation)
    return head + mac(sender_mac) + ip(sender_ip) + bytes(6) + ip(target_ip)


def ipv4(source: str, target: str = "10.0.0.9", protocol: int = 17, payload: bytes = b"") -> bytes:
    payload = payload or struct.pack("!HHHH", 1000, 2000, 8, 0)
    size = 20 + len(payload)
    head = struct.pack("!BBHHHBBH", 0x45, 0, size, 1, 0, 64, protocol, 0) + ip(source) + ip(target)
    # With br_netfilter the kernel drops what has a wrong sum before any rule of ours can matter.
    total = sum(struct.unpack("!10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return head[:10] + struct.pack("!H", 0xFFFF - total) + head[12:] + payload


def udp(sport: int, dport: int) -> bytes:
    return struct.pack("!HHHH", sport, dport, 12, 0) + bytes(4)


def ipv6(source: str, payload: bytes, target: str = "ff02::1", following: int = 58) -> bytes:
    return struct.pack("!IHBB", 6 << 28, len(payload), following, 255) + ip(source) + ip(target) + payload


def icmpv6(kind: int, target: str | None = None) -> bytes:
    return struct.pack("!BBHI", kind, 0, 0, 0) + (ip(target) if target else bytes(8))


def neighbour(kind: int, source: str, target: str) -> bytes:
    return ipv6(source, icmpv6(kind, target))


# -- what the tests stand on -----------------------------------------------------------------------


def make_driver(local_ip: str | None = None, /, **interfaces: str) -> LinuxBridge:
    conf = cfg.ConfigOpts()
    conf([], default_config_files=[], default_config_dirs=[])
    conf.register_opts(OPTIONS, group=GROUP)
    conf.set_override("physical_interfaces", interfaces, group=GROUP)
    conf.set_override("local_ip", local_ip, group=GROUP)
    return LinuxBridge(conf, Host(conf))


@pytest.fixture
def driver() -> Iterator[LinuxBridge]:
    """A network on this host alone (net1) and one with a wire (net2); all is clean afterwards."""
    run(["ip", "link", "add", WIRE, "type", "veth", "peer", FAR_END])
    for end in (WIRE, FAR_END):
        run(["ip", "link", "set", end, "mtu", "2000", "up"])
    made = make_driver(net1="", net2=WIRE)
    yield made
    remove_all(made)
    made.close()
    run(["ip", "link", "delete", WIRE])


def remove_all(driver: LinuxBridge) -> None:
    ports = driver.observe(None, in_a_minute()).ports
    plug(driver, dict.fromkeys(ports))


def make_spec(
    source: str = MAC_A, network: str = "net1", mtu: int = 1500, queues: int = 1, **security: Any
) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": source,
            "backend": "linuxbridge",
            "network": {"type": "flat", "physical_network": network, "mtu": mtu},
            "queues": queues,
            "port_security": security,
        }
    )


def in_a_minute() -> float:
    return time.monotonic() + 60


def try_plug(driver: LinuxBridge, desired: dict[str, PortSpec | None], *, whole: bool = False) -> Converged:
    intents = [Intent(port_id, spec) for port_id, spec in desired.items()]
    return converge_alone(driver, intents, whole=whole)


def plug(driver: LinuxBridge, desired: dict[str, PortSpec | None], *, whole: bool = False) -> Converged:
    result = try_plug(driver, desired, whole=whole)
    assert result.failed == {}
    return result


def planned(
    driver: LinuxBridge, desired: dict[str, PortSpec | None], *, whole: bool = True
) -> tuple[Change, ...]:
    intents = [Intent(port_id, spec) for port_id, spec in desired.items()]
    seen = driver.observe(None if whole else list(desired), in_a_minute())
    return driver.plan(intents, seen).changes


def link(name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(run(["ip", "-j", "-d", "link", "show", name]))
    return found[0]


def links() -> set[str]:
    found = json.loads(run(["ip", "-j", "link"]))
    return {entry["ifname"] for entry in found}


def rules() -> str:
    return run(["nft", "-s", "list", "ruleset"])


def nft(text: str) -> None:
    run(["nft", text])


def says_no(path: str) -> bool:
    return Path("/proc/sys/net/ipv6/conf", path, "disable_ipv6").read_text().strip() == "1"


# -- links and rules -------------------------------------------------------------------------------


def test_the_driver_can_be_used_here(driver: LinuxBridge) -> None:
    before = links()
    assert driver.probe().usable and driver.probe().usable
    assert links() == before


def test_one_interface_for_two_networks_is_reported(driver: LinuxBridge) -> None:
    state = make_driver(net1=WIRE, net2=WIRE).probe()
    assert not state.usable and WIRE in str(state.reason) and state.fix


def test_what_cannot_be_had_is_refused_before(driver: LinuxBridge) -> None:
    base = make_spec().model_dump(mode="json")
    for part in ({"qos": {"min_egress_kbps": 8000}}, {"vf": {"trusted": True}}):
        with pytest.raises(Unsupported):
            driver.validate(PortSpec.model_validate({**base, **part}))
    with pytest.raises(InvalidRequest) as unknown:
        driver.validate(make_spec(network="nowhere"))
    assert unknown.value.errors[0].field == "network.physical_network"
    driver.validate(make_spec())


def test_a_kernel_without_vlans_refuses_vlans_alone(
    driver: LinuxBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlan = {"type": "vlan", "physical_network": "net2", "vlan_id": 7}
    spec = make_spec().model_copy(update={"network": Network.model_validate(vlan)})
    assert driver.probe().usable
    driver.validate(make_spec(network="net2"))
    alone = Network.model_validate({**vlan, "physical_network": "net1"})
    driver.validate(make_spec().model_copy(update={"network": alone}))  # it needs no device
    with monkeypatch.context() as patched:
        reason = kind_unavailable("vlan") or "Unknown device type"
        patched.setattr("drivers.linuxbridge.driver.kind_unavailable", lambda _: reason)
        with pytest.raises(BackendUnavailable) as refused:
            driver.validate(spec)
    assert refused.value.step == "vlan" and refused.value.fix == "modprobe 8021q"
    assert reason in refused.value.detail and "Unknown device type" in reason
    if kind_unavailable("vlan") is None:
        driver.validate(spec)


def test_a_plugged_port_is_as_asked_and_the_second_time_nothing_is_done(
    driver: LinuxBridge,
) -> None:
    desired: dict[str, PortSpec | None] = {"p": make_spec(mtu=1400, queues=2)}
    result = plug(driver, desired)
    tap, bridge = device_name(TAP, "p"), device_name(BRIDGE, "net1")
    found = link(tap)
    assert (found["mtu"], found["master"], found["ifalias"]) == (1400, bridge, "netplugin-port=p")
    assert "UP" in found["flags"] and says_no(tap) and says_no(bridge)
    data = found["linkinfo"]["info_data"]
    assert data["persist"] and data["multi_queue"] and data["vnet_hdr"] and not data["pi"]
    found = link(bridge)
    assert (found["mtu"], found["ifalias"]) == (1400, "netplugin-bridge=net1")
    data = found["linkinfo"]["info_data"]
    assert (data["stp_state"], data["forward_delay"], data["mcast_snooping"]) == (0, 0, 0)
    assert result.observed["p"].fault is None and result.observed["p"].details["mtu"] == 1400
    binding = driver.binding(Intent("p", desired["p"]))
    assert binding.vif_type == "tap" and tap in binding.interface_xml
    assert planned(driver, desired) == planned(driver, desired, whole=False) == ()
    assert plug(driver, desired).changes == ()


def test_removal_leaves_nothing_and_takes_nothing_else(driver: LinuxBridge) -> None:
    nft("add table bridge theirs; add chain bridge theirs filter { type filter hook prerouting priority 0; }")
    nft("add rule bridge theirs filter ether type 0x9999 drop")
    run(["ip", "link", "add", "lbtheirs", "type", "bridge"])
    run(["ip", "link", "add", "lbveth", "master", "lbtheirs", "type", "veth"])
    try:
        before = (links(), rules(), link("lbveth")["master"])
        plug(
            driver,
            {
                "p": make_spec(),
                "q": make_spec(MAC_B, "net2", allowed_addresses=[{"ip": "10.0.0.7"}]),
            },
        )
        assert links() - before[0] and rules() != before[1]
        plug(driver, {"p": None})
        assert device_name(BRIDGE, "net1") not in links() and device_name(BRIDGE, "net2") in links()
        assert link(WIRE)["master"] == device_name(BRIDGE, "net2")
        plug(driver, {"q": None})
        assert (links(), rules(), link("lbveth")["master"]) == before
        assert "master" not in link(WIRE)
        assert plug(driver, {"q": None}).changes == ()
    finally:
        run(["ip", "link", "delete", "lbveth"])
        run(["ip", "link", "delete", "lbtheirs"])
        nft("delete table bridge theirs")


DRIFT = {
    "mtu": ["ip", "link", "set", "{tap}", "mtu", "1000"],
    "down": ["ip", "link", "set", "{tap}", "down"],
    "off its bridge": ["ip", "link", "set", "{tap}", "nomaster"],
    "ipv6": ["sysctl", "-q", "net.ipv6.conf.{tap}.disable_ipv6=0"],
    "deleted": ["ip", "link", "delete", "{tap}"],
    "bridge mtu": ["ip", "link", "set", "{bridge}", "mtu", "1000"],
    "bridge down": ["ip", "link", "set", "{bridge}", "down"],
    "bridge deleted": ["ip", "link", "delete", "{bridge}"],
    "bridge options": ["ip", "link", "set", "{bridge}", "type", "bridge", "mcast_snooping", "1"],
    "chain flushed": ["nft", "flush chain bridge netplugin {tap}"],
    "rule added": ["nft", "insert rule bridge netplugin {tap} accept"],
    "unmapped": ["nft", "delete element bridge netplugin ports {{ {tap} }}"],
    "base flushed": ["nft", "flush chain bridge netplugin prerouting"],
    "input flushed": ["nft", "flush chain bridge netplugin input"],
    "output flushed": ["nft", "flush chain bridge netplugin postrouting"],
    "policy": ["nft", "add chain bridge netplugin prerouting {{ policy drop; }}"],
    "table deleted": ["nft", "delete table bridge netplugin"],
    "guard removed": ["tc", "qdisc", "delete", "dev", "{tap}", "ingress"],
    "guard's filter removed": ["tc", "filter", "delete", "dev", "{tap}", "ingress"],
    "guard of offloads removed": ["tc", "filter", "delete", "dev", "{tap}", "ingress", "pref", "28270"],
    "bridge's guard removed": ["tc", "qdisc", "delete", "dev", "{bridge}", "ingress"],
    "learning": ["bridge", "link", "set", "dev", "{tap}", "learning", "on"],
    "MAC released": ["bridge", "fdb", "delete", MAC_A, "dev", "{tap}", "master"],
    "reserved groups": [
        "ip",
        "link",
        "set",
        "{bridge}",
        "type",
        "bridge",
        "no_linklocal_learn",
        "0",
    ],
    "wire off": ["ip", "link", "set", WIRE, "nomaster"],
}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "partial"])
@pytest.mark.parametrize("what", DRIFT)
def test_drift_is_repaired(driver: LinuxBridge, what: str, whole: bool) -> None:
    security = {"allowed_addresses": [{"ip": "10.0.0.0/24"}, {"ip": "2001:db8::/57"}]}
    desired: dict[str, PortSpec | None] = {
        "p": make_spec(network="net2", **security),
        "q": make_spec(MAC_B, "net2"),
    }
    plug(driver, desired)
    names = {"tap": device_name(TAP, "p"), "bridge": device_name(BRIDGE, "net2")}
    run([part.format(**names) for part in DRIFT[what]])
    assert planned(driver, desired, whole=whole) != ()
    assert plug(driver, desired, whole=whole).changes != ()
    assert planned(driver, desired) == ()
    assert link(WIRE)["master"] == link(names["tap"])["master"] == names["bridge"]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "partial"])
def test_a_tap_has_the_name_that_was_chosen(driver: LinuxBridge, whole: bool) -> None:
    named = make_spec().model_copy(update={"port_name": "vnic0.1"})
    plug(driver, {"a": named, "b": make_spec(MAC_B)})
    a, b = Vm("a", MAC_A, name="vnic0.1"), Vm("b", MAC_B)
    with vms(a, b):
        until_open(a, b, lambda: hello(MAC_A))
        until_open(b, a, lambda: hello(MAC_B))
        assert Path("/sys/class/net/vnic0.1").exists() and link(device_name(TAP, "a"))["ifname"] == "vnic0.1"
        for broken in (
            ["ip", "link", "set", "vnic0.1", "group", "7"],
            ["ip", "link", "set", "vnic0.1", "name", "vnic9"],
            ["ip", "link", "property", "del", "dev", "vnic0.1", "altname", device_name(TAP, "a")],
            ["nft", "delete element bridge netplugin ports { vnic0.1 }"],
        ):
            run(broken)
            lost, marker = hello(MAC_A), hello(MAC_A)
            if broken[0] == "nft":
                a.send(lost)
            plug(driver, {"a": named}, whole=whole)
            assert planned(driver, {"a": named, "b": make_spec(MAC_B)}) == ()
            a.send(marker)
            assert not any(each.startswith(lost) for each in until_received(b, marker)), broken
    run(["ip", "link", "add", "vnic1", "type", "veth", "peer", "name", "vnic1b"])
    failed = try_plug(driver, {"c": named.model_copy(update={"port_name": "vnic1"})}).failed
    assert "device named vnic1 exists" in failed["c"].detail
    plug(driver, {"a": None, "b": None, "c": None})
    assert "vnic1" in links() and "vnic0.1" not in links()
    run(["ip", "link", "delete", "vnic1"])


def test_a_chain_that_nobody_owns_goes(driver: LinuxBridge) -> None:
    desired: dict[str, PortSpec | None] = {"p": make_spec()}
    plug(driver, desired)
    nft("add chain bridge netplugin npt0123; add element bridge netplugin ports { npt0123 : jump npt0123 }")
    plug(driver, desired, whole=True)
    assert "npt0123" not in rules()
    assert planned(driver, desired) == ()


def test_a_hook_that_was_moved_is_made_again(driver: LinuxBridge) -> None:
    desired: dict[str, PortSpec | None] = {"p": make_spec()}
    plug(driver, desired)
    nft(
        "delete chain bridge netplugin input; "
        "add chain bridge netplugin input { type filter hook output priority 7; }"
    )
    plug(driver, desired)
    assert "type filter hook input priority -350" in rules()


@pytest.mark.parametrize("stage", range(9))
def test_an_agent_that_dies_midway_leaves_nothing_that_the_next_cannot_finish(
    driver: LinuxBridge, stage: int
) -> None:
    before = (links(), rules())
    desired: dict[str, PortSpec | None] = {"p": make_spec(network="net2")}
    for target in (desired, {"p": None}):
        done = planned(driver, target)[:stage]
        assert driver.apply(done, in_a_minute()).failed == {}
        plug(make_driver(net1="", net2=WIRE), target)
        assert planned(driver, target) == ()
        # And given up instead of finished:
        driver.apply(planned(driver, {"p": None} if target is desired else desired)[:stage], in_a_minute())
        plug(driver, target)
    assert (links(), rules()) == before


def test_a_newborn_bridge_is_adopted_or_removed(driver: LinuxBridge) -> None:
    name = device_name(BRIDGE, "net1")
    address = provisional_mac(name)
    for desired in ({"p": make_spec()}, {"p": None}):
        run(["ip", "link", "add", name, "address", address, "type", "bridge"])
        plug(driver, desired, whole=True)
        assert (name in links()) == (desired["p"] is not None)
        plug(driver, {"p": None}, whole=True)


def test_many_ports_at_once_and_the_largest_mtu_on_the_bridge(driver: LinuxBridge) -> None:
    desired: dict[str, PortSpec | None] = {f"p{n}": make_spec(mtu=1500 + n) for n in range(40)}
    plug(driver, desired)
    bridge = device_name(BRIDGE, "net1")
    assert link(bridge)["mtu"] == 1539
    assert planned(driver, desired) == planned(driver, desired, whole=False) == ()
    plug(driver, {"p39": None})
    assert link(bridge)["mtu"] == 1538
    plug(driver, {"p3": make_spec(mtu=9000)})
    assert link(bridge)["mtu"] == 9000


def test_a_port_moves_to_another_network(driver: LinuxBridge) -> None:
    plug(driver, {"p": make_spec()})
    plug(driver, {"p": make_spec(network="net2")})
    assert link(device_name(TAP, "p"))["master"] == device_name(BRIDGE, "net2")
    assert device_name(BRIDGE, "net1") not in links()


# -- what is in the way ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [device_name(TAP, "p"), device_name(BRIDGE, "net2")])
def test_a_device_of_our_name_that_is_not_ours_is_left_alone(driver: LinuxBridge, name: str) -> None:
    run(["ip", "link", "add", name, "type", "bridge"])
    try:
        for whole in (True, False):
            before = (links(), rules(), link(name))
            result = try_plug(driver, {"p": make_spec(network="net2")}, whole=whole)
            assert result.failed["p"].code == "conflict" and name in result.failed["p"].detail
            plug(driver, {"p": None}, whole=whole)
            assert (links(), rules(), link(name)) == before
    finally:
        run(["ip", "link", "delete", name])


UNFIT = {
    "down": (["ip", "link", "set", WIRE, "down"], "backend_unavailable", "is down"),
    "addresses": (["ip", "addr", "add", "192.0.2.1/24", "dev", WIRE], "conflict", "192.0.2.1/24"),
    "ipv6 address": (
        ["ip", "addr", "add", "2001:db8::1/64", "dev", WIRE],
        "conflict",
        "2001:db8::1/64",
    ),
    "enslaved": (["ip", "link", "set", WIRE, "master", "lbtheirs"], "conflict", "lbtheirs"),
    "small": (["ip", "link", "set", WIRE, "mtu", "1400"], "conflict", "MTU 1400"),
    "renamed": (
        ["ip", "link", "set", WIRE, "down", "name", "lbother"],
        "backend_unavailable",
        "not there",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_an_interface_that_does_not_fit_is_left_alone(driver: LinuxBridge, what: str) -> None:
    command, code, words = UNFIT[what]
    run(["ip", "link", "add", "lbtheirs", "type", "bridge"])
    try:
        run(command)
        before = links()
        error = try_plug(driver, {"p": make_spec(network="net2")}).failed["p"]
        assert (error.code, error.step) == (code, "uplink")
        assert WIRE in error.detail and words in error.detail and error.fix
        assert links() == before and "netplugin" not in rules()
    finally:
        if what == "renamed":
            run(["ip", "link", "set", "lbother", "name", WIRE])
        run(["ip", "link", "delete", "lbtheirs"])


def test_a_port_whose_wire_goes_down_is_faulty_and_stays(driver: LinuxBridge) -> None:
    desired: dict[str, PortSpec | None] = {"p": make_spec(network="net2")}
    plug(driver, desired)
    run(["ip", "link", "set", WIRE, "down"])
    result = plug(driver, desired)
    assert result.changes == () and WIRE in str(result.observed["p"].fault)
    run(["ip", "link", "set", WIRE, "up"])
    assert plug(driver, desired).observed["p"].fault is None


# -- frames ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def vms(*opened: Vm | Wire) -> Iterator[None]:
    try:
        yield
    finally:
        for end in opened:
            end.close()


_serial = iter(range(1, 1 << 30))


def hello(source: str) -> bytes:
    return frame(HELLO, struct.pack("!I", next(_serial)), source)


def passes(sender: Vm | Wire, receiver: Vm | Wire, sent: bytes, marker: bytes) -> bool:
    """Whether the frame arrives before a later one, which does: it shows that nothing is lost."""
    sender.send(sent)
    sender.send(marker)
    arrived = False
    while (got := receiver.receive(90)) is not None:
        if got.startswith(marker):
            return arrived
        arrived |= got.startswith(sent)
    raise AssertionError("not even the frame that is allowed arrived")


def until_open(sender: Vm | Wire, receiver: Vm | Wire, make: Any) -> None:
    """A bridge port forwards a moment after its carrier is there."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        greeting = make()
        sender.send(greeting)
        while (got := receiver.receive(0.1)) is not None:
            if got.startswith(greeting):
                return
    raise AssertionError("the bridge does not forward")


def check(
    driver: LinuxBridge,
    security: dict[str, Any],
    expected: dict[str, tuple[bytes, bool]],
    marker: bytes,
) -> None:
    """Send each frame from a VM with this security to one without, and compare what arrives."""
    plug(driver, {"a": make_spec(**security), "b": make_spec(MAC_B, enabled=False)})
    a, b = Vm("a", MAC_A), Vm("b", MAC_B)
    with vms(a, b):
        until_open(a, b, lambda: marker)
        found = {name: passes(a, b, sent, marker) for name, (sent, _) in expected.items()}
        assert found == {name: arrives for name, (_, arrives) in expected.items()}


VLAN = struct.pack("!HH", 100, 0x0800)


def test_a_vm_may_send_from_its_own_mac_only(driver: LinuxBridge) -> None:
    long_arp = bytearray(arp(MAC_A, "10.0.0.5"))
    long_arp[4] = 8  # a hardware address of another length: the fields stand elsewhere
    check(
        driver,
        {},
        {
            "own ip": (frame(0x0800, ipv4("10.0.0.5")), True),
            "any ip": (frame(0x0800, ipv4("10.9.9.9")), True),
            "unicast": (frame(0x0800, ipv4("10.0.0.5"), to=MAC_B), True),
            "spoofed mac": (frame(0x0800, ipv4("10.0.0.5"), OTHER), False),
            "spoofed unknown": (frame(HELLO, b"x", OTHER), False),
            "arp": (frame(0x0806, arp(MAC_A, "10.0.0.5")), True),
            "spoofed arp": (frame(0x0806, arp(OTHER, "10.0.0.5")), False),
            "spoofed arp answer": (frame(0x0806, arp(MAC_B, "10.0.0.5", operation=2)), False),
            "odd arp": (frame(0x0806, bytes(long_arp)), False),
            "vlan": (frame(0x8100, VLAN + ipv4("10.0.0.5")), False),
            "priority tag": (
                frame(0x8100, struct.pack("!HH", 0, 0x0800) + ipv4("10.0.0.5")),
                False,
            ),
            "priority arp": (
                frame(0x8100, struct.pack("!HH", 0, 0x0806) + arp(OTHER, "10.0.0.5")),
                False,
            ),
            "service tag": (frame(0x88A8, VLAN + ipv4("10.0.0.5")), False),
            "two tags": (
                frame(0x88A8, struct.pack("!HH", 5, 0x8100) + VLAN + ipv4("10.0.0.5")),
                False,
            ),
            "rarp": (frame(0x8035, arp(MAC_A, "0.0.0.0", operation=3)), True),
        },
        frame(HELLO, b"marker"),
    )


def test_a_vm_without_port_security_may_send_all_but_tags(driver: LinuxBridge) -> None:
    check(
        driver,
        {"enabled": False},
        {
            "any": (frame(0x0800, ipv4("10.9.9.9"), OTHER), True),
            "arp": (frame(0x0806, arp(OTHER, "10.0.0.5")), True),
            "vlan": (frame(0x8100, VLAN + ipv4("10.0.0.5")), False),
            "service tag": (frame(0x88A8, VLAN + ipv4("10.0.0.5")), False),
        },
        frame(HELLO, b"marker"),
    )


def test_a_vm_may_send_from_its_ipv4_addresses_only(driver: LinuxBridge) -> None:
    allowed = [{"ip": "10.0.0.5"}, {"ip": "10.1.0.0/23"}, {"ip": "10.0.0.7", "mac": MAC_B}]
    discover = ipv4("0.0.0.0", "255.255.255.255", payload=udp(68, 67))
    check(
        driver,
        {"allowed_addresses": allowed},
        {
            "own": (frame(0x0800, ipv4("10.0.0.5")), True),
            "in prefix": (frame(0x0800, ipv4("10.1.1.9")), True),
            "beside prefix": (frame(0x0800, ipv4("10.1.2.9")), False),
            "spoofed ip": (frame(0x0800, ipv4("10.0.0.6")), False),
            "own ip, other mac": (frame(0x0800, ipv4("10.0.0.5"), OTHER), False),
            "second mac": (frame(0x0800, ipv4("10.0.0.7"), MAC_B), True),
            "ip of the second mac": (frame(0x0800, ipv4("10.0.0.7")), False),
            "arp": (frame(0x0806, arp(MAC_A, "10.0.0.5")), True),
            "arp, other ip": (frame(0x0806, arp(MAC_A, "10.0.0.6")), False),
            "arp, other mac within": (frame(0x0806, arp(OTHER, "10.0.0.5")), False),
            "arp probe": (frame(0x0806, arp(MAC_A, "0.0.0.0", "10.0.0.5")), True),
            "arp probe in prefix": (frame(0x0806, arp(MAC_A, "0.0.0.0", "10.1.1.9")), True),
            "arp probe of another's": (frame(0x0806, arp(MAC_A, "0.0.0.0", "10.0.0.6")), False),
            "arp answer from nobody": (frame(0x0806, arp(MAC_A, "0.0.0.0", operation=2)), False),
            "dhcp": (frame(0x0800, discover), True),
            "dhcp to one": (frame(0x0800, ipv4("0.0.0.0", "10.0.0.1", payload=udp(68, 67))), False),
            "dhcp answer": (frame(0x0800, ipv4("0.0.0.0", "255.255.255.255", payload=udp(67, 68))), False),
            "ipv6": (frame(0x86DD, neighbour(135, LINK_LOCAL, "fe80::1")), False),
            "tagged": (frame(0x8100, VLAN + ipv4("10.0.0.5")), False),
            "other protocol": (frame(HELLO, b"x"), False),
        },
        frame(0x0800, ipv4("10.0.0.5", "10.0.0.200")),
    )


def test_a_vm_may_send_from_its_ipv6_addresses_only(driver: LinuxBridge) -> None:
    own, prefix = "2001:db8::5", "2001:db8:1:ff80::/57"
    inside, outside = "2001:db8:1:ff85::1", "2001:db8:1:ff05::1"
    plain = struct.pack("!HHHH", 1, 2, 8, 0)

    def data(source: str) -> bytes:
        return frame(0x86DD, ipv6(source, plain, following=17))

    def message(kind: int, source: str, target: str, sender: str = MAC_A) -> bytes:
        return frame(0x86DD, neighbour(kind, source, target), sender)

    # The target is in the second fragment: what cannot be read is not accepted.
    cut = struct.pack("!BBHI", 58, 0, 1, 7) + icmpv6(136, own)[:8]
    options = struct.pack("!BB6x", 58, 0) + icmpv6(136, "2001:db8::6")
    check(
        driver,
        {"allowed_addresses": [{"ip": own}, {"ip": prefix}]},
        {
            "own": (data(own), True),
            "inside": (data(inside), True),
            "beside": (data(outside), False),
            "spoofed": (data("2001:db8::6"), False),
            "own advertisement": (message(136, own, own), True),
            "unicast own advertisement": (frame(0x86DD, neighbour(136, own, own), to=MAC_B), True),
            "unicast spoofed advertisement": (
                frame(0x86DD, ipv6(own, icmpv6(136, "2001:db8::6"), "2001:db8::9"), to=MAC_B),
                False,
            ),
            "spoofed target": (message(136, own, "2001:db8::6"), False),
            "spoofed target from link-local": (message(136, LINK_LOCAL, "2001:db8::6"), False),
            "spoofed target behind options": (frame(0x86DD, ipv6(own, options, following=0)), False),
            "target in the next fragment": (frame(0x86DD, ipv6(own, cut, following=44)), False),
            "advertised from link-local": (message(136, LINK_LOCAL, own), True),
            "link-local advertised": (message(136, LINK_LOCAL, LINK_LOCAL), True),
            "prefix advertised": (message(136, inside, inside), True),
            "beside prefix advertised": (message(136, inside, outside), False),
            "prefix from link-local": (message(136, LINK_LOCAL, inside), True),
            "solicitation": (message(135, own, "2001:db8::1"), True),
            "solicitation from link-local": (message(135, LINK_LOCAL, "2001:db8::1"), True),
            "address tried": (message(135, "::", own), True),
            "link-local tried": (message(135, "::", LINK_LOCAL), True),
            "other's address tried": (message(135, "::", "2001:db8::6"), False),
            "other mac": (message(135, own, "2001:db8::1", OTHER), False),
            "router solicitation": (frame(0x86DD, ipv6(LINK_LOCAL, icmpv6(133))), True),
            "router advertisement": (frame(0x86DD, ipv6(LINK_LOCAL, icmpv6(134))), False),
            "redirect": (message(137, LINK_LOCAL, own), False),
            "listener report": (frame(0x86DD, ipv6("::", icmpv6(143))), True),
            "other's link-local": (message(135, "fe80::1", "2001:db8::1"), False),
            "arp": (frame(0x0806, arp(MAC_A, "10.0.0.5")), False),
        },
        frame(0x86DD, ipv6(own, plain, "2001:db8::200", following=17)),
    )


def test_a_tap_without_its_filter_is_shut(driver: LinuxBridge) -> None:
    desired: dict[str, PortSpec | None] = {"a": make_spec(), "b": make_spec(MAC_B)}
    plug(driver, desired)
    a, b = Vm("a", MAC_A), Vm("b", MAC_B)
    with vms(a, b):
        until_open(a, b, lambda: hello(MAC_A))
        until_open(b, a, lambda: hello(MAC_B))
        nft(f"delete element bridge netplugin ports {{ {device_name(TAP, 'a')} }}")
        lost, marker = hello(MAC_A), hello(MAC_A)
        a.send(lost)
        plug(driver, desired)
        a.send(marker)
        assert not any(each.startswith(lost) for each in until_received(b, marker))


def until_received(vm: Vm, marker: bytes) -> list[bytes]:
    """What comes besides this frame, which was sent last: before it, and a moment after it."""
    found: list[bytes] = []
    received = False
    while (got := vm.receive(0.2 if received else 90)) is not None:
        received |= got.startswith(marker)
        found.append(got)
    assert received, "not even the frame that is allowed arrived"
    return found


def test_a_filter_changes_under_a_running_vm(driver: LinuxBridge) -> None:
    plug(driver, {"a": make_spec(queues=2), "b": make_spec(MAC_B)})
    a, b = Vm("a", MAC_A, queues=2), Vm("b", MAC_B)
    with vms(a, b):
        until_open(a, b, lambda: hello(MAC_A))
        spoofed = frame(0x0800, ipv4("10.0.0.66"))
        good = frame(0x0800, ipv4("10.0.0.5"))
        assert passes(a, b, spoofed, good)
        index = link(device_name(TAP, "a"))["ifindex"]
        narrow = make_spec(queues=2, allowed_addresses=[{"ip": "10.0.0.5"}])
        changes = plug(driver, {"a": narrow}).changes
        assert [type(change).__name__ for change in changes] == ["SetGuard", "SetFilter"]
        assert not passes(a, b, spoofed, good)
        assert link(device_name(TAP, "a"))["ifindex"] == index
        # A port that comes or goes next to it does not disturb it either.
        plug(driver, {"c": make_spec(OTHER)})
        assert not passes(a, b, spoofed, good)
        plug(driver, {"c": None})
        assert not passes(a, b, spoofed, good)


def test_frames_go_over_the_wire_and_the_filter_holds_there_too(driver: LinuxBridge) -> None:
    plug(driver, {"a": make_spec(network="net2")})
    a, wire = Vm("a", MAC_A), Wire()
    with vms(a, wire):
        until_open(a, wire, lambda: hello(MAC_A))
        until_open(wire, a, lambda: hello(MAC_B))
        assert not passes(a, wire, hello(OTHER), hello(MAC_A))
        large = frame(HELLO, bytes(1500), to=FAR_MAC)
        assert passes(a, wire, large, hello(MAC_A))
        # Other networks on the same wire are none of this VM's business.
        for kind in (0x8100, 0x88A8):
            tagged = frame(kind, struct.pack("!HH", 100, HELLO) + b"x", MAC_B)
            assert not passes(wire, a, tagged, hello(MAC_B))
        assert passes(wire, a, frame(HELLO, b"x", MAC_B), hello(MAC_B))


FAR_MAC = "52:54:00:00:00:ff"


def test_the_host_does_not_answer_a_vm(driver: LinuxBridge) -> None:
    """Linux answers ARP for each of its addresses on each of its interfaces, unless it is stopped."""
    run(["ip", "addr", "add", "10.0.0.200/32", "dev", "lo"])
    plug(driver, {"a": make_spec(enabled=False), "b": make_spec(MAC_B)})
    a, b = Vm("a", MAC_A), Vm("b", MAC_B)
    try:
        with vms(a, b):
            until_open(a, b, lambda: hello(MAC_A))
            until_open(b, a, lambda: hello(MAC_B))
            a.send(frame(0x0806, arp(MAC_A, "10.0.0.5", "10.0.0.200")))
            b.send(marker := hello(MAC_B))
            assert not any(each[12:14] == b"\x08\x06" for each in until_received(a, marker))
    finally:
        run(["ip", "addr", "delete", "10.0.0.200/32", "dev", "lo"])


def test_other_bridges_pass(driver: LinuxBridge) -> None:
    plug(driver, {"a": make_spec()})
    run(["ip", "link", "add", "lbtheirs", "up", "type", "bridge", "forward_delay", "0"])
    ends: list[Wire] = []
    try:
        for n in (1, 2):
            run(
                [
                    "ip",
                    "link",
                    "add",
                    f"lbin{n}",
                    "up",
                    "master",
                    "lbtheirs",
                    "type",
                    "veth",
                    "peer",
                    f"lbout{n}",
                ]
            )
            run(["ip", "link", "set", f"lbout{n}", "up"])
            end = Wire()
            end._socket.bind((f"lbout{n}", 0))
            ends.append(end)
        until_open(ends[0], ends[1], lambda: hello(OTHER))
        assert passes(ends[0], ends[1], frame(0x0806, arp(MAC_A, "1.1.1.1"), OTHER), hello(OTHER))
    finally:
        for end in ends:
            end.close()
        run(["ip", "link", "delete", "lbtheirs"])
        for n in (1, 2):
            run(["ip", "link", "delete", f"lbin{n}"])


# -- news ------------------------------------------------------------------------------------------


def test_what_others_change_is_reported_and_what_we_change_is_not(driver: LinuxBridge) -> None:
    news: queue.Queue[Wake] = queue.Queue()
    driver.watch(news.put)
    assert news.get(timeout=30).ports is None, "the first says that the host can be looked at"
    desired: dict[str, PortSpec | None] = {"p": make_spec(network="net2"), "q": make_spec(MAC_B)}
    plug(driver, desired)
    vm = Vm("p", MAC_A)
    with vms(vm):
        assert plug(driver, desired).changes == ()
    plug(driver, {"q": None})
    tap = device_name(TAP, "p")
    # The kernel reports late that the VM has gone, and the agent is notified.
    operstate = Path(f"/sys/class/net/{tap}/operstate")
    wait_for(lambda: operstate.read_text() == "down\n", 30, "the VM's carrier is down")
    with contextlib.suppress(queue.Empty):
        while True:
            news.get(timeout=2)
    for command, ports in (
        (["ip", "link", "set", tap, "mtu", "1000"], frozenset({"p"})),
        (["ip", "link", "set", tap, "nomaster"], frozenset({"p"})),
        (["nft", "flush", "ruleset"], None),
        (["tc", "qdisc", "delete", "dev", tap, "ingress"], frozenset({"p"})),
        (["tc", "filter", "delete", "dev", device_name(BRIDGE, "net2"), "ingress"], None),
        (["ip", "link", "set", WIRE, "down"], None),
        (["ip", "link", "set", WIRE, "up"], None),
        (["ip", "link", "delete", tap], frozenset({"p"})),
        (["ip", "link", "delete", device_name(BRIDGE, "net2")], None),
    ):
        assert news.empty(), f"we woke ourselves, or were woken twice, before {command}"
        run(command)
        while news.get(timeout=30).ports != ports:
            pass  # a bridge that goes causes events of its members before
        desired = {"p": make_spec(network="net2")}
        with contextlib.suppress(AssertionError):  # the wire is down once, on purpose
            plug(driver, desired)
        while not news.empty():
            news.get()
