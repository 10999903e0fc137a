"""The shipped run description on the published host: it passes its checks, and each thing that is missing is
found with its fix, all in one list, before anything is sent."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from netplugin_zeroloss.journal import Part
from netplugin_zeroloss.matrix.host import planned_cpus, unfit
from netplugin_zeroloss.values import UnusableInput

from netplugin.api.errors import InvalidRequest
from netplugin.api.models import PortSpec
from netplugin.tuning.facts import Facts
from netplugin.tuning.read import read_facts
from tests.unit.tuning.golden import PLANS, facts_of, planned
from tests.unit.tuning.machines import Machine, MemoryRoot, load
from tests.unit.tuning.trees import tree
from tests.unit.zeroloss.made_up_agent import MadeUpAgent
from tests.unit.zeroloss.published_host import GUEST, NICS, PublishedHost, with_pages


@pytest.fixture
def host(tmp_path: Path, agent: MadeUpAgent, monkeypatch: pytest.MonkeyPatch) -> PublishedHost:
    return PublishedHost(tmp_path, agent, monkeypatch)


def test_the_shipped_run_passes_its_checks_on_the_published_host(host: PublishedHost) -> None:
    run = host.description()
    tasks = host.tasks(run)
    cores = {(t.cell.backend, t.cell.pmd_cores) for t in tasks if t.part is Part.SEARCH}
    assert {backend for backend, _ in cores} == {"linuxbridge", "dpdkvhostuser", "vdpa", "sriov"}
    assert {count for backend, count in cores if backend == "dpdkvhostuser"} == {2, 4, 6, 8}
    facts = host.check(run)
    assert set(facts["backends"]) == {backend for backend, _ in cores} and facts["nics"] == {}
    assert host.agent.calls == []
    calls = (host.folder / "calls").read_text().splitlines()
    assert "shutdown zeroloss-check" in calls and not (host.folder / "running").exists()
    assert not list((host.image / "overlays").iterdir()), "and its overlay is removed"


@pytest.mark.parametrize("count", [2, 4, 6, 8])
def test_pmd_cores_are_whole_cores_of_the_plan_on_the_node_of_the_nics(
    host: PublishedHost, count: int
) -> None:
    run = host.description()
    [task] = [
        t
        for t in host.tasks(run)
        if (t.cell.backend, t.cell.pmd_cores, t.cell.frame) == ("vdpa", count, "64")
    ]
    with ExitStack() as parts:
        host.bench(run)._ports.plug(parts, task.cell)
        cpus = host.agent.cpus
    assert cpus == f"1-{count}", "node 0 has the NICs, its CPU 0 is for everything else"
    name, intent = PLANS[f"published-pmd-{count}"]
    share, _ = planned(name, **intent.model_dump()).partition.nodes
    assert cpus == f"{share.pmd[0].first}-{share.pmd[-1].first}" and len(share.pmd) == count


def _facts(machine: Machine) -> Facts:
    return read_facts(MemoryRoot(tree(machine)))


def test_pmd_cores_are_with_the_nics_of_the_ends_also_if_another_is_faster() -> None:
    there = load("published")
    nics = [nic | ({"node": 1, "speed": 25000} if nic["interface"] == "eno1" else {}) for nic in there.nics]
    facts = _facts(replace(there, nics=nics))
    assert planned_cpus(8, facts, NICS) == "1-8"
    assert planned_cpus(8, facts, []) == "17-24", "none is named: the fastest"
    apart = [nic | ({"node": 1} if nic["address"] == NICS[1] else {}) for nic in there.nics]
    assert planned_cpus(4, _facts(replace(there, nics=apart)), NICS) == "1-2,17-18"


def test_more_pmd_cores_than_the_node_has_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="NUMA node 0 has 15 cores"):
        planned_cpus(16, facts_of("published"), NICS)


@pytest.mark.parametrize(
    ("cpus", "why"), [("2-5", None), ("2,34", "threads of one core"), ("2,99", "CPU 99 .* not on line")]
)
def test_named_cpus_are_one_on_each_core(cpus: str, why: str | None) -> None:
    found = unfit(cpus, facts_of("published"))
    assert re.search(why, str(found)) if why else found is None


@pytest.mark.parametrize(("driver", "queues"), [("mlx5_core", 8), ("igb", 2)])
def test_vfs_get_the_queues_that_they_have(host: PublishedHost, driver: str, queues: int) -> None:
    host.backends(vf_driver=driver)
    run = host.description()
    host.check(run)
    [task] = [t for t in host.tasks(run) if (t.cell.backend, t.cell.frame) == ("sriov", "64")]
    specs: list[PortSpec] = []
    with ExitStack() as parts:
        specs = [port.spec for port in host.bench(run)._ports.plug(parts, task.cell)]
    assert [spec.queues for spec in specs] == [queues, queues] and task.cell.queues == 8


def test_without_leave_fewer_queues_are_refused(host: PublishedHost) -> None:
    host.backends(vf_driver="igb")
    with pytest.raises(UnusableInput, match=r"sriov has 2 queues at most, not 8\n  fix: add it to matrix"):
        host.check(host.description(("fewer_queues: [vdpa, sriov]", "fewer_queues: [vdpa]")))


def test_the_network_with_the_fewest_queues_decides(host: PublishedHost) -> None:
    host.agent.vfs[-2:] = [vf.model_copy(update={"max_queues": 4}) for vf in host.agent.vfs[-2:]]
    seen = host.bench(host.description())._host
    sriov, vdpa = map(seen.most_queues, seen.infos(["sriov", "vdpa"]))
    assert sriov == 4
    assert vdpa == 128, "its VM has a vhost-user port"


def _without_vfs(host: PublishedHost) -> None:
    """The agent has ``[vdpa] mode = vduse``, and no VF."""
    of_vduse = {"virtual_functions": False, "vdpa_devices": True, "max_queues": 1}
    host.agent.infos = [
        info.model_copy(update={"features": info.features.model_copy(update=of_vduse)})
        if info.name == "vdpa"
        else info
        for info in host.agent.infos
    ]
    host.agent.networks = [each.model_copy(update={"sriov": None}) for each in host.agent.networks]


_VDPA = ("backends: [linuxbridge, dpdkvhostuser, vdpa, sriov]", "backends: [vdpa]")
_FEWER = ("fewer_queues: [vdpa, sriov]", "fewer_queues: [vdpa]")


def test_without_vfs_vdpa_has_the_nics_of_its_bridges_and_one_queue(host: PublishedHost) -> None:
    assert [need.dpdk for need in host.bench(host.description())._host.needs(["vdpa"])] == [False, False]
    _without_vfs(host)
    run = host.description(_VDPA, _FEWER)
    assert [(need.address, need.dpdk) for need in host.bench(run)._host.needs(["vdpa"])] == [
        (nic, True) for nic in NICS
    ]
    host.check(run)
    with ExitStack() as parts:
        specs = [port.spec for port in host.bench(run)._ports.plug(parts, host.tasks(run)[-1].cell)]
    assert [spec.queues for spec in specs] == [1, 1]
    with pytest.raises(UnusableInput, match="vdpa has 1 queues at most, not 8"):
        host.check(host.description(_VDPA, (_FEWER[0], "fewer_queues: []")))
    host.agent.networks[0] = host.agent.networks[0].model_copy(update={"ovs": None})
    with pytest.raises(UnusableInput, match="physnet1 has no ovs part for backend vdpa"):
        host.check(run)


# -- what is missing -----------------------------------------------------------------------------


def _no_papi(host: PublishedHost) -> None:
    host.packages.clear()


def _no_ssh(host: PublishedHost) -> None:
    host.programs.remove("ssh")


def _no_key(host: PublishedHost) -> None:
    host.key.unlink()


def _open_key(host: PublishedHost) -> None:
    host.key.chmod(0o644)


def _no_image(host: PublishedHost) -> None:
    shutil.rmtree(host.image)


def _changed_image(host: PublishedHost) -> None:
    (host.image / "disk.qcow2").write_text("the disk.qcow3\n")


def _no_kvm(host: PublishedHost) -> None:
    host.kvm.unlink()


def _no_qemu_img(host: PublishedHost) -> None:
    host.programs.remove("qemu-img")


def _no_pages(host: PublishedHost) -> None:
    shutil.rmtree(host.root / "sys")
    host.machine(with_pages(load("published"), 4))


def _kernel_nic(host: PublishedHost) -> None:
    driver = host.root / "sys/bus/pci/devices" / NICS[1] / "driver"
    driver.unlink()
    driver.symlink_to("/drivers/ixgbe")
    host.networks()


def _dpdk_nic(host: PublishedHost) -> None:
    driver = host.root / "sys/bus/pci/devices" / NICS[0] / "driver"
    driver.unlink()
    driver.symlink_to("/drivers/vfio-pci")
    host.networks()


def _no_network(host: PublishedHost) -> None:
    del host.agent.networks[1]


def _no_part(host: PublishedHost) -> None:
    host.agent.networks[0] = host.agent.networks[0].model_copy(update={"sriov": None})


def _few_cores(host: PublishedHost) -> None:
    shutil.rmtree(host.root / "sys")
    few = with_pages(load("published"), 16)
    host.machine(replace(few, offline="6-15,38-47"))


_STATIC: list[tuple[Callable[[PublishedHost], None], str, str]] = [
    (_no_papi, "vpp-papi is not installed", "pip install './tools/trex[vpp]'"),
    (_no_ssh, "ssh is not installed here", "apt-get install openssh-client"),
    (_no_key, "key: No such file", "ssh-keygen -t ed25519"),
    (_open_key, "others may read the key", "chmod 600"),
    (_no_image, "latest: there is no image of the VM: No such file", "netplugin-zeroloss vm build --folder"),
    (_changed_image, "disk.qcow2 has changed since it was built", "vm build --folder"),
    (_no_kvm, "this host has no KVM", "modprobe kvm_intel"),
    (_no_qemu_img, "qemu-img is not installed", "apt-get install qemu-utils"),
    (_no_pages, "needs 8192 MB of hugepages on a node, and 4096 MB are free", "netplugin host apply"),
    (_kernel_nic, "0000:3b:00.1 is bound to ixgbe", "driverctl set-override 0000:3b:00.1 vfio-pci"),
    (_dpdk_nic, "0000:3b:00.0 is bound to vfio-pci", "driverctl unset-override 0000:3b:00.0"),
    (_no_network, "the agent has no physical network physnet2", "netplugin physical-network put"),
    (_no_part, "physnet1 has no sriov part for backend vdpa", "netplugin physical-network put"),
    (_few_cores, "8 PMD cores cannot be had: ", "take 8 out of matrix.pmd_cores"),
]


@pytest.mark.parametrize(("breaks", "found", "fix"), _STATIC, ids=[each[0].__name__ for each in _STATIC])
def test_what_is_missing_is_found_with_its_fix(
    host: PublishedHost, breaks: Callable[[PublishedHost], None], found: str, fix: str
) -> None:
    breaks(host)
    with pytest.raises(UnusableInput) as refused:
        host.check(host.description())
    lines = str(refused.value).splitlines()
    [at] = {n for n, line in enumerate(lines) if found in line} or {-1}
    assert at >= 0, lines
    assert lines[at + 1].startswith("  fix: ") and fix in lines[at + 1]
    assert "create" not in (host.folder / "calls").read_text() if (host.folder / "calls").exists() else True


def test_all_that_is_missing_is_one_list(host: PublishedHost) -> None:
    for breaks in (_no_papi, _open_key, _no_image, _kernel_nic, _no_part):
        breaks(host)
    host.agent.infos[0] = host.agent.infos[0].model_copy(
        update={"usable": False, "reason": "no DPDK", "fix": "dpdk-init=true"}
    )
    with pytest.raises(UnusableInput) as refused:
        host.check(host.description())
    error_text = str(refused.value)
    assert (
        error_text.count("\n  fix: ") >= 6
        and f"{error_text.count(chr(10) + '  fix: ')} findings" in error_text
    )
    for words in ("vpp-papi", "vm build", "ixgbe", "sriov part", "no DPDK"):
        assert words in error_text
    assert "ssh-keygen" not in error_text, "the image has the keys too"


@pytest.mark.parametrize(
    ("there", "found"),
    [((), "vm.xml: No such file"), (("vm.xml",), "vm.xml names /vpp.qcow2, and there is no such file")],
)
def test_a_domain_of_the_operator_is_there_with_its_disk(
    host: PublishedHost, there: tuple[str, ...], found: str
) -> None:
    disk = "<devices><disk type='file'><source file='/vpp.qcow2'/></disk></devices>"
    for name in there:
        (host.folder / name).write_text(f"<domain><memory>1</memory>{disk}</domain>")
    own = (
        (f"  image: {host.image}\n", f"  domain: {host.folder}/vm.xml\n"),
        ("  # machine: {type: ssh", "  machine: {type: ssh"),
        ("/etc/netplugin/zeroloss.key", str(host.key)),
        ('  # nics: ["', '  nics: ["'),
    )
    with pytest.raises(UnusableInput, match=found):
        host.check(host.description(*own))


def test_a_backend_that_nobody_knows_is_one_of_the_findings(host: PublishedHost) -> None:
    with pytest.raises(UnusableInput, match="it has no backend 'toy'"):
        host.check(host.description(("backends: [linuxbridge,", "backends: [toy, linuxbridge,")))


@pytest.mark.parametrize(
    ("change", "found", "fix"),
    [
        ({"program": ""}, "the VM has no program vpp", "apt-get install vpp"),
        ({"pages": "0"}, "the VM has no hugepages", "vm.nr_hugepages"),
        ({"0000:02:00.0": "virtio-pci"}, "0000:02:00.0 of the VM has the driver virtio-pci", "driverctl"),
        ({"0000:01:00.0": ""}, "0000:01:00.0 of the VM has the driver that the kernel takes", "vfio-pci.ids"),
        ({"module": ""}, "the VM has no module vfio-pci", "kernel package"),
        ({"unsafe": "N"}, "the VM has no IOMMU", "enable_unsafe_noiommu_mode=1"),
    ],
)
def test_what_the_vm_lacks_is_found_before_anything_is_sent(
    host: PublishedHost, change: dict[str, str], found: str, fix: str
) -> None:
    host.guest(GUEST | change)
    with pytest.raises(UnusableInput) as refused:
        host.check(host.description())
    [_, where, mend] = str(refused.value).splitlines()
    assert found in where and fix in mend
    assert not (host.folder / "running").exists(), "the VM of the check has ended"


_TESTPMD = (("  type: vpp\n", "  type: testpmd\n"),)


def test_testpmd_in_the_vm_needs_nothing_of_vpp_and_no_hugepages_for_itself_here(host: PublishedHost) -> None:
    host.packages.clear()
    host.guest(GUEST | {"program": "/usr/bin/dpdk-testpmd", "python": "/usr/bin/python3", "memory": "100"})
    host.check(host.description(*_TESTPMD))
    calls = (host.folder / "calls").read_text()
    assert "create /dev/stdin" in calls, "the VM was looked into"


def test_what_testpmd_lacks_in_the_vm_is_found_before_anything_is_sent(host: PublishedHost) -> None:
    host.guest(GUEST | {"program": "", "python": "", "free": "255"})
    with pytest.raises(UnusableInput) as refused:
        host.check(host.description(*_TESTPMD))
    error_text = str(refused.value)
    for words in ("no program dpdk-testpmd", "apt-get install dpdk-dev", "no python3", "255 MB of free"):
        assert words in error_text
    assert "VPP" not in error_text and error_text.count("\n  fix: ") == 3


def test_a_host_without_a_plan_is_found_before_the_vm_is_started(host: PublishedHost) -> None:
    host.agent.findings = []
    with pytest.raises(UnusableInput, match=r"1 finding(.|\n)*no CPU plan(.|\n)*fix: set \[host\] pmd_cores"):
        host.check(host.description())
    assert "create" not in (host.folder / "calls").read_text()
    host.check(host.description(("  # policy: {numa_node: 0}", "  policy: {numa_node: 0}")))


def test_a_vm_without_a_shell_is_a_finding(host: PublishedHost) -> None:
    (host.folder / "guest").write_text("Welcome to the appliance\n")
    with pytest.raises(
        UnusableInput, match=r"ssh: .*'Welcome to the appliance(.|\n)*try it by hand: ssh root@"
    ):
        host.check(host.description())


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("Host key verification failed.", "ssh-keyscan -p 22022 127.0.0.1 >> "),
        ("root@127.0.0.1: Permission denied (publickey).", "ssh-copy-id -i "),
    ],
)
def test_a_vm_that_refuses_ssh(
    host: PublishedHost, monkeypatch: pytest.MonkeyPatch, words: str, fix: str
) -> None:
    monkeypatch.setattr("netplugin_zeroloss.matrix.checks._LOG_IN_S", 0.0)
    (host.folder / "refused").write_text(words)
    with pytest.raises(UnusableInput) as refused:
        host.check(host.description())
    assert words in str(refused.value) and fix in str(refused.value).splitlines()[-1]


def test_a_vm_that_does_not_start_is_a_finding_with_libvirts_words(host: PublishedHost) -> None:
    (host.folder / "image-lock").touch()
    with pytest.raises(UnusableInput, match=r"vm: .*Failed to get write lock\n  fix: look at libvirt"):
        host.check(host.description())


def test_the_vm_of_a_check_that_was_killed_is_removed(host: PublishedHost) -> None:
    (host.folder / "running").write_text("zeroloss-check\n")
    host.check(host.description())
    calls = [c for c in (host.folder / "calls").read_text().splitlines() if not c.startswith("list")]
    assert calls == ["shutdown zeroloss-check", "create /dev/stdin", "shutdown zeroloss-check"]


def test_the_vm_of_a_run_that_was_killed_is_looked_into_as_it_is(host: PublishedHost) -> None:
    (host.folder / "running").write_text("zeroloss-id\n")
    _no_pages(host)  # it has them
    host.check(host.description())
    assert "create" not in (host.folder / "calls").read_text()
