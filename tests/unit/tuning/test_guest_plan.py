"""What a guest should be set to follows from its domain."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netplugin.api.errors import InvalidRequest
from netplugin.cli.main import main
from netplugin.libvirt.guest import NicKind
from netplugin.tuning.guest.plan import GuestPlan, guest_text, plan_guest
from netplugin.tuning.guest.settings import GuestOptions
from netplugin.tuning.steps import KernelArgument
from tests.unit.tuning.guests import DATA, planned, texts, xml_of

ROUTER, LAST = "52:54:00:00:00:02", "52:54:00:00:00:03"


@pytest.mark.parametrize("file", texts())
def test_a_plan_is_as_it_was_read(file: str) -> None:
    """If it should be otherwise: ``python -m tests.unit.tuning.guests``, and read the difference."""
    assert texts()[file] == (DATA / "plans" / file).read_text()


def test_no_plan_is_kept_that_nobody_makes() -> None:
    assert {path.name for path in (DATA / "plans").iterdir()} == set(texts())


def arguments(plan: GuestPlan) -> dict[str, str | None]:
    return {s.target.name: s.desired for s in plan.steps if isinstance(s.target, KernelArgument)}


def domain(
    vcpu: str = "<vcpu>4</vcpu>", memory: str = "<memory unit='GiB'>4</memory>", rest: str = ""
) -> str:
    return f"<domain type='kvm'><name>vm</name>{memory}{vcpu}{rest}</domain>"


def nic(attributes: str = "type='vhostuser'", inner: str = "<model type='virtio'/>") -> str:
    mac = "<mac address='52:54:00:00:00:0A'/>"
    return f"<devices><interface {attributes}>{mac}{inner}</interface></devices>"


def plan(xml: str, **options: Any) -> GuestPlan:
    return plan_guest(xml, GuestOptions(**options))


# -- vCPUs and memory ----------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 70), st.sampled_from([1, 2]))
def test_vcpus_are_shared_out_by_whole_cores(vcpus: int, kept: int, threads: int) -> None:
    topology = f"<cpu><topology sockets='1' cores='{vcpus}' threads='{threads}'/></cpu>"
    made = plan(domain(f"<vcpu>{vcpus}</vcpu>", rest=topology), housekeeping=kept)
    assert made.housekeeping | made.isolated == set(range(vcpus))
    assert not made.housekeeping & made.isolated
    assert 0 in made.housekeeping and len(made.housekeeping) >= min(kept, vcpus)
    if made.isolated:
        assert min(made.isolated) % threads == 0
        assert len(made.housekeeping) < kept + threads
    assert ("isolcpus" in arguments(made)) == bool(made.isolated)


@given(
    st.lists(st.integers(128, 1 << 20), min_size=1, max_size=4),
    st.integers(0, 1 << 20) | st.none(),
    st.sampled_from([None, 2048, 1048576]),
    st.booleans(),
)
def test_hugepages_leave_each_cell_what_linux_needs(
    cells_mb: list[int], asked: int | None, size: Any, large: bool
) -> None:
    cells = "".join(f"<cell id='{n}' cpus='{n}' memory='{mb}' unit='MiB'/>" for n, mb in enumerate(cells_mb))
    backing = "<memoryBacking><hugepages><page size='1' unit='G'/></hugepages></memoryBacking>"
    xml = domain(
        f"<vcpu>{len(cells_mb)}</vcpu>",
        "",
        f"{backing * large}<cpu mode='host-passthrough'><numa>{cells}</numa></cpu>",
    )
    try:
        pages = plan(xml, hugepage_mb=asked, hugepage_kb=size).pages
    except InvalidRequest as refused:
        assert [wrong.field for wrong in refused.errors] == ["hugepage_mb"]
        assert (asked and asked > sum(cells_mb) - 512 * len(cells_mb)) or size or len(cells_mb) > 1
        return
    assert pages.pages % len(cells_mb) == 0
    each = pages.mb // len(cells_mb)
    if pages.pages:
        assert each <= min(cells_mb) - 512
    if asked is None:
        assert each <= min(cells_mb) / 2
    else:
        assert pages.mb >= asked
    assert size in (None, pages.size_kb)
    assert large or size or pages.size_kb == 2048


def test_pages_of_1_gb_only_where_the_host_has_such() -> None:
    assert planned("realtime").pages.size_kb == 1048576
    assert planned("router").pages.size_kb == 2048
    assert planned("realtime", hugepage_kb=2048).pages.pages == 8192
    assert planned("router", hugepage_kb=1048576, hugepage_mb=1500).pages.pages == 2


def test_too_many_hugepages_are_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        planned("router", hugepage_mb=7500)
    assert refused.value.detail == (
        "hugepage_mb: 7500 MB in pages of 2048 KB, but router has room for 7372 in addition to Linux "
        "(8192 MB in one cell)"
    )
    assert refused.value.fix and refused.value.step == "guest-plan"


# -- the kernel's arguments ----------------------------------------------------------------------


def test_the_clock_and_the_iommu_follow_the_domain() -> None:
    router, realtime = arguments(planned("router")), arguments(planned("realtime"))
    assert {"iommu", "intel_iommu", "clocksource", "tsc"} <= set(realtime)
    assert not {"iommu", "intel_iommu", "clocksource", "tsc", "idle", "mce"} & set(router)
    assert realtime["hugepages"] == "16"
    virtio = arguments(plan(domain(rest="<devices><iommu model='virtio'/></devices>")))
    assert virtio["iommu"] == "pt" and "intel_iommu" not in virtio
    amd = arguments(plan(domain(rest="<devices><iommu model='amd'/></devices>")))
    assert amd["iommu"] == "pt" and "amd_iommu" not in amd, "there is no amd_iommu=on"


def test_a_guest_on_arm_has_no_arguments_of_x86() -> None:
    arm = "<os><type arch='aarch64' machine='virt'>hvm</type></os>"
    clock = "<clock><timer name='kvmclock' present='no'/></clock>"
    smmu = "<devices><iommu model='smmuv3'/></devices>"
    found = arguments(plan(domain(rest=arm + clock + smmu), realtime=True))
    assert found["iommu.passthrough"] == "1" and found["isolcpus"]
    assert not {"iommu", "mce", "idle", "tsc", "clocksource"} & set(found)


def test_latency_counts_where_the_domain_or_the_caller_requests_it() -> None:
    assert planned("realtime").realtime and not planned("router").realtime
    assert arguments(planned("router", realtime=True))["idle"] == "poll"
    assert "idle" not in arguments(planned("realtime")), "its vCPUs are siblings, and one takes from another"
    assert "latency counts and the domain has kvmclock" in planned("router", realtime=True).doubts[0]
    fifo = domain(rest="<cputune><vcpusched vcpus='0' scheduler='fifo' priority='1'/></cputune>")
    assert plan(fifo).realtime


# -- NICs ----------------------------------------------------------------------------------------


def test_nics_on_vhost_user_are_for_dpdk_unless_others_are_named() -> None:
    assert [each.nic.mac for each in planned("router").bound] == [ROUTER, LAST]
    assert planned("router", no_dpdk=True).bound == ()
    assert [each.nic.mac for each in planned("router", dpdk=(LAST,)).bound] == [LAST]
    made = planned("router", dpdk=("52:54:00:00:00:01",), driver="uio_pci_generic")
    assert [each.driver for each in made.bound] == ["uio_pci_generic"]
    assert not made.noiommu


def test_a_nic_of_a_team_is_the_kernel_s() -> None:
    teamed = nic(inner="<model type='virtio'/><teaming type='persistent'/>")
    assert plan(domain(rest=teamed)).bound == ()
    assert len(plan(domain(rest=nic())).bound) == 1


def test_a_nic_that_stays_has_its_queues_and_its_mtu() -> None:
    by_mac = {each.nic.mac: each for each in planned("router", mtu=9000, no_dpdk=True).nics}
    assert (by_mac[ROUTER].channels, by_mac[ROUTER].mtu) == (8, 9000)
    assert by_mac["52:54:00:00:00:01"].channels is None
    assert by_mac["52:54:00:00:00:04"].mtu is None  # it has that of the host


def test_only_without_an_iommu_vfio_has_to_do_without() -> None:
    assert planned("router").noiommu and not planned("realtime").noiommu
    assert not planned("router", no_dpdk=True).noiommu


IOMMU = "<iommu model='intel'/>"


@pytest.mark.parametrize(
    ("iommu", "attributes", "inner", "translated"),
    [
        (IOMMU, "type='vhostuser'", "<model type='virtio'/><driver iommu='on' ats='on'/>", True),
        (IOMMU, "type='vhostuser'", "<model type='virtio'/><driver iommu='off'/>", False),
        (IOMMU, "type='vhostuser'", "<model type='virtio'/>", False),
        ("", "type='vhostuser'", "<model type='virtio'/><driver iommu='on'/>", False),
        (IOMMU, "type='hostdev'", "", True),
        ("", "type='hostdev'", "", False),
        (IOMMU, "type='bridge'", "<model type='e1000e'/>", True),
    ],
)
def test_which_nics_the_emulated_iommu_translates_for(
    iommu: str, attributes: str, inner: str, translated: bool
) -> None:
    xml = domain(rest=nic(attributes, inner).replace("<devices>", f"<devices>{iommu}"))
    made = plan(xml)
    assert [each.translated for each in made.domain.nics] == [translated]
    loose = [each for each in made.doubts if "does not translate for 52:54:00:00:00:0a" in each]
    assert bool(loose) == bool(made.bound and iommu and not translated)
    assert made.noiommu == bool(made.bound and not iommu)
    assert ("keeps DPDK's memory apart" in guest_text(made)) == bool(made.bound and translated)
    if translated or "vhostuser" in attributes:
        assert not any("does not translate" in each for each in plan(xml, no_dpdk=True).doubts)


@pytest.mark.parametrize(
    ("guest", "options", "words"),
    [
        ("router", {"dpdk": ("52:54:00:00:00:09",)}, "dpdk: router has no NIC 52:54:00:00:00:09"),
        ("small", {"dpdk": ("52:54:00:00:02:01",)}, "52:54:00:00:02:01 is one of a team"),
        (
            "realtime",
            {"dpdk": ("52:54:00:00:01:02",), "driver": "uio_pci_generic"},
            "driver: 52:54:00:00:01:02 is a VF",
        ),
        ("router", {"dpdk": (LAST,), "no_dpdk": True}, "dpdk: NICs are named, and no_dpdk"),
    ],
)
def test_nics_that_cannot_be_for_dpdk(guest: str, options: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        planned(guest, **options)
    assert words in refused.value.detail and refused.value.fix


@pytest.mark.parametrize(
    ("attributes", "inner", "kind", "ours"),
    [
        ("type='vhostuser'", "<model type='virtio'/>", NicKind.VIRTIO, True),
        (
            "type='ethernet'",
            "<target managed='no'/><model type='virtio-transitional'/>",
            NicKind.VIRTIO,
            True,
        ),
        ("type='ethernet'", "<model type='virtio'/>", NicKind.VIRTIO, False),
        ("type='hostdev'", "", NicKind.VF, True),
        ("type='network'", "<model type='e1000e'/>", NicKind.EMULATED, False),
        ("type='bridge'", "", NicKind.EMULATED, False),
    ],
)
def test_kinds_of_nics(attributes: str, inner: str, kind: NicKind, ours: bool) -> None:
    [found] = plan(domain(rest=nic(attributes, inner))).domain.nics
    assert (found.mac, found.kind, found.ours) == ("52:54:00:00:00:0a", kind, ours)


def test_a_vf_of_which_libvirt_has_no_mac_is_known_by_its_alias() -> None:
    inner = "<driver name='vfio'/><address type='pci' domain='0' bus='0x05' slot='0' function='0'/>"
    device = f"<hostdev mode='subsystem' type='pci'>{inner}<alias name='{{}}'/></hostdev>"
    ours, other = device.format("ua-netplugin-52-54-00-00-00-0a"), device.format("ua-gpu")
    [found] = plan(domain(rest=f"<devices>{other}{ours}</devices>")).domain.nics
    assert (found.mac, found.kind, found.ours) == ("52:54:00:00:00:0a", NicKind.VF, True)
    assert (found.address, found.queues, found.vhostuser) == ("0000:05:00.0", 1, False)


def test_the_address_is_the_guest_s_and_not_the_host_s() -> None:
    addresses = [nic.address for nic in planned("realtime").domain.nics]
    assert addresses == ["0000:01:00.0", "0000:05:00.0"]


# -- what should be known ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("xml", "words"),
    [
        (xml_of("small"), "1 vCPU, all for housekeeping: there is nothing to isolate"),
        (xml_of("small"), "512 MB leave no room for the hugepages of DPDK"),
        (xml_of("small"), "has 4 queues, and the guest 1 vCPU"),
        (xml_of("small"), "is a VF in a machine without PCI Express (pc-i440fx-7.2)"),
        (xml_of("small"), "is a NIC that QEMU emulates"),
        (xml_of("router"), "has 8 queues, and 7 vCPUs for DPDK: some has to poll more than one"),
        (domain(), "the domain has no NIC that netplugin plugs"),
        (
            domain(rest="<os><type machine='pc'>hvm</type></os><devices><iommu model='intel'/></devices>"),
            "which needs the machine q35",
        ),
    ],
)
def test_what_should_be_known_is_reported(xml: str, words: str) -> None:
    assert [each for each in plan(xml).doubts if words in each]


def test_a_guest_as_it_should_be_raises_no_doubts() -> None:
    assert planned("realtime").doubts == ()


@pytest.mark.parametrize("machine", ["q35", "pc-q35-9.0", "microvm", "virt", ""])
def test_machines_that_are_not_i440fx(machine: str) -> None:
    rest = f"<os><type machine='{machine}'>hvm</type></os>{nic(chr(116) + 'ype=' + repr('hostdev'))}"
    assert plan(domain(rest=rest)).domain.pcie


# -- what comes from outside ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("xml", "words"),
    [
        ("<domain", "xml: not XML"),
        ("<network/>", "the root element is <network>"),
        ("<!DOCTYPE d><domain/>", "a document type declaration is not allowed"),
        (domain("<vcpu>0</vcpu>"), "<vcpu> is 0"),
        (domain("<vcpu current='9'>4</vcpu>"), "<vcpu> has current=9, not 1 to 4"),
        (domain("<vcpu current='x'>4</vcpu>"), "current is 'x', not a number"),
        (domain(memory=""), "<memory> is missing"),
        (domain(rest=nic(inner="<driver queues='many'/>")), "queues is 'many', not a number"),
        (domain(rest="<devices><interface type='vhostuser'/></devices>"), "an <interface> has the MAC"),
        (domain(rest=nic(inner="<address type='pci' bus='x'/>")), "a number of a PCI address is none"),
    ],
)
def test_a_domain_that_cannot_be_read_is_a_sentence(xml: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(xml)
    assert words in refused.value.detail
    assert [wrong.field for wrong in refused.value.errors] == ["xml"]


def test_vcpus_that_are_plugged_in_later_do_not_count() -> None:
    assert plan(domain("<vcpu current='2'>8</vcpu>")).online == {0, 1}


# -- the command ---------------------------------------------------------------------------------


def command(line: str) -> int:
    try:
        return main(shlex.split(line))
    except SystemExit as ended:
        return int(ended.code or 0)


def test_each_form_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"guest plan --xml {DATA / 'router.xml'} --mtu 9000 --hugepage-kb 2048"
    for form, file in (("text", "router.txt"), ("ansible", "router.yml")):
        assert command(f"{line} -f {form}") == 0
        assert capsys.readouterr().out == (DATA / "plans" / file).read_text()
    assert command(f"{line} --dpdk {LAST} --dpdk {ROUTER.upper()} -f json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["isolated"] == "1-7" and shown["pages"] == {"size_kb": 2048, "pages": 2048}
    assert [each["driver"] for each in shown["nics"]] == [None, "vfio-pci", "vfio-pci", None]
    assert shown["options"]["dpdk"] == [LAST, ROUTER]
    assert shown["steps"][0]["now"] == {"unknown": "was not asked", "path": "the guest"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--dpdk eth0", "dpdk.0: must be a MAC address such as"),
        ("--driver virtio", "driver: must be 'vfio-pci' or 'uio_pci_generic'"),
        ("--hugepage-kb 4", "hugepage_kb: pages have 2048 or 1048576 KB"),
        ("--housekeeping 0", "housekeeping: must be at least 1"),
    ],
)
def test_an_option_that_is_wrong_is_named(
    capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert command(f"guest plan --xml {DATA / 'router.xml'} {options}") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and words in shown.err


def test_every_option_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("help guest plan") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in GuestOptions.model_fields.items():
        assert "--" + name.replace("_", "-") in shown
        assert str(field.description).split(";")[0] in shown
