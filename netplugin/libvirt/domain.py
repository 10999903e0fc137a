"""Parse a libvirt domain, add a VM's NICs and the elements they require, and write it."""

from __future__ import annotations

import pwd
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

from lxml import etree

from netplugin.api.domain_models import DomainPolicy
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.models import Binding, DomainRequirements
from netplugin.libvirt.interfaces import Element, fragments, mac_of_hostdev, parser, text
from netplugin.libvirt.nic_parts import kind, take_over
from netplugin.libvirt.values import bitmap, content, mac, parse_cpuset, pci_address, unsigned

#: The step named in errors.
RENDER: Final = "render-domain"
#: The element order of libvirt; elements that are not listed come last.
_ORDER: Final = (
    "name uuid genid title description metadata maxMemory memory currentMemory blkiotune memtune "
    "memoryBacking vcpu vcpus iothreads iothreadids cputune numatune resource sysinfo bootloader "
    "bootloader_args os features cpu clock"
).split()


#: A document type declaration, which stands before the root element if anywhere.
_DOCTYPE: Final = re.compile(r"\ufeff?(?>\s|<\?(?>.*?\?>)|<!--(?>.*?-->))*+<!DOCTYPE", re.S)
#: Limits of a document, above those of any domain that runs. ``_MOST_NAMED``: CPUs and nodes in all of its
#: sets together, because a set of six characters may have thousands.
_MOST_ELEMENTS: Final = 1 << 16
_MOST_NICS: Final = 1024
_MOST_NAMED: Final = 1 << 20
_SETS: Final = ("cpuset", "cpus", "vcpus", "nodeset")
#: Elements that libvirt reads as one, however often a domain has them; of others it reads the first.
_MERGED: Final = ("devices", "cputune", "memoryBacking", "features", "clock", "iothreadids")


def parse_domain(xml: str, step: str) -> Element:
    """Parse a domain, as libvirt reads it. The text is what it is, whatever encoding it declares.

    Raises: InvalidRequest if the text is not a libvirt domain.
    """
    if _DOCTYPE.match(xml):
        raise invalid("a document type declaration is not allowed", step)
    try:
        domain = etree.fromstring(xml.encode(), parser())
    except (etree.XMLSyntaxError, ValueError) as broken:
        raise invalid(f"not XML: {str(broken)[:200]}", step) from broken
    if domain.tag != "domain":
        raise invalid(f"the root element is <{domain.tag[:80]}>, not <domain>", step)
    _refuse_excess(domain, step)
    _merge(domain, step)
    return domain


def _refuse_excess(domain: Element, step: str) -> None:
    """Raises: InvalidRequest."""
    named = 0
    for count, element in enumerate(domain.iter(etree.Element), start=1):
        if count > _MOST_ELEMENTS:
            raise invalid(f"has more than {_MOST_ELEMENTS} elements", step)
        for name in _SETS:
            if text := element.get(name):
                with suppress(ValueError):  # whoever needs the set reports it
                    named += bitmap(text).bit_count()
        if named > _MOST_NAMED:
            raise invalid(f"its sets of CPUs and nodes have more than {_MOST_NAMED} members", step)
    if len(nics(domain)) > _MOST_NICS:
        raise invalid(f"has more than {_MOST_NICS} interfaces and host devices", step)


def _merge(domain: Element, step: str) -> None:
    """Give the domain each element as often as libvirt takes it.

    An element of another namespace is another element. Of attributes libvirt reads some by their local name
    alone (``xmlGetProp``) and others by XPath, so one of another namespace is refused. Observed with 9.0.

    Raises: InvalidRequest.
    """
    for element in domain.iter("{}*"):
        if any(etree.QName(name).namespace for name in element.attrib) and _is_libvirts(element):
            raise invalid(f"<{element.tag[:80]}> has an attribute of another namespace", step)
    if len(domain.findall("numatune")) > 1:
        raise invalid("libvirt takes one <numatune>", step)
    numas = [numa for cpu in domain.findall("cpu") if (numa := cpu.find("numa")) is not None]
    for cpu in domain.findall("cpu")[:1]:
        for numa in cpu.findall("numa")[1:]:
            cpu.remove(numa)
        cpu.extend(numas[:1])
    _join(numas)
    for cpu in domain.findall("cpu")[1:]:
        domain.remove(cpu)
    for tag in _MERGED:
        _join(domain.findall(tag))


def _is_libvirts(element: Element) -> bool:
    """Whether libvirt reads an element, and does not only keep it for others (``<metadata>``)."""
    return all(each.tag != "metadata" for each in element.iterancestors("{}*"))


def _join(elements: Sequence[Element]) -> None:
    """Move what is in the others to the first."""
    for other in elements[1:]:
        elements[0].extend(other)
        parent = other.getparent()
        if parent is not None:
            parent.remove(other)


def written(domain: Element) -> str:
    return text(domain)


def invalid(message: str, step: str, fix: str | None = None) -> InvalidRequest:
    """The error for an invalid domain in a request."""
    return InvalidRequest.of_field("xml", message, step=step, fix=fix)


def conflict(message: str, fix: str) -> Conflict:
    """The error for a domain that cannot be rendered as it is."""
    return Conflict(message, step=RENDER, fix=fix)


def child(domain: Element, tag: str) -> Element:
    """The child element of this name; if missing, it is created at the position where libvirt writes it."""
    found = domain.find(tag)
    if found is None:
        found = etree.Element(tag)
        before = [n for n, each in enumerate(domain) if _rank(each) <= _rank(found)]
        domain.insert(before[-1] + 1 if before else 0, found)
    return found


def complete(domain: Element, bindings: Sequence[Binding]) -> None:
    """Add these NICs to the domain, with the memory backing and the QEMU user that they require.

    NICs with the same MAC or PCI function are replaced. What is not of the port stays (``nic_parts``): a VM
    that is migrated has the same hardware on both hosts.

    Raises: Conflict if the domain contradicts a requirement.
    """
    devices = child(domain, "devices")
    there: dict[str, list[Element]] = {}
    for each in devices:
        if each.tag in ("interface", "hostdev"):
            for name in _names(each):
                there.setdefault(name, []).append(each)
    for binding in bindings:
        _replace_nics(devices, fragments(binding.interface_xml), there)
    for needs in dict.fromkeys(binding.domain_requirements for binding in bindings):
        _require(domain, needs)
    _run_as(domain, bindings)


def nodes_asked(bindings: Sequence[Binding], policy: DomainPolicy) -> set[int]:
    """The NUMA nodes required by the NICs and the policy."""
    asked = {binding.domain_requirements.numa_node for binding in bindings} | {policy.numa_node}
    return {node for node in asked if node is not None}


def keep_memory_on(domain: Element, nodes: Collection[int]) -> None:
    """Set the NUMA node of the memory of a domain without CPU placement; a mode that it has stays.

    Raises: Conflict for several nodes, and for a <numatune> that says otherwise; InvalidRequest.
    """
    if len(nodes) > 1:
        found = f"the NICs and the policy ask for different NUMA nodes: {sorted(nodes)}"
        raise conflict(found, "ask for one node, or none")
    for node in nodes:
        numatune = child(domain, "numatune")
        for element in numatune.iterchildren("memory", "memnode"):
            if element.get("nodeset") is None and element.get("placement") != "auto":
                element.set("nodeset", str(node))
            _require_node(element, node)
        if numatune.find("memory") is None:
            numatune.insert(0, etree.Element("memory", mode="strict", nodeset=str(node)))


def _require_node(element: Element, node: int) -> None:
    """Raises: Conflict, InvalidRequest."""
    has = element.get("nodeset", "auto")
    try:
        agrees = element.get("placement") != "auto" and parse_cpuset(has) == {node}
    except ValueError as wrong:
        raise invalid(f"<{element.tag} nodeset>: {wrong}", RENDER) from None
    if not agrees:
        found = f"<numatune><{element.tag}> is for NUMA node {has[:40]}, and the policy or a port names "
        raise conflict(f"{found}{node}", f"remove <{element.tag}>, or ask for the same node (numa_node)")


def number(text: str | None, default: int) -> int:
    """Parse a small number of a domain; the default if it is not one."""
    found = unsigned(text or "")
    return default if found is None or found >= 10**9 else found


def address(nic: Element) -> str:
    """The MAC address of a NIC in lower case; empty if it has none."""
    if nic.tag == "hostdev":
        return mac_of_hostdev(nic)
    found = nic.find("mac")
    return mac(found.get("address", "")) if found is not None else ""


def function(nic: Element) -> str:
    """The PCI address of a passed-through device; empty for other devices."""
    source = nic.find("source")
    found = None if source is None else source.find("address")
    return pci_address(found) if found is not None and nic.get("type") in ("hostdev", "pci") else ""


def nics(domain: Element) -> list[Element]:
    """The network interfaces and the host devices of the domain."""
    return [*domain.findall("devices/interface"), *domain.findall("devices/hostdev")]


def _rank(element: Element) -> int:
    tag = element.tag if isinstance(element.tag, str) else ""  # not a string for comments
    return _ORDER.index(tag) if tag in _ORDER else len(_ORDER)


def _names(nic: Element) -> set[str]:
    """By what a NIC is known: its MAC and its PCI function."""
    return {address(nic), function(nic)} - {""}


def _replace_nics(
    devices: Element, desired: Sequence[Element], there: Mapping[str, Sequence[Element]]
) -> None:
    """Remove NICs with the same MAC or PCI function and insert the new ones at the position of the first."""
    known = [each for nic in desired for name in _names(nic) for each in there.get(name, ())]
    old = [each for each in dict.fromkeys(known) if each.getparent() is devices]
    place = min(map(devices.index, old), default=len(devices))
    _disband(devices, old)
    heirs: set[Element] = set()
    for each in sorted(old, key=lambda nic: (kind(nic) not in map(kind, desired), devices.index(nic))):
        names = _names(each)
        after = [nic for nic in desired if names & _names(nic)]
        heir = min(after, key=lambda nic: kind(nic) != kind(each))
        if heir not in heirs:
            heirs.add(heir)
            for part, reason in take_over(each, heir):
                found = f"the NIC {address(heir)} has <{part}> in the domain: {reason}"
                raise conflict(found, f"remove <{part}> from that <{each.tag}>")
        devices.remove(each)
    devices[place:place] = desired


def _disband(devices: Element, leaving: Sequence[Element]) -> None:
    """Remove ``<teaming>`` from NICs that are replaced, but not from the persistent NIC of one that stays."""
    nics = devices.iterchildren("interface", "hostdev")
    teams = [(nic, team) for nic in nics for team in nic.findall("teaming")]
    used = {team.get("persistent") for nic, team in teams if nic not in leaving}
    for nic, team in teams:
        alias = nic.find("alias")
        if nic in leaving and (alias is None or alias.get("name") not in used):
            nic.remove(team)


def _require(domain: Element, needs: DomainRequirements) -> None:
    if not (needs.shared_memory or needs.hugepages):
        return
    backing = child(domain, "memoryBacking")
    if needs.hugepages and backing.find("hugepages") is None:
        backing.insert(0, etree.Element("hugepages"))
    if needs.shared_memory:
        _share(domain, backing)


def _run_as(domain: Element, bindings: Sequence[Binding]) -> None:
    """Set the user that QEMU runs as, because only this user can open the vhost-user sockets.

    Without a label QEMU runs as the user of qemu.conf. DAC labels are user:group, each a number
    after a ``+`` (``<seclabel>`` in libvirt's formatdomain). The group of an existing label is
    kept; a new label uses the number of the user. With ``relabel`` libvirt also gives the user the
    domain's disks and other files.
    """
    users = {binding.domain_requirements.qemu_user for binding in bindings} - {None}
    if not users:
        return
    if len(users) > 1:
        wrong = f"the VM's ports are for QEMUs of different users: {sorted(map(str, users))}"
        raise conflict(wrong, "ask for all ports of a VM with one qemu_user")
    (user,) = users
    label = _dac_label(domain)
    if label is None:
        _may_label(domain, bindings, user)
        label = etree.SubElement(domain, "seclabel", type="static", model="dac", relabel="yes")
        etree.SubElement(label, "label").text = f"+{user}:+{user}"
    elif not _runs_as(label, user):
        wrong = f"the domain has a seclabel of model dac that is not user {user}'s (+{user}:+<group>), and "
        wrong += "no other user can reach its vhost-user sockets"
        raise conflict(wrong, "remove that <seclabel> from the domain, or name its user as qemu_user")


def _may_label(domain: Element, bindings: Sequence[Binding], user: int | None) -> None:
    """Check that a label for this user can be added.

    If a domain has several labels, libvirt requires a model for each
    (``virSecurityLabelDefsParseXML`` in its src/conf/domain_conf.c).

    Raises: Conflict.
    """
    if any(not label.get("model") for label in domain.findall("seclabel")):
        found = "the domain has a <seclabel> without a model, and libvirt takes no second one: "
        found += f"QEMU needs one of model dac to run as user {user} (qemu_user)"
        raise conflict(found, "name its model (selinux or apparmor), or remove it")
    for binding in bindings:
        needs = binding.domain_requirements
        if needs.shared_memory and needs.qemu_user is None:
            nic = address(fragments(binding.interface_xml)[0])
            found = f"the vhost-user NIC {nic} has no qemu_user, and other NICs of the VM are for a QEMU of "
            found += f"user {user}, to whom the socket of this one may be closed"
            fix = f"ask for it with qemu_user {user} too; or give the domain a <seclabel> of model dac of "
            fix += f"your own, with user {user} and a group that reaches all sockets"
            raise conflict(found, fix)


def wrong_user(domain: Element, user: int) -> str | None:
    """A description of the domain's label if QEMU does not run as this user; None if it does."""
    label = _dac_label(domain)
    if label is None:
        return "no <seclabel> of model dac: QEMU runs as the user of qemu.conf"
    if _runs_as(label, user):
        return None
    kind, who = label.get("type"), content(label.find("label")).strip()
    return f"a <seclabel> of model dac, of type {kind or 'none'}, for {who[:80] or 'nobody'}"


def _dac_label(domain: Element) -> Element | None:
    return next((s for s in domain.findall("seclabel") if s.get("model") == "dac"), None)


def _runs_as(seclabel: Element, user: int | None) -> bool:
    """Whether a static label names this user: by number, with or without ``+``, or by name on this host."""
    if seclabel.get("type") != "static":
        return False
    name = content(seclabel.find("label")).strip().partition(":")[0]
    if name.removeprefix("+") == str(user):
        return True
    try:
        return pwd.getpwnam(name).pw_uid == user
    except (KeyError, ValueError):  # ValueError: not a valid user name
        return False


def _share(domain: Element, backing: Element) -> None:
    """Make the guest memory shared, file-backed memory: vhost-user requires that OVS can map it."""
    access, needed = backing.find("access"), "and a vhost-user NIC needs shared memory"
    if access is None:
        access = etree.SubElement(backing, "access", mode="shared")
    elif access.get("mode") != "shared":
        found = f"memoryBacking has access mode='private', {needed}"
        raise conflict(found, "remove <access> from the domain's <memoryBacking>")
    for cell in domain.iterfind("cpu/numa/cell"):
        if cell.get("memAccess", "shared") != "shared":
            found = f"a NUMA cell has memAccess='private', {needed}"
            raise conflict(found, "remove memAccess from the domain's NUMA cells")
        cell.set("memAccess", "shared")
    source = backing.find("source")
    if source is None:
        if backing.find("hugepages") is None:
            source = etree.Element("source", type="memfd")
            backing.insert(list(backing).index(access), source)
    elif source.get("type") == "anonymous":
        found = "memoryBacking has source type='anonymous', which cannot be shared"
        raise conflict(found, "remove <source> from the domain's <memoryBacking>")
