"""What is refused of a domain, libvirt or QEMU refuses; what is kept of a NIC, libvirt takes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import libvirt  # type: ignore[import-untyped]
import pytest
from lxml import etree

from netplugin.api.errors import NetpluginError
from netplugin.api.models import Binding, PortSpec
from netplugin.libvirt.domain import complete, parse_domain, written
from netplugin.libvirt.interfaces import (
    hostdev_interface,
    tap_interface,
    vdpa_interface,
    vhostuser_interface,
)
from netplugin.tuning.facts import Live
from netplugin.tuning.placing.faults import refuse_faults
from netplugin.tuning.placing.host_memory import UNKNOWN, memory_of_host, refuse_without_room
from netplugin.tuning.placing.render import refuse_elsewhere
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Root
from tests.lab.accelerator import EMULATOR
from tests.lab.libvirtd import PrivateLibvirt

TAP = "npt-kept"
PAGE = "<page size='2' unit='M'{}/>"
STRICT = "<numatune><memory mode='strict' nodeset='{}'/></numatune>"
MEMNODE = "<numatune><memnode cellid='{}' mode='strict' nodeset='0'/></numatune>"
SPEC = PortSpec.model_validate(
    {
        "vm_id": "vm",
        "mac": "52:54:00:00:00:11",
        "backend": "x",
        "network": {"type": "flat", "physical_network": "net1"},
        "queues": 1,
    }
)
KINDS = {
    "vhostuser": vhostuser_interface(SPEC, "/run/kept.sock"),
    "ethernet": tap_interface(SPEC, TAP),
    "vdpa": vdpa_interface(SPEC, "/dev/null"),
    "hostdev": hostdev_interface(SPEC, "0000:00:01.0"),
}
KEPT = (
    "<driver txmode='timer' ioeventfd='on' event_idx='off' packed='on' page_per_vq='on' rss='on' iommu='on' "
    "ats='on'>"
    "<host csum='off' mrg_rxbuf='off'/><guest tso4='off' ufo='off'/></driver>",
    "<boot order='1'/><rom enabled='no'/><acpi index='9'/><alias name='ua-kept'/><link state='down'/>",
    "<address type='pci' domain='0x0000' bus='0x00' slot='0x10' function='0x0'/><guest dev='eth9'/>",
    "<tune><sndbuf>1600</sndbuf></tune><!-- x --><driver rss='off'/><driver packed='on'/>",
)


#: Of these, what any NIC of a guest may have.
ALL_KINDS = ("boot", "rom", "acpi", "alias", "link", "address", "guest", "tune")


@pytest.fixture(scope="module")
def tap() -> Iterator[None]:
    """The tap of the domains with an interface of type ethernet."""
    subprocess.run(["ip", "tuntap", "add", TAP, "mode", "tap"], check=True)
    try:
        subprocess.run(["ip", "link", "set", TAP, "up"], check=True)
        yield
    finally:
        subprocess.run(["ip", "link", "delete", TAP], check=True)


@pytest.fixture(scope="module")
def hypervisor(tap: None) -> Iterator[libvirt.virConnect]:
    with PrivateLibvirt() as private:
        yield private.connect()


def cells(*mb: int) -> str:
    made = (f"<cell id='{n}' cpus='{n}' memory='{each}' unit='MiB'/>" for n, each in enumerate(mb))
    return f"<cpu><numa>{''.join(made)}</numa></cpu>"


def dimm(mb: int, node: int = 0) -> str:
    size = f"<size unit='MiB'>{mb}</size>"
    return f"<memory model='dimm'><target>{size}<node>{node}</node></target></memory>"


def plugged(mb: int, requested: int) -> str:
    more = f"<block unit='KiB'>2048</block><requested unit='MiB'>{requested}</requested>"
    return dimm(mb).replace("dimm", "virtio-mem").replace("</node>", f"</node>{more}")


TUNE = "<cputune>{}</cputune>"
MOST = "<maxMemory slots='2' unit='MiB'>{}</maxMemory>"


def domain(memory: float = 64, pages: str = PAGE.format(""), extra: str = "", devices: str = "") -> str:
    features = "" if "<features>" in extra else "<features><acpi/></features>"
    backing = f"<hugepages>{pages}</hugepages><access mode='shared'/>"
    machine = "<os><type arch='x86_64' machine='q35'>hvm</type></os>"
    inner = f"<emulator>{EMULATOR}</emulator>{devices}<memballoon model='none'/>"
    return (
        f"<domain type='qemu'><name>kept</name><memory>{int(memory * 1024)}</memory><memoryBacking>{backing}"
        f"</memoryBacking><vcpu>2</vcpu>{machine}{features}{extra}<devices>{inner}</devices></domain>"
    )


def refused(xml: str) -> str:
    """Why the agent refuses a domain on this machine; empty if it does not."""
    host = memory_of_host(read_facts(Root()), Live())
    try:
        read = parse_domain(xml, "t")
        refuse_faults(read, host, None)
        refuse_without_room(read, host, None)
    except NetpluginError as error:
        return error.detail
    return ""


def by_libvirt(connection: libvirt.virConnect, xml: str) -> str:
    """Why libvirt or QEMU refuses to start it; empty if it starts."""
    try:
        connection.createXML(xml, libvirt.VIR_DOMAIN_START_PAUSED).destroy()
    except libvirt.libvirtError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "xml",
    [
        domain(1),
        domain(65, extra=STRICT.format(0)),
        domain(extra=cells(33, 31) + STRICT.format(0)),
        domain(pages="<page size='1' unit='G'/>"),
        domain(pages="<page size='1024' unit='KiB'/>"),
        domain(pages="<page size='3' unit='M'/>"),
        domain(pages=PAGE.format("") * 2),
        domain(pages=PAGE.format("") + "<page size='4' unit='KiB' nodeset='0'/>"),
        domain(pages=PAGE.format(" nodeset='1'")),
        domain(extra=cells(32, 32), pages=PAGE.format(" nodeset='0-2'")),
        domain(
            extra=cells(32, 32), pages=PAGE.format(" nodeset='0'") + "<page size='1' unit='G' nodeset='0'/>"
        ),
        domain(extra=MOST.format(256)),
        domain(extra=cells(32, 32).replace("id='1'", "id='0'")),
        domain(extra=cells(32, 32).replace("id='1'", "id='2'")),
        domain(extra=MOST.format(32) + cells(64)),
        domain(extra=MOST.format(64) + cells(64)),
        domain(extra=MOST.format(256).replace("slots='2' ", "") + cells(64)),
        domain(96, extra=cells(64), devices=dimm(32)),
        domain(96, extra=cells(64) + MOST.format(256), devices=dimm(32, 5)),
        domain(
            96,
            extra=cells(64) + MOST.format(256),
            devices=dimm(32).replace("<target", "<source><nodemask>5</nodemask></source><target"),
        ),
        domain(20 << 10),
        domain(extra=STRICT.format(5)),
        domain(extra=STRICT.format("0,7")),
        domain(extra=STRICT.format("")),
        domain(extra=STRICT.format("0,^0")),
        domain(extra="<numatune><memory mode='strict'/></numatune>"),
        domain(extra=STRICT.format(5).replace("strict", "preferred")),
        domain(extra=cells(64) + "<numatune><memnode cellid='0' mode='strict' nodeset='5'/></numatune>"),
        domain(extra=MEMNODE.format(0)),
        domain(extra=cells(32, 32) + MEMNODE.format(3)),
        domain(
            extra=cells(32, 32)
            + MEMNODE.format(0).replace("/><", "/><memnode cellid='0' mode='strict' nodeset='0'/><")
        ),
        domain(extra=cells(64) + MEMNODE.format(0).replace("nodeset='0'", "")),
        domain(pages="<page size='0' unit='M'/>"),
        domain().replace("</hugepages>", "</hugepages><allocation mode='ondemand'/>"),
        domain().replace("</hugepages>", "</hugepages><source type='anonymous'/>"),
        domain(extra=cells(32, 32).replace("cpus='1'", "cpus='1-2'")),
        domain(extra=cells(32, 32).replace("cpus='1'", "cpus='0-1'")),
        domain(0),
        domain(extra=cells(64, 0)),
        domain(extra=cells(64) + MOST.format(256), devices=dimm(0)),
        domain(160, extra=cells(64) + MOST.format(256), devices=dimm(32) * 3),
        domain(extra=TUNE.format("<vcpupin vcpu='0' cpuset='900'/>")),
        domain(extra=TUNE.format("<vcpupin vcpu='0' cpuset='0,^0'/>")),
        domain(extra=TUNE.format("<emulatorpin cpuset='900'/>")),
        domain(extra="<iothreads>1</iothreads>" + TUNE.format("<iothreadpin iothread='1' cpuset='900'/>")),
        domain().replace("<vcpu>", "<vcpu cpuset='900'>"),
    ],
)
def test_what_is_refused_does_not_start(hypervisor: libvirt.virConnect, xml: str) -> None:
    assert refused(xml) and by_libvirt(hypervisor, xml)


@pytest.mark.parametrize(
    "xml",
    [
        domain(),
        domain(63.5),
        domain(pages=""),
        domain(65, pages="<page size='4' unit='KiB'/>"),
        domain(pages=PAGE.format(" nodeset='0'")),
        domain(extra=cells(32, 32) + STRICT.format(0)),
        domain(65, extra=cells(32, 33), pages=PAGE.format(" nodeset='0'")),
        domain(extra=cells(32, 32), pages="<page size='1' unit='G'/>" + PAGE.format(" nodeset='0-1'")),
        domain(96, extra=cells(64) + MOST.format(256) + STRICT.format(0), devices=dimm(32)),
        domain(64, extra=cells(64) + MOST.format(256), devices=dimm(33)),
        domain(96, extra=cells(64) + MOST.format(96), devices=dimm(32)),
        domain(extra=TUNE.format("<vcpupin vcpu='0' cpuset='0,900'/><vcpupin vcpu='7' cpuset='900'/>")),
        domain(4160, extra=cells(64) + MOST.format(8192), devices=plugged(4096, 64)),
    ],
)
def test_what_is_not_refused_starts(hypervisor: libvirt.virConnect, xml: str) -> None:
    assert (refused(xml), by_libvirt(hypervisor, xml)) == ("", "")


@pytest.mark.parametrize("node", [0, 1])
def test_the_agent_refuses_other_threads_on_no_node_that_libvirt_takes(
    hypervisor: libvirt.virConnect, node: int
) -> None:
    """The memory is on one node and QEMU's own threads, here of a CPU, need not be there."""
    pins = "<vcpupin vcpu='0' cpuset='0'/><emulatorpin cpuset='1'/><iothreadpin iothread='1' cpuset='1'/>"
    xml = domain(extra=STRICT.format(0) + "<iothreads>1</iothreads>" + TUNE.format(pins))
    two = replace(UNKNOWN, cpus={0: frozenset({0}), 1: frozenset({1})})
    assert by_libvirt(hypervisor, xml) == ""
    if node:
        with pytest.raises(NetpluginError, match="<vcpupin> 0 is CPU 0"):
            refuse_elsewhere(parse_domain(xml, "t"), {node}, two)
    else:
        refuse_elsewhere(parse_domain(xml, "t"), {node}, two)


def test_libvirt_has_the_team_of_a_nic_whose_vf_stays(hypervisor: libvirt.virConnect) -> None:
    """Without the NIC's part in it, libvirt says nothing, and the guest has two NICs with one MAC address."""
    team = "<teaming type='persistent'/><alias name='ua-x'/>"
    old = f"<interface type='bridge'><mac address='{SPEC.mac}'/><source bridge='x'/>{team}</interface>"
    source = "<source><address domain='0' bus='9' slot='0x10' function='1'/></source>"
    stays = f"{source}<teaming type='transient' persistent='ua-x'/>"
    other = f"<hostdev type='pci' mode='subsystem'>{stays}</hostdev>"
    read = parse_domain(domain(pages="", devices=old + other), "t")
    complete(read, [Binding(vif_type="ethernet", interface_xml=KINDS["ethernet"])])
    defined = hypervisor.defineXML(written(read))
    try:
        there = etree.fromstring(defined.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
    finally:
        defined.undefine()
    assert there.find("devices/interface/teaming").get("type") == "persistent"


@pytest.mark.parametrize("inner", KEPT)
@pytest.mark.parametrize("kind", KINDS)
def test_libvirt_takes_what_is_kept_of_a_nic(hypervisor: libvirt.virConnect, kind: str, inner: str) -> None:
    """As it defines the domain; with a tap of ours, QEMU starts too."""
    if kind == "hostdev":
        inner = inner.replace("<link state='down'/>", "<link state='up'/>")
    old = f"<interface type='bridge'><mac address='{SPEC.mac}'/><source bridge='x'/>{inner}</interface>"
    iommu = "<iommu model='intel'><driver intremap='on' iotlb='on'/></iommu>"
    read = parse_domain(
        domain(pages="", extra="<features><ioapic driver='qemu'/></features>", devices=iommu + old), "t"
    )
    complete(read, [Binding(vif_type=kind, interface_xml=KINDS[kind])])
    [nic] = read.findall("devices/interface")
    kept = etree.fromstring(f"<nic>{inner}</nic>").iterchildren(*ALL_KINDS)
    assert [part.tag for part in kept if nic.find(part.tag) is None] == []
    defined = hypervisor.defineXML(written(read))
    try:
        there = etree.fromstring(defined.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)).find("devices/interface")
    finally:
        defined.undefine()
    for part in (each for top in nic.iterchildren(*ALL_KINDS, "driver") for each in top.iter(etree.Element)):
        path = nic.getroottree().getelementpath(part).partition("interface/")[2]
        left = set(part.attrib.items()) - set(there.find(path).attrib.items())
        assert left <= {("queues", "1")}, path  # its default, which libvirt leaves out
    if kind == "ethernet":
        assert by_libvirt(hypervisor, written(read)) == ""


@pytest.mark.parametrize(
    "part", ["<coalesce><rx><frames max='7'/></rx></coalesce>", "<port isolated='yes'/>"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_libvirt_takes_no_nic_of_ours_with_these(
    hypervisor: libvirt.virConnect, kind: str, part: str
) -> None:
    read = parse_domain(domain(pages=""), "t")
    complete(
        read,
        [Binding(vif_type=kind, interface_xml=KINDS[kind].replace("</interface>", f"{part}</interface>"))],
    )
    with pytest.raises(libvirt.libvirtError, match=re.escape("support")):
        hypervisor.defineXML(written(read))
