"""MTUs of devices that add a header, of bridges, and of the ports of OVS with the uplinks of their bridge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netplugin.api.models import Finding
from netplugin.tuning import read_live
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import InterfaceFacts, Live, OvsLive, OvsPortLive
from netplugin.tuning.read.network import read_network
from netplugin.tuning.root import known
from tests.unit.ovs_rows import bridge_row, replica_of, text_map
from tests.unit.tuning.golden import facts_of
from tests.unit.tuning.machines import MemoryRoot, Tree


def interface(name: str, mtu: int, *lowers: str, **more: Any) -> InterfaceFacts:
    fields = {"speed_mbps": None, "rx_queues": 1, "tx_queues": 1, "master": None, **more}
    return InterfaceFacts(name=name, mtu=mtu, lowers=lowers, **fields)


def mtus(*interfaces: InterfaceFacts, ports: tuple[OvsPortLive, ...] = ()) -> list[Finding]:
    facts = facts_of("published")
    facts = replace(facts, network=replace(facts.network, interfaces=interfaces))
    live = Live(ovs=OvsLive("3.1.0", "22.11", True, {}, ports)) if ports else Live()
    return [finding for finding in check(Scene(facts, live)) if finding.id == "mtu"]


@pytest.mark.parametrize(
    ("kind", "lower", "most"),
    [
        ("vxlan", 1500, 1450),
        ("vxlan", 9000, 8950),
        ("geneve", 1500, 1450),
        ("gretap", 1500, 1462),
        ("gre", 1500, 1476),
        ("ip6gre", 1500, 1456),
        ("ipip", 1500, 1480),
        ("sit", 1500, 1480),
        ("ip6tnl", 1500, 1460),
        ("wireguard", 1500, 1440),
        ("macsec", 1500, 1468),
        ("hsr", 1500, 1494),
        ("vlan", 1500, 1500),
        ("macvlan", 1500, 1500),
        (None, 1500, 1500),
    ],
)
def test_a_device_has_room_for_its_header(kind: str | None, lower: int, most: int) -> None:
    def above(mtu: int) -> list[Finding]:
        return mtus(interface("eth0", lower), interface("up0", mtu, "eth0", kind=kind))

    assert above(most) == []
    [large] = above(most + 1)
    assert large.status == "fail" and large.found == f"up0 has MTU {most + 1}, eth0 below it {lower}"
    # The smaller one of the fix is what the kernel takes, over IPv6 too.
    *_, smaller = str(large.fix).split("; where a NIC cannot, ")
    assert smaller.startswith("ip link set up0 mtu ") and above(int(smaller.split()[-1])) == []
    raised = int(str(large.fix).split(";")[0].removeprefix("ip link set eth0 mtu "))
    assert mtus(interface("eth0", raised), interface("up0", most + 1, "eth0", kind=kind)) == []
    assert [f.status for f in above(1000)] == ["warn"], "and it may be larger"


@pytest.mark.parametrize(
    ("lower", "kind", "fix"),
    [
        # The kernel gives a VLAN no more than the device below it has, and a bond sets its members.
        (1500, "vlan", "ip link set bond0 mtu 1570; ip link set low0 mtu 1570"),
        (9000, "vlan", "ip link set low0 mtu 1570"),
        (1500, "macsec", "ip link set bond0 mtu 1602; ip link set low0 mtu 1570"),
        (1500, None, "ip link set low0 mtu 1570"),
    ],
)
def test_the_lowest_device_is_raised_first(lower: int, kind: str | None, fix: str) -> None:
    devices = (
        interface("eth0", lower, master="bond0"),
        interface("bond0", lower, "eth0", kind="bond"),
        interface("low0", 1500 if kind != "macsec" else 1468, "bond0", kind=kind),
        interface("vx0", 1500, "low0", kind="vxlan"),
    )
    [found] = [f for f in mtus(*devices) if f.found.startswith("vx0 ")]
    assert str(found.fix).rpartition("; where a NIC cannot")[0] == fix


def test_devices_below_each_other_end() -> None:
    """A copy of a tree is not trusted: no kernel has such links."""
    ring = (interface("a", 1500, "b", kind="vlan"), interface("b", 1500, "a", kind="vlan"))
    assert mtus(*ring, interface("vx0", 1500, "a", kind="vxlan"))


@pytest.mark.parametrize(("lower", "count"), [("macsec", 1), ("vlan", 0), ("bond", 0)])
def test_a_vlan_is_outside_the_mtu_but_above_macsec(lower: str, count: int) -> None:
    found = mtus(interface("low0", 1500, kind=lower), interface("low0.5", 1500, "low0", kind="vlan"))
    assert len(found) == count


def test_a_tunnel_of_the_kernel_is_on_the_device_that_it_is_bound_to() -> None:
    """Or, where no file says on which, on the widest that there is: more would be wrong in any case."""
    nics = interface("eth0", 1500, index=2, link=2), interface("eth1", 9000, index=3, link=3, state="up")
    bound = interface("gre1", 1500, kind="gre", index=9, link=2, state="unknown")
    assert ["gre1 has MTU 1500, eth0 below it 1500"] == [f.found for f in mtus(*nics, bound)]
    for kind, most in (("wireguard", 8940), ("geneve", 8950), ("ipip", 8980)):
        free = interface("t0", most, kind=kind, index=9, link=0, state="unknown")
        assert mtus(*nics, free) == []
        [large] = mtus(*nics, replace(free, mtu=most + 1))
        assert "eth1, the widest that may be below it, 9000" in large.found and large.status == "warn"
        # One that is down, such as the gre0 that comes with the module, and one that OVS has.
        assert mtus(*nics, replace(free, mtu=65000, state="down")) == []
        ovs = interface("ovs-system", 1500)
        assert mtus(*nics, ovs, replace(free, mtu=65000, master="ovs-system")) == []


@pytest.mark.parametrize(("mtu", "text"), [(1500, None), (9000, "a has MTU 9000, its other end b 1500")])
def test_the_ends_of_a_veth(mtu: int, text: str | None) -> None:
    ends = interface("a", mtu, index=4, link=5), interface("b", 1500, index=5, link=4)
    assert [f.found for f in mtus(*ends)] == ([text] if text else [])
    assert mtus(replace(ends[0], link=2), ends[1]) == [], "its other end is in another namespace"


def test_an_mtu_that_says_nothing_of_what_is_below() -> None:
    member = interface("eth0", 1500, master="vrf0"), interface("eth1", 9000, master="ovs-system")
    assert mtus(*member, interface("vrf0", 65575, "eth0"), interface("ovs-system", 1500, "eth1")) == []


def test_members_of_a_bond() -> None:
    bond, member = interface("bond0", 9000, "eth0", kind="bond"), interface("eth0", 1500, master="bond0")
    assert [f.status for f in mtus(bond, member)] == ["fail"]
    assert [f.status for f in mtus(replace(bond, mtu=1400), member)] == ["warn"]
    assert mtus(replace(bond, mtu=1500), member) == []


# -- bridges -------------------------------------------------------------------------------------


def test_a_bridge_of_the_kernel_has_the_least_mtu_of_its_ports() -> None:
    uplink, bridge = interface("ens1f0np0", 9000, master="br0"), interface("br0", 1500, kind="bridge")
    tap = interface("tap0", 1500, master="br0", kind="tun")
    assert mtus(bridge, uplink, tap) == [], "a VM with less than the uplink is no mistake"
    assert mtus(replace(bridge, mtu=9000), uplink, tap) == [], "nor is it one of the host"
    [larger] = mtus(replace(bridge, mtu=9000), replace(uplink, mtu=1500), tap)
    assert (larger.status, larger.fix) == ("fail", "ip link set br0 mtu 1500")
    [alone] = mtus(replace(bridge, mtu=9000), tap)
    assert (alone.status, alone.fix) == ("fail", "ip link set br0 mtu 1500")
    [smaller] = mtus(bridge, uplink, replace(tap, mtu=9000))
    assert (smaller.status, smaller.fix) == ("warn", "ip link set br0 mtu 9000")


@pytest.mark.parametrize(
    ("uplink", "lowers"),
    [
        (interface("ens1f0np0", 1500, master="br0"), ()),
        (interface("eth0.5", 1500, "ens1f1np1", master="br0", kind="vlan"), (interface("ens1f1np1", 1500),)),
        (interface("vx5", 1500, master="br0", kind="vxlan"), (interface("ens1f1np1", 9000),)),
    ],
)
def test_a_port_has_at_most_the_mtu_of_the_uplink_of_its_bridge(
    uplink: InterfaceFacts, lowers: tuple[InterfaceFacts, ...]
) -> None:
    bridges = interface("br0", 1500, kind="bridge"), interface("br1", 9000, kind="bridge")
    taps = interface("tap0", 1500, master="br0"), interface("tap1", 9000, master="br1")
    others = [lower for lower in lowers if lower.mtu == 1500]
    assert [f for f in mtus(*bridges, *taps, uplink, *lowers) if f.status == "fail"] == []
    [large] = mtus(*bridges, replace(taps[0], mtu=9000), taps[1], uplink, *others)
    assert large.found == f"port tap0 of br0 has MTU 9000, its uplink {uplink.name} 1500"
    assert "ip link set tap0 mtu 1500" in str(large.fix)


def port(
    name: str, bridge: str, mtu: int | None = None, kind: str = "dpdkvhostuserclient", **more: Any
) -> OvsPortLive:
    return OvsPortLive(name, name, kind, mtu, bridge=bridge, **more)


UPLINKS = (port("p0", "br-a", 1500, "dpdk"), port("p1", "br-b", 9000, "dpdk"))
PATCHES = (
    port("int-a", "br-int", kind="patch", peer="a-int"),
    port("a-int", "br-a", kind="patch", peer="int-a"),
    port("int-b", "br-int", kind="patch", peer="b-int"),
    port("b-int", "br-b", kind="patch", peer="int-b"),
)


def test_ports_of_ovs_have_the_uplink_of_their_own_bridge() -> None:
    assert mtus(ports=(*UPLINKS, port("vm", "br-b", 9000))) == []
    [large] = mtus(ports=(*UPLINKS, port("vm", "br-a", 9000)))
    assert large.found == "port vm of br-a has MTU 9000, its uplink p0 1500"
    assert "ovs-vsctl set Interface vm mtu_request=1500" in str(large.fix)
    assert mtus(ports=(*UPLINKS, port("vm", "br-c", 9000))) == [], "it has no uplink"


def test_uplinks_are_reached_through_patch_ports() -> None:
    assert mtus(ports=(*UPLINKS, *PATCHES, port("vm", "br-int", 9000))) == []
    [large] = mtus(ports=(*UPLINKS, *PATCHES[:2], port("vm", "br-int", 9000)))
    assert large.found == "port vm of br-int has MTU 9000, its uplink p0 1500"


@pytest.mark.parametrize(("mtu", "count"), [(1450, 0), (1451, 1), (1500, 1)])
def test_a_tunnel_of_ovs_takes_its_header(mtu: int, count: int) -> None:
    tunnel = port("vx", "br-tun", kind="vxlan", header=50)
    found = mtus(ports=(UPLINKS[0], tunnel, port("vm", "br-tun", mtu)))
    assert len(found) == count
    # Over the widest uplink of all: which one, only the routes say.
    assert mtus(ports=(*UPLINKS, tunnel, port("vm", "br-tun", mtu))) == []
    # A network without tunnels may be on the same bridge.
    assert mtus(ports=(UPLINKS[0], replace(tunnel, bridge="br-a"), port("vm", "br-a", mtu))) == []


def test_an_uplink_of_ovs_may_be_a_device_of_the_kernel() -> None:
    ports = port("ens1f0np0", "br-ex", 1500, ""), port("tap0", "br-ex", 9000, "")
    [large] = mtus(interface("ens1f0np0", 1500), ports=ports)
    assert large.found == "port tap0 of br-ex has MTU 9000, its uplink ens1f0np0 1500"


# -- what sysfs has of them ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"uevent": "INTERFACE=x0\nIFINDEX=4\nDEVTYPE=vxlan", "type": "1"}, "vxlan"),
        ({"uevent": "DEVTYPE=wireguard\nINTERFACE=x0", "type": "65534"}, "wireguard"),
        ({"uevent": "INTERFACE=x0", "type": "776"}, "sit"),
        ({"uevent": "INTERFACE=x0", "type": "778"}, "gre"),
        ({"uevent": "INTERFACE=x0", "type": "768"}, "ipip"),
        ({"uevent": "INTERFACE=x0", "type": "1", "tun_flags": "0x1002"}, "tun"),
        ({"uevent": "INTERFACE=x0", "type": "1", "operstate": "unknown", "iflink": "0"}, "gretap"),
        ({"uevent": "INTERFACE=x0", "type": "1", "operstate": "up", "iflink": "9"}, None),
        ({}, None),
    ],
)
def test_the_kind_of_a_device(files: dict[str, str], kind: str | None) -> None:
    files = {"mtu": "1500", "ifindex": "4", "iflink": "4", **files}
    tree = Tree({f"/sys/class/net/x0/{name}": f"{text}\n" for name, text in files.items()})
    [found] = known(read_network(MemoryRoot(tree)).interfaces, ())
    assert (found.kind, found.index) == (kind, 4)


# -- what the database of OVS has ------------------------------------------------------------------


def test_ports_of_ovs_with_bridge_peer_header_and_link() -> None:
    """A tunnel on the kernel's datapath is not one of OVS: the kernel adds its header."""
    remote = {"remote_ip": "10.0.0.2"}
    rows: dict[str, tuple[str, dict[str, str]]] = {
        "vx": ("vxlan", remote),
        "vx6": ("vxlan", {"remote_ip": "fd00::2"}),
        "gen": ("geneve", {"remote_ip": "flow"}),
        "gr": ("gre", remote),
        "pa": ("patch", {"peer": "pb"}),
        "eth0": ("", {}),
        "in0": ("internal", {}),
        "nic": ("dpdk", {"dpdk-devargs": "0000:08:00.0"}),
        "rep": ("dpdk", {"dpdk-devargs": "0000:08:00.0,representor=pf0vf[1-2]"}),
    }
    interfaces = {
        f"i-{name}": {"name": name, "type": kind, "options": text_map(options), "link_state": "up"}
        for name, (kind, options) in rows.items()
    }
    of_kernel = {"i-kx": {"name": "kx", "type": "vxlan", "options": text_map(remote)}}
    ports = {f"p-{i[2:]}": {"name": i[2:], "interfaces": ["uuid", i]} for i in interfaces | of_kernel}
    bridges = {
        "a": bridge_row("br-a", *(port for port in ports if port != "p-kx")),
        "b": bridge_row("br-b", "p-kx") | {"datapath_type": "system"},
    }
    view = replica_of({"Bridge": bridges, "Port": ports, "Interface": interfaces | of_kernel}).view
    found = {port.name: (port.bridge, port.peer, port.header, port.link) for port in read_live._ports(view)}
    assert found == {
        "vx": ("br-a", None, 50, True),
        "vx6": ("br-a", None, 70, True),
        "gen": ("br-a", None, 50, True),
        "gr": ("br-a", None, 38, True),
        "pa": ("br-a", "pb", None, True),
        "eth0": ("br-a", None, None, True),
        **dict.fromkeys(("nic", "rep"), ("br-a", None, None, True)),
    }
    types = {port.name: port.type for port in read_live._ports(view) if port.name in ("nic", "rep")}
    assert types == {"nic": "dpdk", "rep": "representor"}, "frames leave by the NIC alone"


def test_an_xfrm_interface_is_no_tunnel_with_a_header() -> None:
    """Its packets have the MTU of their route (xfrmi_xmit2); it has no DEVTYPE (xfrmi_dev_setup)."""
    files = {"mtu": 1500, "ifindex": 9, "iflink": 4, "type": 65534, "operstate": "unknown", "uevent": ""}
    tree = Tree({f"/sys/class/net/xfrm0/{name}": f"{text}\n" for name, text in files.items()})
    [xfrm] = known(read_network(MemoryRoot(tree)).interfaces, ())
    assert xfrm.kind is None and mtus(interface("eth0", 1500, index=4, link=4), xfrm) == []


@pytest.mark.parametrize("lower", [1500, 1504, 1508, 1520])
def test_the_device_below_the_ports_of_a_switch_chip_has_room_for_a_tag(lower: int) -> None:
    """dsa_user_change_mtu in net/dsa/user.c."""
    assert mtus(interface("eth0", lower), interface("lan1", 1500, "eth0", kind="dsa")) == []


def test_a_vlan_may_have_less_than_another_one_on_the_same_bond() -> None:
    """The bond has the most of its VLANs: storage has 9000, and management 1500, as all of its network."""
    bond, management = interface("bond0", 9000, kind="bond"), interface("bond0.5", 1500, "bond0", kind="vlan")
    assert [f.status for f in mtus(bond, management)] == ["warn"]
    assert mtus(bond, management, interface("bond0.6", 9000, "bond0", kind="vlan")) == []
    assert mtus(replace(bond, master="br0"), management, interface("br0", 9000, kind="bridge")) == []
    assert [f.status for f in mtus(bond, management, interface("bond0.6", 9001, "bond0"))] == ["fail"]
    # What a bridge has is for its ports; the host's own VLAN on it may have less.
    bridge, nic = interface("br0", 9000, kind="bridge"), interface("eth0", 9000, master="br0")
    assert mtus(bridge, nic, interface("br0.5", 1500, "br0", kind="vlan")) == []
    assert [f.status for f in mtus(bridge, nic, interface("br0.5", 9001, "br0", kind="vlan"))] == ["fail"]
