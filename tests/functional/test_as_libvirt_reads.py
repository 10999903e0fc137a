"""A domain is read as libvirt reads it: on generated documents, with libvirt's own parser.

Its driver ``test:///default`` runs in this process and needs no daemon.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import libvirt
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from netplugin.libvirt.domain import address, function, nics, parse_domain
from netplugin.libvirt.interfaces import Element
from netplugin.libvirt.needs import cells_of, iothreads, memory_kb, vcpus
from netplugin.libvirt.nic_parts import queues
from netplugin.libvirt.pins import pinned
from netplugin.libvirt.values import content

FOREIGN = "xmlns:x='urn:x'"
#: What may stand within a text, and before and after it.
NOISE = st.sampled_from(["", "", "", "", "<!-- 9 -->", "<?p 9?>", "<![CDATA[]]>", "<i/>", "<x:i/>"])
SPACE = st.sampled_from(["", "", "", " ", "\n\t", "+", " +", "0"])
BEHIND = st.sampled_from([*[""] * 12, *["<!-- x -->"] * 4, " ", "x"])


@st.composite
def texts(draw: st.DrawFn, *values: str) -> str:
    """A value with something between its digits, one of which may be a CDATA section or a reference."""
    value = draw(st.sampled_from(values))
    at = draw(st.integers(0, len(value) - 1))
    letter = draw(st.sampled_from(["{0}", "{0}", "<![CDATA[{0}]]>", "&#{1};"])).format(
        value[at], ord(value[at])
    )
    return draw(SPACE) + value[:at] + draw(NOISE) + letter + draw(NOISE) + value[at + 1 :] + draw(BEHIND)


@st.composite
def attributes(draw: st.DrawFn, name: str, right: tuple[str, ...], wrong: tuple[str, ...] = ()) -> str:
    """An attribute, or none; seldom one that libvirt refuses."""
    values = wrong if wrong and draw(st.integers(0, 15)) == 0 else right
    before = draw(st.sampled_from(["", "", "", " ", "+"])) if name in ("queues", "bus", "slot") else ""
    return draw(st.sampled_from(["", *(f"{name}='{before}{value}'" for value in values * 3)]))


MACS = ("52:54:0:0:0:1", "52:54:00:00:00:01", "52:54:00:AB:0c:1 ", "52:54:0:ab:c:01")
NO_MACS = ("52-54-00-00-00-01", "052:54:0:0:0:1", "0x52:54:0:0:0:1", "52:54:0:0:0", " 2:0:0:0:0:1")
SETS, NO_SETS = (
    ("0-3", "1,3-4,^3", " 2 , 4 - 6,", "7,7", "^0,1", "010"),
    ("0,,1", "5-1", "0-1_0", "^0-1,2", "x"),
)
NUMBERS, NO_NUMBERS = ("1", "2", "010"), ("4 ", "1e1", "-1", "1_0")
UNITS, NO_UNITS = ("KiB", "k", "MB", "", "mib", "bytes", "B"), ("Kb ", "KiBs", "X")


@st.composite
def interfaces(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(["user", "user", "hostdev"]))
    pci = "".join(draw(attributes(name, (*NUMBERS, "0x1"), NO_NUMBERS)) + " " for name in ("bus", "slot"))
    source = f"<source><address type='pci' function='0' {pci}/></source>" if kind == "hostdev" else ""
    macs = draw(st.lists(attributes("address", MACS, NO_MACS), max_size=2))
    mac = "".join(f"<mac {each}/>" for each in macs) + "<x:mac address='2:0:0:0:0:9'/>"
    prefix = draw(st.sampled_from(["", "", "", "x:"]))
    driver = f"<model type='virtio'/><driver {draw(attributes('queues', NUMBERS, (*NO_NUMBERS, '0x1')))}/>"
    return f"<{prefix}interface type='{kind}'>{source}{mac}{driver}</{prefix}interface>"


@st.composite
def domains(draw: st.DrawFn) -> str:
    def some(text: st.SearchStrategy[str], most: int = 2) -> list[str]:
        return draw(st.lists(text, max_size=most))

    unit = draw(attributes("unit", UNITS, NO_UNITS))
    memory = texts("1048576", "2097152")
    pin = st.builds("<vcpupin vcpu='{}' {}/>".format, st.integers(0, 1), attributes("cpuset", SETS, NO_SETS))
    cells = st.sampled_from(["", "", "<numa><cell cpus='0-1' memory='1' unit='MiB'/></numa>"])
    cells |= st.just("<numa><cell cpus='0' memory='512'/><cell cpus='1' memory='512'/></numa>")
    parts = [
        *(f"<name>{each}</name>" for each in [draw(texts("v", "ab c")), *some(texts("w"), 1)]),
        *(f"<x:vcpu>{each}</x:vcpu>" for each in some(texts("3"), 1)),
        *(f"<vcpu>{each}</vcpu>" for each in [draw(texts("2", "16")), *some(texts("3"), 1)]),
        *(f"<memory {unit}>{each}</memory>" for each in [draw(memory), *some(memory, 1)]),
        *(f"<iothreads>{each}</iothreads>" for each in some(texts("1", "3"))),
        *(f"<cputune>{each}<x:vcpupin vcpu='1' cpuset='9'/></cputune>" for each in some(pin)),
        *(f"<cpu>{each}</cpu>" for each in some(cells)),
        *(f"<devices>{''.join(some(interfaces()))}</devices>" for _ in range(draw(st.integers(0, 2)))),
    ]
    order = draw(st.permutations(parts))
    comment = draw(st.sampled_from(["", "<!-- c --><?p p?>"]))
    declared = draw(st.sampled_from(["", "<?xml version='1.0' encoding='iso-8859-1'?>"]))
    head = f"{declared}{comment}<domain type='test' {FOREIGN}><os><type>hvm</type></os>"
    return head + comment.join(order) + "</domain>"


@dataclass(frozen=True)
class Reading:
    """What both read of a domain."""

    name: str
    vcpus: int
    memory_kb: int
    iothreads: int
    pins: dict[str, frozenset[int]]
    cells: tuple[tuple[int, tuple[int, ...], int], ...]
    nics: tuple[tuple[str, str, int], ...]


def ours(domain: Element) -> Reading:
    count = vcpus(domain, "t")
    pins = {pin.name: pin.cpus for pin in pinned(domain, "t") if int(pin.name.split()[-1]) < count}
    return Reading(
        name=content(domain.find("name")),
        vcpus=count,
        memory_kb=memory_kb(domain, "t"),
        iothreads=len(iothreads(domain)),
        pins=pins,
        cells=tuple((cell.number, cell.vcpus, cell.memory_kb) for cell in cells_of(domain, "t")),
        nics=tuple((address(nic), function(nic), queues(nic)) for nic in nics(domain)),
    )


@cache
def connection() -> Any:
    libvirt.registerErrorHandler(lambda *_: None, None)
    return libvirt.open("test:///default")


def as_libvirt(xml: str) -> str | None:
    """The domain as libvirt writes it; None if it refuses it."""
    try:
        defined = connection().defineXML(xml)
    except libvirt.libvirtError:
        return None
    try:
        return str(defined.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
    finally:
        defined.undefine()


@given(domains())
def test_what_libvirt_takes_is_read_as_libvirt_reads_it(xml: str) -> None:
    theirs = as_libvirt(xml)
    if theirs is None:
        return
    expected = ours(etree.fromstring(theirs))
    domain = parse_domain(xml, "t")
    found = ours(domain)
    # libvirt gives a MAC to a NIC that has none.
    assert len(found.nics) == len(expected.nics)
    same = tuple(
        (mac or other, *rest) for (mac, *rest), (other, *_) in zip(found.nics, expected.nics, strict=True)
    )
    assert (found.name, found.vcpus, found.memory_kb, found.iothreads) == (
        expected.name,
        expected.vcpus,
        expected.memory_kb,
        expected.iothreads,
    )
    assert (found.pins, found.cells, same) == (expected.pins, expected.cells, expected.nics)
