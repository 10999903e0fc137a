"""What of a NIC stays when its port's takes its place, and what is refused."""

from __future__ import annotations

import pytest
from lxml import etree

from netplugin.api.errors import Conflict
from netplugin.api.models import Binding
from netplugin.libvirt.interfaces import (
    hostdev_interface,
    tap_interface,
    team_interfaces,
    vdpa_interface,
    vhostuser_interface,
)
from netplugin.libvirt.nic_parts import OURS, PARTS, VMS
from tests.unit.core.test_domain_xml import render, spec, vf

SCHEMA = etree.parse("/usr/share/libvirt/schemas/domaincommon.rng").getroot()
RNG = "{http://relaxng.org/ns/structure/1.0}"
KINDS = {
    "vhostuser": vhostuser_interface(spec(), "/run/vhost/1"),
    "ethernet": tap_interface(spec(), "npt1"),
    "vdpa": vdpa_interface(spec(), "/dev/vhost-vdpa-0"),
    "hostdev": hostdev_interface(spec(), "0000:03:10.1"),
}
OLD = {
    "vhostuser": "type='vhostuser'",
    "ethernet": "type='ethernet'",
    "vdpa": "type='vdpa'",
    "hostdev": "type='hostdev' managed='yes'",
    "bridge": "type='bridge'",
}


def binding(kind: str) -> Binding:
    return Binding(vif_type=kind, interface_xml=KINDS[kind])


def replaced(kind: str, inner: str, old: str = "", attributes: str = "") -> etree._Element:
    """The NIC of a port of this kind, after it took the place of one that has this."""
    nic = f"<interface {OLD[old or kind]} {attributes}><mac address='{spec().mac}'/>{inner}</interface>"
    [found] = render(f"<domain><devices>{nic}</devices></domain>", binding(kind)).findall("devices/interface")
    return found


def names(define: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """The elements and attributes that a definition of libvirt's schema has at its top."""
    [part] = SCHEMA.findall(f"{RNG}define[@name='{define}']")
    return below(part, seen | {define})


def below(part: etree._Element, seen: frozenset[str]) -> set[str]:
    found: set[str] = set()
    for each in part:
        if each.tag == f"{RNG}element":
            found.add(each.get("name"))
        elif each.tag == f"{RNG}attribute":
            found.add("@" + each.get("name"))
        elif each.tag == f"{RNG}ref":
            known = SCHEMA.find(f"{RNG}define[@name='{each.get('name')}']") is not None
            found |= names(each.get("name"), seen) if known and each.get("name") not in seen else set()
        else:
            found |= below(each, seen)
    return found


def test_each_part_of_libvirts_grammar_has_a_rule() -> None:
    [driver] = SCHEMA.xpath(
        "//r:define[@name='interface-options']//r:element[@name='driver']", namespaces={"r": RNG[1:-1]}
    )
    options = {f"driver{'' if n[0] == '@' else '/'}{n}" for n in below(driver, frozenset())}
    [interface] = SCHEMA.findall(f"{RNG}define[@name='interface']/{RNG}element[@name='interface']")
    parts = below(interface, frozenset()) | below(
        SCHEMA.find(f"{RNG}define[@name='hostdev']/{RNG}element"), frozenset()
    )
    # Of devices that are no PCI functions; the networks' grammar, in a file of its own, has the second line.
    parts -= {"@rawio", "@sgio", "@model", "@display", "@ramfb", "@removable"}
    parts |= {"mtu", "coalesce", "virtualport", "bandwidth", "vlan", "port"}
    assert {"@type", "source", "boot", "rom", "acpi", "filterref", "teaming", "link"} <= parts
    assert {"driver@iommu", "driver@ats", "driver@rss", "driver@name", "driver/host"} <= options
    assert (parts | options) - PARTS.keys() == set()


@pytest.mark.parametrize("kind", ["vhostuser", "ethernet", "vdpa"])
@pytest.mark.parametrize(
    "name",
    [
        part.removeprefix("driver@")
        for part, rule in PARTS.items()
        if part.startswith("driver@") and rule == VMS
    ],
)
def test_what_a_port_does_not_set_of_a_driver_stays(kind: str, name: str) -> None:
    driver = replaced(kind, f"<driver {name}='on' queues='9' rx_queue_size='256' tx_queue_size='256'/>").find(
        "driver"
    )
    assert driver.get(name) == "on"
    desired = etree.fromstring(KINDS[kind]).find("driver")
    for ours in ("queues", "rx_queue_size", "tx_queue_size"):
        assert driver.get(ours) == (None if desired is None else desired.get(ours))


def test_the_offloads_of_a_driver_stay() -> None:
    inner = (
        "<driver><!-- x --><host csum='off' mrg_rxbuf='off'/><guest tso4='off'/></driver><driver iommu='on'/>"
    )
    driver = replaced("vhostuser", inner).find("driver")
    assert dict(driver.find("host").attrib) == {"csum": "off", "mrg_rxbuf": "off"}
    assert driver.find("guest").get("tso4") == "off" and driver.get("rx_queue_size") == "1024"
    assert driver.get("iommu") is None, "libvirt reads the first"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "inner",
    [
        "<boot order='2'/>",
        "<rom enabled='no'/>",
        "<acpi index='9'/>",
        "<alias name='ua-mine'/>",
        "<address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>",
        "<link state='down'/>",
        "<guest dev='eth9'/>",
        "<backend vhost='/dev/vhost-net'/>",
        "<later a='1'/>",
    ],
)
def test_what_the_port_has_no_part_in_stays(kind: str, inner: str) -> None:
    part = etree.fromstring(inner)
    if "down" in inner and kind == "hostdev":
        with pytest.raises(Conflict, match="no link of a VF"):
            replaced(kind, inner, "bridge")
        return
    for old in (kind, "bridge"):
        found = replaced(kind, inner, old).find(part.tag)
        assert etree.tostring(found, with_tail=False, method="c14n") == etree.tostring(part, method="c14n"), (
            old
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_helper_of_a_network_in_user_space_goes(kind: str) -> None:
    inner = "<backend type='passt' logFile='/x' vhost='/dev/vhost-net'/>"
    assert dict(replaced(kind, inner, "bridge").find("backend").attrib) == {"vhost": "/dev/vhost-net"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["usb", "isa", "spapr-vio", "unassigned", "ccw", "virtio-mmio"])
def test_an_address_where_the_new_nic_cannot_be_goes(kind: str, where: str) -> None:
    stays = kind != "hostdev" and where in ("ccw", "virtio-mmio")
    assert (replaced(kind, f"<address type='{where}'/>", "bridge").find("address") is not None) is stays


def test_texts_and_attributes_of_the_interface_stay() -> None:
    nic = replaced(
        "ethernet", "<tune><sndbuf>16<!-- x -->00</sndbuf></tune>", attributes="trustGuestRxFilters='yes'"
    )
    assert nic.findtext("tune/sndbuf") == "1600" and nic.get("trustGuestRxFilters") == "yes"
    assert replaced("vhostuser", "", "hostdev").get("managed") is None, "that of the VF that it was"


@pytest.mark.parametrize("part", [part for part, rule in PARTS.items() if rule not in (OURS, VMS)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_port_decides_is_refused_by_its_field(part: str, kind: str) -> None:
    if KINDS[kind].find(f"<{part} ") >= 0:
        assert replaced(kind, f"<{part} size='1'/>").find(part).get("size") != "1"
        return
    with pytest.raises(Conflict) as refused:
        replaced(kind, f"<{part} x='1'/>", "bridge")
    assert PARTS[part] in refused.value.detail and spec().mac in refused.value.detail
    assert f"<{part}>" in str(refused.value.fix)


def test_what_an_earlier_render_wrote_is_not_refused() -> None:
    """The VLAN that libvirt sets on a VF, and the MTU of a tap: the port may have others by now."""
    vlan = "<vlan><tag id='7'/></vlan>"
    assert replaced("hostdev", vlan).find("vlan") is None
    assert replaced("vhostuser", "<mtu size='1500'/>", "ethernet").find("mtu") is None
    with pytest.raises(Conflict, match=r"network\.vlan_id"):
        replaced("ethernet", vlan)


def test_a_virtual_function_has_its_own_driver() -> None:
    assert replaced("hostdev", "<driver name='vfio'/>").find("driver").get("name") == "vfio"
    assert replaced("hostdev", "<driver name='vhost' iommu='on'/>", "bridge").find("driver") is None
    assert replaced("vhostuser", "<driver name='vfio'/>", "hostdev").find("driver").get("name") is None


def test_a_hostdev_keeps_what_is_of_the_vm() -> None:
    at = "0000:03:10.1"
    source = "<source><address domain='0' bus='3' slot='0x10' function='1'/></source>"
    kept = "<driver name='vfio'/><rom bar='off'/><boot order='3'/><address type='pci' bus='0x07' slot='0'/>"
    old = f"<hostdev mode='subsystem' type='pci' managed='yes'>{source}{kept}</hostdev>"
    domain = render(f"<domain><devices>{old}</devices></domain>", vf(at, vlan_proto="802.1ad"))
    [nic] = domain.findall("devices/hostdev")
    assert nic.get("managed") == "no" and nic.find("driver").get("name") == "vfio"
    assert nic.find("rom").get("bar") == "off" and nic.find("boot").get("order") == "3"
    assert nic.find("address").get("bus") == "0x07" and nic.find("source/address").get("bus") == "0x03"
    # As an <interface> it has not the alias that says whose it is.
    again = render(etree.tostring(domain, encoding="unicode"), vf(at))
    [nic] = again.findall("devices/interface")
    assert nic.find("alias") is None and nic.find("rom").get("bar") == "off"


def test_each_nic_of_a_team_keeps_its_own() -> None:
    team = team_interfaces(KINDS["vhostuser"], KINDS["hostdev"], "p1")
    both = Binding(vif_type="hostdev", interface_xml=team)
    once = render("<domain><devices/></domain>", both)
    for nic, bus in zip(once.findall("devices/interface"), ("0x05", "0x06"), strict=True):
        etree.SubElement(nic, "address", type="pci", bus=bus)
    again = render(etree.tostring(once, encoding="unicode"), both)
    kept = [(n.get("type"), n.find("address").get("bus")) for n in again.findall("devices/interface")]
    assert kept == [("vhostuser", "0x05"), ("hostdev", "0x06")]
    # Without the team its VF has the place of the VF.
    alone = render(etree.tostring(again, encoding="unicode"), binding("hostdev"))
    [nic] = alone.findall("devices/interface")
    assert nic.find("address").get("bus") == "0x06" and nic.find("teaming") is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partner", ["ua-x", "ua-y"])
def test_a_nic_stays_in_a_team_whose_vf_stays(kind: str, partner: str) -> None:
    team = "<teaming type='persistent'/><alias name='ua-x'/>"
    nic = f"<interface type='bridge'><mac address='{spec().mac}'/>{team}</interface>"
    source = "<source><address domain='0' bus='9' slot='0x10' function='1'/></source>"
    stays = f"{source}<teaming type='transient' persistent='{partner}'/>"
    other = f"<hostdev type='pci' mode='subsystem'>{stays}</hostdev>"
    text = f"<domain><devices>{nic}{other}</devices></domain>"
    [found] = render(text, binding(kind)).findall("devices/interface")
    assert (found.find("teaming") is not None) is (partner == "ua-x" and kind != "hostdev")


def test_two_hundred_nics_keep_what_each_has() -> None:
    macs = [f"52:54:00:00:01:{n:02x}" for n in range(200)]
    old = "".join(
        f"<interface type='bridge'><mac address='{m}'/><boot order='{n + 1}'/></interface>"
        for n, m in enumerate(macs)
    )
    ports = [
        Binding(vif_type="v", interface_xml=vhostuser_interface(spec(mac=m), f"/run/{n}"))
        for n, m in enumerate(macs)
    ]
    nics = render(f"<domain><devices>{old}</devices></domain>", *reversed(ports)).findall("devices/interface")
    assert [nic.find("mac").get("address") for nic in nics] == macs
    assert [nic.find("boot").get("order") for nic in nics] == [str(n + 1) for n in range(200)]
