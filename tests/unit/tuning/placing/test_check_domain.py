"""Each fault with a domain: found, with its status, and only then."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from netplugin.api.errors import InvalidRequest
from netplugin.api.models import Binding, Finding, PortSpec, VfInfo
from netplugin.libvirt.domain import complete, parse_domain, written
from netplugin.libvirt.interfaces import hostdev_interface
from netplugin.libvirt.pins import Placement
from netplugin.tuning.placing.capacity import Held, HostCapacity
from netplugin.tuning.placing.checks import check
from netplugin.tuning.placing.checks.case import Case, DomainNic
from netplugin.tuning.placing.render import render_placed
from tests.unit.tuning.placing.grounds import TWO_NODES
from tests.unit.tuning.placing.strategies import Vm, with_memory

VM = Vm(1, vcpus=4, realtime=True)


def good() -> tuple[str, Placement]:
    domain = VM.domain
    place = render_placed(domain, VM.bindings, VM.policy, TWO_NODES, Held())
    return written(domain), place


def found(
    xml: str,
    ground: HostCapacity | None = TWO_NODES,
    mine: Placement | None = None,
    others: frozenset[int] = frozenset(),
    vm: Vm = VM,
) -> dict[str, Finding]:
    """What is not as it should be, by its id; of several of an id the worst."""
    nics = tuple(DomainNic("p1", binding) for binding in vm.bindings)
    case = Case(parse_domain(xml, "check-domain"), nics, ground, mine, others)
    wrong = [finding for finding in check(case) if finding.status != "ok"]
    assert all(finding.fix and finding.found and finding.expected for finding in wrong)
    return {each.id: each for each in sorted(wrong, key=lambda f: f.status == "fail")}


def test_nothing_is_wrong_with_what_was_placed() -> None:
    xml, place = good()
    assert found(xml, mine=place) == {}


@pytest.mark.parametrize(
    ("before", "after", "id", "status", "word"),
    [
        ('memAccess="shared"', 'memAccess="private"', "memory-shared", "fail", ""),
        ('path="/run/vhost/1"', 'path="/run/vhost/9"', "nic", "fail", "source path is /run/vhost/9"),
        ('type="vhostuser"', 'type="ethernet"', "nic", "fail", "type"),
        ('mac address="52:54:00:00:00:01"', 'mac address="52:54:00:00:00:77"', "nic-mac", "fail", ":77"),
        ('queues="4"', 'queues="2"', "nic", "warn", "driver queues is 2, not 4"),
        ('queues="4"', 'queues="8"', "queues", "warn", "8 queues for 4"),
        ('rx_queue_size="1024"', 'rx_queue_size="256"', "rings", "warn", "256"),
        ('vcpu="3" cpuset="13"', 'vcpu="9" cpuset="13"', "vcpu-pinned", "warn", "vCPU 3"),
        ('vcpu="3" cpuset="13"', 'vcpu="3" cpuset="13-14"', "vcpu-pinned", "warn", "vCPU 3"),
        ('vcpu="3" cpuset="13"', 'vcpu="3" cpuset="1"', "vcpu-pmd", "fail", "CPU 1"),
        ('vcpu="3" cpuset="13"', 'vcpu="3" cpuset="0"', "vcpu-cpus", "warn", "CPU 0"),
        ('vcpu="3" cpuset="13"', 'vcpu="3" cpuset="3"', "vcpu-twice", "fail", "CPU 3"),
        ('vcpu="3" cpuset="13"', 'vcpu="3" cpuset="23"', "vcpu-node", "warn", "0-1"),
        ('vcpu="3" cpuset="13"', 'vcpu="3" cpuset="4"', "placement", "warn", ""),
        ('vcpu="1" cpuset="12"', 'vcpu="1" cpuset="14"', "siblings", "warn", "idle"),
        ('vcpu="0" cpuset="2"/>', 'vcpu="0" cpuset="13"/>', "siblings", "warn", "0, 2"),
        ('threads="2"', 'threads="1"', "topology", "warn", "1 CPUs a core"),
        ('emulatorpin cpuset="6,16"', 'emulatorpin cpuset="2,6"', "emulator", "warn", "CPU 2"),
        ('<emulatorpin cpuset="6,16"/>', "", "emulator", "warn", "not pinned"),
        ('strict" nodeset="0"', 'strict" nodeset="1"', "memory-node", "warn", "node 1"),
        ('mode="host-passthrough"', 'mode="custom"', "cpu-mode", "warn", "least"),
        ("<vcpu ", '<vcpu current="2" ', "vcpu-hotplug", "warn", "2 of 4"),
        ("<locked/>", "", "realtime-memory", "warn", ""),
        ('vcpus="0-3"', 'vcpus="0-1"', "realtime-scheduler", "warn", "vCPU 2-3"),
        ('memballoon model="none"', 'memballoon model="virtio"', "realtime-balloon", "warn", ""),
        ('present="no"', 'present="yes"', "realtime-clock", "warn", "kvmclock"),
        ('pmu state="off"', 'pmu state="on"', "realtime-pmu", "warn", ""),
        ('migratable="off"', 'migratable="on"', "realtime-tsc", "warn", "invariant"),
        ('policy="require"', 'policy="disable"', "realtime-tsc", "warn", "invariant"),
        ('memory="1048576"', 'memory="99614720"', "hugepages-room", "fail", "97280 MB"),
    ],
)
def test_one_fault_is_found(before: str, after: str, id: str, status: str, word: str) -> None:
    xml, place = good()
    assert before in xml
    wrong = found(xml.replace(before, after), mine=place)
    assert id in wrong, wrong
    assert wrong[id].status == status
    assert word in wrong[id].found


@pytest.mark.parametrize(
    ("label", "word"),
    [
        ("", "no <seclabel> of model dac"),
        ("<seclabel type='dynamic' model='dac' relabel='yes'/>", "type dynamic"),
        ("<seclabel type='static' model='dac'><label>+64102:+64101</label></seclabel>", "+64102:+64101"),
        ("<seclabel type='static' model='dac'><label>+64101:+108</label></seclabel>", None),
        (
            "<seclabel type='none' model='apparmor'/>"
            "<seclabel type='static' model='dac'><label>64101:108</label></seclabel>",
            None,
        ),
    ],
)
def test_qemu_runs_as_the_user_of_its_ports(label: str, word: str | None) -> None:
    """Their sockets are closed to every other user: QEMU would not start."""
    xml, place = good()
    needs = VM.bindings[0].domain_requirements.model_copy(update={"qemu_user": 64101})
    binding = VM.bindings[0].model_copy(update={"domain_requirements": needs})
    domain = parse_domain(xml.replace("</domain>", f"{label}</domain>"), "check-domain")
    case = Case(domain, (DomainNic("p1", binding),), TWO_NODES, place)
    wrong = [finding for finding in check(case) if finding.status != "ok"]
    assert [(f.id, f.status) for f in wrong] == ([("qemu-user", "fail")] if word else [])
    assert not word or (word in wrong[0].found and "+64101:+<group>" in wrong[0].expected)


def test_what_libvirt_leaves_out_is_no_difference() -> None:
    vm = Vm(1, vcpus=1)
    domain = vm.domain
    place = render_placed(domain, vm.bindings, vm.policy, TWO_NODES, Held())
    xml = written(domain)
    assert ' queues="1"' in xml
    assert found(xml.replace(' queues="1"', ""), mine=place, vm=vm) == {}


def test_a_nic_that_is_not_there() -> None:
    xml, place = good()
    domain = parse_domain(xml, "t")
    devices = domain.find("devices")
    devices.remove(devices.find("interface"))
    assert found(written(domain), mine=place).keys() == {"nic-missing"}


def test_a_domain_nobody_placed() -> None:
    plain = found(VM.xml)
    assert {
        "nic-missing",
        "memory-shared",
        "hugepages",
        "vcpu-pinned",
        "emulator",
        "cpu-mode",
    } == set(plain)
    assert plain["hugepages"].status == "fail"


def test_pins_that_the_agent_knows_nothing_of() -> None:
    xml, _ = good()
    assert found(xml).keys() == {"placement"}


def test_cpus_and_siblings_of_other_vms() -> None:
    xml, place = good()
    assert found(xml, mine=place, others=frozenset((12,)))["vcpu-others"].status == "fail"
    vm = replace(VM, vcpus=3)
    domain = vm.domain
    mine = render_placed(domain, vm.bindings, vm.policy, TWO_NODES, Held())
    assert found(written(domain), mine=mine, vm=vm) == {}
    wrong = found(written(domain), mine=mine, others=frozenset((13,)), vm=vm)
    assert wrong.keys() == {"siblings"}


def vf_nic(at: str = "0000:03:10.1", **vf: str) -> DomainNic:
    vlan = {"type": "vlan", "physical_network": "net1", "vlan_id": 100}
    asked = {"vm_id": "vm", "mac": "52:54:00:00:00:09", "backend": "sriov", "network": vlan}
    xml = hostdev_interface(PortSpec.model_validate({**asked, "vf": vf}), at)
    return DomainNic("p2", Binding(vif_type="hostdev", interface_xml=xml))


def test_a_vf_of_which_libvirt_sets_nothing_is_known_by_its_alias() -> None:
    xml, place = good()

    def wrong(requested: DomainNic, has: DomainNic | None, alias: str = "ua-") -> dict[str, str]:
        domain = parse_domain(xml, "t")
        complete(domain, [has.binding] if has else [])
        domain = parse_domain(written(domain).replace('"ua-', f'"{alias}'), "t")
        nics = tuple(DomainNic("p1", binding) for binding in VM.bindings)
        case = Case(domain, (*nics, requested), TWO_NODES, place)
        return {f.id: f"{f.status} {f.found}" for f in check(case) if f.status != "ok"}

    stacked, usual = vf_nic(vlan_proto="802.1ad"), vf_nic()
    assert wrong(stacked, stacked) == {} and wrong(usual, usual) == {}
    assert wrong(stacked, None) == {"nic-missing": "fail no NIC has 52:54:00:00:00:09"}
    moved = wrong(stacked, vf_nic("0000:03:10.2", vlan_proto="802.1ad"))
    assert moved.keys() == {"nic"} and "source address function is 0x2, not 0x1" in moved["nic"]
    unmarked = wrong(stacked, stacked, "hostdev0-")
    assert unmarked.keys() == {"nic"} and "alias name is hostdev0-" in unmarked["nic"]
    for one, other in ((stacked, usual), (usual, stacked)):
        found = wrong(one, other)
        assert found.keys() == {"nic"} and found["nic"].startswith("fail 52:54:00:00:00:09: ")


@pytest.mark.parametrize("kind", ["802.1ad", "802.1Q"])
@pytest.mark.parametrize(("port_id", "word"), [("p9", "port p9 of another VM has"), (None, "no port has")])
def test_a_vf_of_no_port_of_the_vm_is_found(kind: str, port_id: str | None, word: str) -> None:
    xml, place = good()
    domain = parse_domain(xml, "t")
    complete(domain, [vf_nic(vlan_proto=kind).binding])
    nics = tuple(DomainNic("p1", binding) for binding in VM.bindings)
    vf = VfInfo(pci_address="0000:03:10.1", state="claimed", port_id=port_id)
    case = Case(domain, nics, TWO_NODES, place, other_vfs=(vf,))
    [found] = [f for f in check(case) if f.status != "ok"]
    assert (found.id, found.status) == ("nic-vf", "fail") and found.fix
    assert "on 0000:03:10.1, a VF that " + word in found.found
    elsewhere = vf.model_copy(update={"pci_address": "0000:03:10.2"})
    assert all(f.status == "ok" for f in check(replace(case, other_vfs=(elsewhere,))))


@pytest.mark.parametrize(
    ("iommu", "driver", "ovs", "status"),
    [
        (True, "iommu='on'", {}, "fail"),
        (True, "iommu='on' ats='on'", {"vhost-iommu-support": "false"}, "fail"),
        (True, "iommu='on'", {"vhost-iommu-support": "true"}, "ok"),
        (True, "iommu='on'", None, None),
        (True, "iommu='off'", {}, None),
        (True, "", {}, None),
        (False, "iommu='on'", {}, None),
    ],
)
def test_ovs_translates_for_a_nic_behind_the_iommu(
    iommu: bool, driver: str, ovs: dict[str, str] | None, status: str | None
) -> None:
    """QEMU refuses the device otherwise: iommu_platform=true is not supported by the device."""
    xml, place = good()
    xml = xml.replace("<driver ", f"<driver {driver} ")
    xml = xml.replace("<devices>", "<devices><iommu model='intel'/>") if iommu else xml
    nics = tuple(DomainNic("p1", binding) for binding in VM.bindings)
    found = check(Case(parse_domain(xml, "t"), nics, TWO_NODES, place, other_config=ovs))
    assert [f.status for f in found if f.id == "nic-iommu"] == ([status] if status else [])
    assert [f.id for f in found if f.status != "ok"] == (["nic-iommu"] if status == "fail" else [])


@pytest.mark.parametrize("part", ["filterref filter='clean-traffic'", "bandwidth", "vlan"])
def test_what_the_port_decides_is_found_in_its_nic(part: str) -> None:
    xml, place = good()
    wrong = found(xml.replace("<mac ", f"<{part}/><mac "), mine=place)
    assert wrong.keys() == {"nic"} and wrong["nic"].status == "fail"
    assert f"{part.split()[0]} is set: " in wrong["nic"].found


def test_a_nic_of_another_node() -> None:
    xml, place = good()
    [binding] = VM.bindings
    needs = binding.domain_requirements.model_copy(update={"numa_node": 1})
    away = binding.model_copy(update={"domain_requirements": needs})
    case = Case(parse_domain(xml, "t"), (DomainNic("p1", away),), TWO_NODES, place)
    assert [f.id for f in check(case) if f.status != "ok"] == ["nic-node"]


def test_real_time_on_a_host_that_is_not_planned_for_it() -> None:
    xml, place = good()
    wrong = found(xml, replace(TWO_NODES, realtime=False), place)
    assert wrong.keys() == {"realtime-host"} and wrong["realtime-host"].status == "fail"


def test_a_host_without_a_plan_or_pages() -> None:
    xml, place = good()
    assert found(xml, None, place) == {}
    assert found(xml, with_memory(TWO_NODES, 256), place).keys() == {"hugepages-room"}


def test_every_finding_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[4] / "docs" / "domains.md").read_text()
    rows = page.partition("## Findings")[2].splitlines()
    documented = {
        i for row in rows for i in re.findall(r"`([a-z-]+)`", row.split("|")[1] if "|" in row else "")
    }
    xml, place = good()
    nics = tuple(DomainNic("p1", binding) for binding in VM.bindings)
    [needs] = [nic.binding.domain_requirements for nic in nics]
    near = nics[0].binding.model_copy(
        update={"domain_requirements": needs.model_copy(update={"numa_node": 0, "qemu_user": 64101})}
    )
    xml = xml.replace("<devices>", "<devices><iommu model='intel'/>").replace(
        "<driver ", "<driver iommu='on' "
    )
    whole = check(Case(parse_domain(xml, "t"), (DomainNic("p1", near),), TWO_NODES, place, other_config={}))
    # There is no `ok` of these.
    elsewhere = {"port", "plan", "libvirt", "nic-missing", "nic-mac", "nic-vf"}
    assert {finding.id for finding in whole} | elsewhere == documented


def test_numbers_that_are_none_are_the_caller_s_mistake() -> None:
    with pytest.raises(InvalidRequest):
        found("<domain><vcpu>x</vcpu></domain>")
