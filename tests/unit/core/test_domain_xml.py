"""A domain completed: what it gets for its NICs, and what it is refused for."""

from __future__ import annotations

import pwd
import re

import pytest
from lxml import etree

from netplugin.api.domain_models import DomainPolicy
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.models import Binding, DomainRequirements, PortSpec
from netplugin.libvirt.domain import (
    address,
    complete,
    function,
    keep_memory_on,
    nics,
    nodes_asked,
    parse_domain,
    written,
)
from netplugin.libvirt.interfaces import hostdev_interface, vhostuser_interface
from netplugin.libvirt.pins import PlacedCell, Placement, write

DOMAIN = "<domain type='kvm'><name>vm</name><vcpu>1</vcpu><devices/></domain>"


def spec(number: int = 1, **fields: object) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": f"52:54:00:00:00:0{number}",
            "backend": "x",
            "network": {"type": "flat", "physical_network": "net1"},
            **fields,
        }
    )


def vhost(
    number: int = 1,
    hugepages: bool = False,
    numa_node: int | None = None,
    qemu_user: int | None = None,
) -> Binding:
    return Binding(
        vif_type="vhostuser",
        interface_xml=vhostuser_interface(spec(number), f"/run/vhost/{number}"),
        domain_requirements=DomainRequirements(
            shared_memory=True, hugepages=hugepages, numa_node=numa_node, qemu_user=qemu_user
        ),
    )


def render(xml: str, *bindings: Binding, policy: DomainPolicy | None = None) -> etree._Element:
    return etree.fromstring(render_text(xml, *bindings, policy=policy))


def render_text(xml: str, *bindings: Binding, policy: DomainPolicy | None = None) -> str:
    domain = parse_domain(xml, "render-domain")
    complete(domain, bindings)
    keep_memory_on(domain, nodes_asked(bindings, policy or DomainPolicy()))
    return written(domain)


def test_a_vhostuser_nic_brings_shared_memory() -> None:
    domain = render(DOMAIN, vhost())
    assert domain.find("devices/interface/source").get("mode") == "server"
    assert domain.find("memoryBacking/access").get("mode") == "shared"
    assert domain.find("memoryBacking/source").get("type") == "memfd"
    assert [child.tag for child in domain][:3] == ["name", "memoryBacking", "vcpu"]


def test_hugepages_need_no_memfd() -> None:
    domain = render(DOMAIN, vhost(hugepages=True))
    assert domain.find("memoryBacking/hugepages") is not None
    assert domain.find("memoryBacking/source") is None


def test_rendering_again_changes_nothing() -> None:
    once = render_text(DOMAIN, vhost(1), vhost(2))
    assert render_text(once, vhost(1), vhost(2)) == once
    assert len(etree.fromstring(once).findall("devices/interface")) == 2


def test_the_nic_of_the_same_mac_is_replaced_and_others_stay() -> None:
    old = (
        "<interface type='bridge'><mac address='52:54:00:00:00:01'/></interface>"
        "<interface type='user'><mac address='52:54:00:00:00:77'/></interface>"
    )
    domain = render(DOMAIN.replace("<devices/>", f"<devices>{old}</devices>"), vhost(1))
    kinds = [i.get("type") for i in domain.findall("devices/interface")]
    assert kinds == ["vhostuser", "user"]


def test_the_boot_order_of_a_replaced_nic_stays() -> None:
    old = "<interface type='bridge'><mac address='52:54:00:00:00:01'/><boot order='2'/></interface>"
    once = render_text(DOMAIN.replace("<devices/>", f"<devices>{old}</devices>"), vhost(1), vhost(2))
    boots = [nic.find("boot") for nic in etree.fromstring(once).findall("devices/interface")]
    assert [None if boot is None else boot.get("order") for boot in boots] == ["2", None]
    assert render_text(once, vhost(1), vhost(2)) == once


def test_numa_cells_are_shared_and_the_node_is_strict() -> None:
    xml = DOMAIN.replace("<devices/>", "<cpu><numa><cell id='0' memory='1'/></numa></cpu><devices/>")
    domain = render(xml, vhost(numa_node=1))
    assert domain.find("cpu/numa/cell").get("memAccess") == "shared"
    memory = domain.find("numatune/memory")
    assert (memory.get("mode"), memory.get("nodeset")) == ("strict", "1")


@pytest.mark.parametrize(
    "part",
    [
        "<memoryBacking><access mode='private'/></memoryBacking>",
        "<memoryBacking><source type='anonymous'/></memoryBacking>",
        "<cpu><numa><cell id='0' memAccess='private'/></numa></cpu>",
    ],
)
def test_what_contradicts_shared_memory_is_a_conflict(part: str) -> None:
    with pytest.raises(Conflict):
        render(DOMAIN.replace("<devices/>", f"{part}<devices/>"), vhost())


def test_two_nodes_are_a_conflict() -> None:
    with pytest.raises(Conflict):
        render(DOMAIN, vhost(1, numa_node=0), policy=DomainPolicy(numa_node=1))


def test_qemu_runs_as_the_user_that_can_reach_the_sockets() -> None:
    nics = vhost(1, qemu_user=64101), vhost(2, qemu_user=64101)
    once = render_text(DOMAIN, *nics)
    assert render_text(once, *nics) == once
    [seclabel] = etree.fromstring(once).findall("seclabel")
    assert dict(seclabel.attrib) == {"type": "static", "model": "dac", "relabel": "yes"}
    assert seclabel.findtext("label") == "+64101:+64101"
    assert render(DOMAIN, vhost()).find("seclabel") is None


@pytest.mark.parametrize(
    ("seclabel", "fits"),
    [
        ("<seclabel type='static' model='dac'><label>+64101:+108</label></seclabel>", True),
        ("<seclabel type='static' model='dac'><label>64101:kvm</label></seclabel>", True),
        ("<seclabel type='dynamic' model='selinux'/>", True),
        ("<seclabel type='static' model='dac'><label>+64102:+64101</label></seclabel>", False),
        ("<seclabel type='dynamic' model='dac'/>", False),
        ("<seclabel type='none' model='dac'/>", False),
    ],
)
def test_a_domain_that_says_its_user_keeps_what_fits(seclabel: str, fits: bool) -> None:
    xml = DOMAIN.replace("</domain>", f"{seclabel}</domain>")
    if not fits:
        with pytest.raises(Conflict, match="user 64101's"):
            render(xml, vhost(qemu_user=64101))
        return
    labels = render(xml, vhost(qemu_user=64101)).findall("seclabel")
    assert len([label for label in labels if label.get("model") == "dac"]) == 1
    before = etree.fromstring(seclabel)
    assert (labels[0].attrib, labels[0].findtext("label")) == (
        before.attrib,
        before.findtext("label"),
    )


@pytest.mark.parametrize("kind", ["none", "dynamic"])
def test_a_label_is_not_added_to_one_without_a_model(kind: str) -> None:
    xml = DOMAIN.replace("</domain>", f"<seclabel type='{kind}'/></domain>")
    with pytest.raises(Conflict, match="without a model") as refused:
        render(xml, vhost(qemu_user=64101))
    assert "name its model" in str(refused.value.fix)
    # A NIC that needs no label leaves it alone.
    [label] = render(xml, vhost()).findall("seclabel")
    assert dict(label.attrib) == {"type": kind}


def test_a_nic_without_the_user_of_the_others_is_named() -> None:
    mixed = vhost(1, qemu_user=64101), vhost(2)
    with pytest.raises(Conflict, match=f"NIC {spec(2).mac} has no qemu_user"):
        render(DOMAIN, *mixed)
    own = "<seclabel type='static' model='dac'><label>+64101:kvm</label></seclabel>"
    [label] = render(DOMAIN.replace("</domain>", f"{own}</domain>"), *mixed).findall("seclabel")
    assert label.findtext("label") == "+64101:kvm", "who writes a label knows its groups"


def test_a_label_may_have_the_name_of_the_user() -> None:
    own = "<seclabel type='static' model='dac'><label>{}:kvm</label></seclabel>"
    named = pwd.getpwnam("daemon")
    xml = DOMAIN.replace("</domain>", own.format(named.pw_name) + "</domain>")
    assert len(render(xml, vhost(qemu_user=named.pw_uid)).findall("seclabel")) == 1
    for name in ("daemon", "no-such-user", ""):
        xml = DOMAIN.replace("</domain>", own.format(name) + "</domain>")
        with pytest.raises(Conflict, match="user 64101's"):
            render(xml, vhost(qemu_user=64101))


def test_ports_for_two_users_are_a_conflict() -> None:
    with pytest.raises(Conflict, match="different users"):
        render(DOMAIN, vhost(1, qemu_user=64101), vhost(2, qemu_user=64102))


@pytest.mark.parametrize(
    "xml",
    [
        "",
        "<domain",
        "<network/>",
        "<!DOCTYPE domain [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><domain>&e;</domain>",
        "<?xml version='1.0'?><!-- <!ELEMENT x> --><?p <?q?>\n<!DOCTYPE domain><domain/>",
        "<!DOCTYPE domain [<!ENTITY e 'x'>]><domain a='&e;'/>",
        "<d:domain xmlns:d='urn:d'/>",
        "<domain xmlns='urn:d'/>",
        "<domain xmlns:d='urn:d'><vcpu d:current='1'>2</vcpu></domain>",
        "<domain><numatune/><numatune/></domain>",
        "\x00<domain/>",
    ],
)
def test_what_is_no_domain_names_the_field(xml: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        render(xml, vhost())
    assert [error.field for error in refused.value.errors] == ["xml"]


def vf(at: str = "0000:03:10.1", number: int = 1, **fields: object) -> Binding:
    network = {"type": "vlan", "physical_network": "net1", "vlan_id": 100}
    asked = spec(number, network=network, vf=fields)
    return Binding(vif_type="hostdev", interface_xml=hostdev_interface(asked, at))


def functions(domain: etree._Element) -> list[str]:
    """The VFs that the domain has, each with its kind of element."""
    return [f"{nic.tag} {function(nic)}" for nic in nics(domain) if function(nic)]


OTHERS = """<hostdev mode='subsystem' type='usb'><source><address bus='3' device='2'/></source></hostdev>
<hostdev mode='subsystem' type='pci' managed='yes'>
  <source><address domain='0x0000' bus='0x41' slot='0x00' function='0x0'/></source>
  <alias name='ua-netplugin-gpu'/>
</hostdev><!-- a -->"""


@pytest.mark.parametrize("second", ["0000:03:10.1", "0000:03:10.3"])
@pytest.mark.parametrize(
    ("old", "new"), [("802.1ad", "802.1ad"), ("802.1ad", "802.1Q"), ("802.1Q", "802.1ad")]
)
def test_a_port_with_another_vf_has_that_one_alone(old: str, new: str, second: str) -> None:
    """Its old VF may be another VM's by now; libvirt has no MAC of a VF behind 802.1ad."""
    domain = DOMAIN.replace("<devices/>", f"<devices>{OTHERS}</devices>")
    neighbour = vf("0000:03:10.2", 2, vlan_proto="802.1ad")
    once = render_text(domain, vf(vlan_proto=old), neighbour)
    again = render_text(once, vf(second, vlan_proto=new), neighbour)
    tag = "hostdev" if new == "802.1ad" else "interface"
    has = ["hostdev 0000:03:10.2", "hostdev 0000:41:00.0", f"{tag} {second}"]
    assert sorted(functions(etree.fromstring(again))) == sorted(has)
    assert len(etree.fromstring(again).findall("devices/hostdev[@type='usb']")) == 1
    assert render_text(again, vf(second, vlan_proto=new), neighbour) == again


def test_the_alias_is_one_that_libvirt_keeps() -> None:
    """It drops an alias with a colon, without an error."""
    device = etree.fromstring(vf(vlan_proto="802.1ad").interface_xml)
    assert re.fullmatch(r"ua-[A-Za-z0-9_-]+", device.find("alias").get("name"))
    assert address(device) == spec(1).mac


@pytest.mark.parametrize(
    ("bus", "found"),
    [("0x1f", "1f"), ("31", "1f"), ("037", "1f"), ("0", "00"), ("08", None), ("x", None), ("9" * 99, None)],
)
def test_numbers_of_pci_addresses_are_those_that_libvirt_reads(bus: str, found: str | None) -> None:
    source = f"<source><address domain='0' bus='{bus}' slot='0x10' function='1'/></source>"
    device = etree.fromstring(f"<hostdev type='pci'>{source}</hostdev>")
    assert function(device) == (f"0000:{found}:10.1" if found else "")


@pytest.mark.parametrize("encoding", ["iso-8859-1", "utf-16", "utf-99", "us-ascii"])
def test_a_text_is_what_it_is_whatever_it_declares(encoding: str) -> None:
    name = "<name>M\u00fcller \u20ac</name>"
    text = render_text(f"<?xml version='1.0' encoding='{encoding}'?><domain>{name}</domain>", vhost())
    assert name in text and not text.startswith("<?xml")


@pytest.mark.parametrize("mac", ["52:54:0:0:0:1", "52:54:00:00:00:01 ", "52:54:00:0:00:1"])
def test_a_nic_is_found_however_its_mac_is_written(mac: str) -> None:
    nic = f"<interface type='user'><mac address='{mac}'/><boot order='1'/></interface>"
    other = nic.replace(mac, "52:54:00:00:00:02")
    xml = f"<domain><devices>{other}</devices><memory>1</memory><devices><disk/>{nic}</devices></domain>"
    domain = render(xml, vhost())
    assert [address(each) for each in nics(domain)] == ["52:54:00:00:00:02", "52:54:00:00:00:01"]
    assert len(domain.findall("devices")) == 1 and domain.find("devices/disk") is not None
    assert domain.find("devices/interface[@type='vhostuser']/boot").get("order") == "1"


def test_what_is_merged_is_what_libvirt_reads_as_one() -> None:
    domain = parse_domain(
        "<domain xmlns:x='urn:x'><x:devices><interface/></x:devices><cpu><topology cores='1'/></cpu>"
        "<cputune><vcpupin vcpu='0'/></cputune><cpu><model>a</model><numa><cell id='1'/></numa></cpu>"
        "<cputune><emulatorpin/></cputune><metadata><x:y z='1' x:z='2'/></metadata></domain>",
        "t",
    )
    assert nics(domain) == []
    assert [each.tag for each in domain.find("cputune")] == ["vcpupin", "emulatorpin"]
    assert [each.tag for each in domain.find("cpu")] == ["topology", "numa"], "of a second <cpu> only <numa>"
    assert domain.find("metadata/{urn:x}y").get("{urn:x}z") == "2"


def test_nothing_of_an_old_number_stays() -> None:
    domain = parse_domain("<domain><memory>1</memory><vcpu>1<!-- x -->6<i/></vcpu></domain>", "t")
    cell = PlacedCell(number=0, node=0, vcpus=(0,), cpus=(4,), memory_kb=1)
    placed = Placement(cells=(cell,), threads=1, emulator=(1,), emulator_alone=False, page_kb=2048)
    write(domain, placed, (), False)
    assert domain.xpath("string(vcpu)") == "1"
