"""Facts are read from whole trees, in the forms that kernels have."""

from __future__ import annotations

import errno
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netplugin.host.cpus import from_kernel, to_kernel
from netplugin.tuning.command_line import CommandLine
from netplugin.tuning.facts import Core, Facts, HugepagePool, Limit
from netplugin.tuning.output.text import as_json
from netplugin.tuning.read import read_facts
from netplugin.tuning.read.kernel import LOADER_INFO, STUB_INFO, read_kernel
from netplugin.tuning.root import Root, Unknown, known
from tests.unit.tuning.golden import facts_of
from tests.unit.tuning.machines import NAMES, MemoryRoot, load
from tests.unit.tuning.trees import tree

#: As a tree has it: attributes of 4 bytes, and UTF-16.
BY_GRUB = {"/proc/cmdline": "BOOT_IMAGE=/vmlinuz ro"}


def efi(text: str) -> str:
    """A variable of the firmware with this text, as the kernel has it: attributes, then UTF-16."""
    return "\6\0\0\0" + f"{text}\0".encode("utf-16-le").decode()


def range_set(*ranges: tuple[int, int]) -> frozenset[int]:
    return frozenset(cpu for first, last in ranges for cpu in range(first, last + 1))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_whole_machine_is_unknown(name: str) -> None:
    assert facts_of(name).unknown() == ()


def test_a_tree_on_a_disk_reads_as_in_memory(tmp_path: Path) -> None:
    made = tree(load("small"))
    made.write(tmp_path)
    assert read_facts(Root(tmp_path)) == facts_of("small")


def test_the_published_host() -> None:
    facts = facts_of("published")
    cores = facts.cpus.cores
    assert isinstance(cores, tuple) and len(cores) == 32
    assert cores[1] == Core(node=0, package=0, cpus=frozenset((1, 33)))
    assert cores[31] == Core(node=1, package=1, cpus=frozenset((31, 63)))
    assert facts.cpus.online == range_set((0, 63))
    assert (facts.cpus.smt, facts.cpus.isolated, facts.cpus.nohz_full) == (
        True,
        frozenset(),
        frozenset(),
    )
    assert isinstance(facts.cpus.caches, tuple)
    assert {c.cpus for c in facts.cpus.caches if c.level == 3} == {
        range_set((0, 15), (32, 47)),
        range_set((16, 31), (48, 63)),
    }
    nics = facts.network.nics
    assert isinstance(nics, tuple)
    assert [(n.address, n.node, n.driver, n.interfaces) for n in nics] == [
        ("0000:1a:00.0", 0, "igb", ("eno1",)),
        ("0000:3b:00.0", 0, "mlx5_core", ("ens1f0np0",)),
        ("0000:3b:00.1", 0, "mlx5_core", ("ens1f1np1",)),
    ]
    assert (facts.power.turbo, facts.power.intel_pstate, facts.power.idle_driver) == (
        True,
        "passive",
        "intel_idle",
    )
    assert (facts.iommu.groups, facts.iommu.types) == (96, ("DMA-FQ",))
    assert facts.memory.swaps == ("/dev/dm-1",)
    assert facts.memory.sizes_kb == (2048, 1048576)
    assert facts.interrupts.default_affinity == range_set((0, 63))


def test_the_amd_machine() -> None:
    facts = facts_of("amd-4-nodes")
    assert facts.cpus.offline == {47}
    assert (facts.power.amd_pstate, facts.power.intel_pstate, facts.power.turbo) == ("disable", None, True)
    assert isinstance(facts.cpus.cores, tuple)
    assert facts.cpus.cores[23] == Core(node=3, package=0, cpus=frozenset((23,)))
    assert isinstance(facts.kernel.arguments, CommandLine)
    assert facts.kernel.arguments.value("isolcpus") == "13-15,36-40"
    [bond] = facts.network.bonds
    assert (bond.mode, bond.hash_policy, bond.members) == (
        "802.3ad",
        "layer2",
        ("ens2f0", "ens2f1"),
    )
    assert isinstance(facts.network.interfaces, tuple)
    interfaces = {i.name: i for i in facts.network.interfaces}
    assert set(interfaces) == {"bond0", "eno8303", "ens2f0", "ens2f1"}
    assert interfaces["ens2f0"].master == "bond0"
    assert interfaces["bond0"].lowers == ("ens2f0", "ens2f1")
    assert (interfaces["ens2f0"].speed_mbps, interfaces["ens2f0"].rx_queues) == (25000, 24)
    assert facts.kernel.tuned.isolated_cores == {"cpu-partitioning": "13-15,36-40"}  # type: ignore[union-attr]
    assert facts.limits == (
        Limit("/system.slice", range_set((0, 35)), None, {}),
        Limit("/machine.slice", None, None, {"1GB": 8 << 30}),
    )
    # VFs are counted at their NIC and are none themselves.
    assert isinstance(facts.network.nics, tuple)
    assert [(nic.address, nic.vfs) for nic in facts.network.nics] == [
        ("0000:41:00.0", None),
        ("0000:a1:00.0", 4),
        ("0000:a1:00.1", 0),
    ]


def test_the_small_machine_lacks_much_and_reports_it_as_none() -> None:
    facts = facts_of("small")
    assert (facts.cpus.smt, facts.power.turbo, facts.kernel.tuned) == (None, None, None)
    assert facts.power.policies == () and facts.iommu.groups == 0
    assert isinstance(facts.network.nics, tuple) and isinstance(facts.network.interfaces, tuple)
    assert facts.network.nics[0].node is None
    assert facts.network.nics[0].interfaces == ("ens3",)
    assert facts.network.interfaces[0].speed_mbps is None


def test_a_kernel_without_numa_has_one_node() -> None:
    machine = tree(load("small"))
    gone = ("/system/node/", "/mm/hugepages/")
    machine.files = {p: t for p, t in machine.files.items() if not any(g in p for g in gone)}
    machine.files["/proc/meminfo"] = "MemTotal:        4019360 kB\nMemFree:         2009680 kB\n"
    facts = read_facts(MemoryRoot(machine))
    assert facts.cpus.cores == facts_of("small").cpus.cores
    assert facts.memory.nodes == facts_of("small").memory.nodes
    assert facts.memory.pools == ()
    at = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    machine.files |= {f"{at}/nr_hugepages": "7\n", f"{at}/free_hugepages": "5\n"}
    pool = HugepagePool(0, 2048, f"{at}/nr_hugepages", 7, 5)
    assert read_facts(MemoryRoot(machine)).memory.pools == (pool,)


@pytest.mark.parametrize(
    ("version", "reported", "realtime"),
    [
        ("Linux version 6.1.0-rt #1 SMP PREEMPT_RT Debian", None, True),
        ("Linux version 3.10.0 #1 SMP PREEMPT RT Tue", None, True),
        ("Linux version 6.1.0 #1 SMP PREEMPT_DYNAMIC", None, False),
        ("Linux version 6.1.0 #1 SMP", "1", True),
    ],
)
def test_preempt_rt(version: str, reported: str | None, realtime: bool) -> None:
    made = tree(replace(load("small"), version=version))
    if reported:
        made.files["/sys/kernel/realtime"] = reported
    assert read_facts(MemoryRoot(made)).kernel.realtime is realtime


def test_groups_of_the_process_and_those_above_it_limit() -> None:
    made = tree(load("small"))
    at = "/sys/fs/cgroup/user.slice/user-0.slice"
    made.files |= {f"{at}/cpuset.cpus.effective": "0\n", f"{at}/memory.max": "1073741824\n"}
    [limit] = read_facts(MemoryRoot(made)).limits
    assert limit == Limit("/user.slice/user-0.slice", frozenset((0,)), 1 << 30, {})


def test_groups_of_version_1() -> None:
    made = tree(load("small"))
    made.files["/proc/self/cgroup"] = "4:memory:/box\n3:cpuset:/box\n1:cpu,cpuacct:/\n0::/\n"
    made.files["/sys/fs/cgroup/cpuset/box/cpuset.effective_cpus"] = "1\n"
    made.files["/sys/fs/cgroup/memory/box/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert read_facts(MemoryRoot(made)).limits == (Limit("/box", frozenset((1,)), None, {}),)


# -- the parts -----------------------------------------------------------------------------------


def test_as_json_has_lists_of_cpus_and_reasons() -> None:
    facts: Facts = facts_of("published")
    shown = as_json(replace(facts, iommu=replace(facts.iommu, groups=Unknown("/x", "is odd"))))
    assert shown["cpus"]["online"] == "0-63"
    assert shown["cpus"]["cores"][1] == {"node": 0, "package": 0, "cpus": "1,33", "kind": "performance"}
    assert shown["iommu"]["groups"] == {"unknown": "is odd", "path": "/x"}
    assert shown["kernel"]["arguments"][-1] == "quiet"
    assert shown["kernel"]["sysctls"]["vm.stat_interval"] == "1"


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_mask_comes_back(cpus: set[int]) -> None:
    assert from_kernel(to_kernel(cpus)) == cpus


def test_masks_as_the_kernel_has_them() -> None:
    assert to_kernel({0, 16, 32, 48}) == "10001,00010001"
    assert to_kernel(range(64, 65)) == "1,00000000,00000000"
    assert to_kernel(()) == "0"
    assert from_kernel("0000ffff,00000000") == range_set((32, 47))


@pytest.mark.parametrize(
    ("files", "loader"),
    [
        ({}, None),
        ({"/etc/default/grub": "", "/boot/loader/entries/a.conf": ""}, None),
        ({"/boot/grub/grub.cfg": "linux /vmlinuz # no blscfg"}, "grub"),
        ({"/boot/grub2/grub.cfg": "insmod blscfg\nblscfg\n"}, "grub-entries"),
        ({LOADER_INFO: efi("systemd-boot 252.22"), "/boot/grub/grub.cfg": "blscfg"}, "systemd-boot"),
        # grub says so itself, or the kernel says that it came after another one.
        ({LOADER_INFO: efi("GRUB 2.12"), "/boot/grub/grub.cfg": ""}, "grub"),
        ({LOADER_INFO: efi("rEFInd 0.14.2"), "/boot/grub/grub.cfg": "", **BY_GRUB}, "grub"),
        ({LOADER_INFO: efi("rEFInd 0.14.2"), "/boot/grub/grub.cfg": ""}, None),
        ({LOADER_INFO: efi("Limine 8.6.0"), "/boot/grub2/grub.cfg": "blscfg\n"}, None),
        ({STUB_INFO: efi("systemd-stub 255.4"), "/boot/grub/grub.cfg": ""}, None),
        (
            {LOADER_INFO: efi("GRUB 2.12"), STUB_INFO: efi("systemd-stub 255.4"), "/boot/grub/grub.cfg": ""},
            None,
        ),
    ],
)
def test_the_boot_loader_that_started_the_machine(files: dict[str, str], loader: str | None) -> None:
    made = tree(load("small"))
    made.files |= {"/proc/cmdline": "ro quiet"} | files
    assert read_kernel(MemoryRoot(made)).boot_loader == loader


def test_a_boot_loader_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "boot/grub/grub.cfg").mkdir(parents=True)
    assert isinstance(read_kernel(Root(tmp_path)).boot_loader, Unknown)


@pytest.mark.parametrize("error", [errno.EBUSY, None])
def test_the_frequency_of_cpus_that_are_off_line_has_no_policy(error: int | None) -> None:
    """As after ``echo off > smt/control``: the files stay."""
    small = load("amd-4-nodes")
    machine = tree(replace(small, cpufreq={"driver": "acpi-cpufreq", "governor": "performance"}))
    away = f"/sys/devices/system/cpu/cpufreq/policy{min(small.present - small.online)}"
    machine.files |= {f"{away}/affected_cpus": "\n", f"{away}/scaling_governor": "\n"}
    facts = read_facts(MemoryRoot(machine, {away: error} if error else None))
    assert isinstance(facts.power.policies, tuple)
    assert {cpu for p in facts.power.policies for cpu in known(p.cpus, ())} == small.online
    assert facts.unknown() == ()


@pytest.mark.parametrize(
    ("name", "missing"),
    [("arm", r"/cache/index\d/size$"), ("small", "^/proc/swaps$"), ("published", "no_turbo$")],
)
def test_what_some_kernels_lack_is_not_unknown(name: str, missing: str) -> None:
    """Sizes of caches that firmware does not tell, swap, and turbo while intel_pstate is off."""
    machine = tree(load(name))
    lost = {path for path in machine.files if re.search(missing, path)}
    machine.files = {path: text for path, text in machine.files.items() if path not in lost}
    refused = {}
    if name == "published":
        machine.files |= dict.fromkeys(lost, "0\n")
        machine.files["/sys/devices/system/cpu/intel_pstate/status"] = "off\n"
        refused = dict.fromkeys(lost, errno.EAGAIN)
    assert lost and read_facts(MemoryRoot(machine, refused)).unknown() == ()


@pytest.mark.parametrize("port", ["pf0vf0", "pf1sf88", "c1pf0vf3"])
def test_a_representor_is_a_port_of_a_vm_and_not_an_uplink(port: str) -> None:
    """mlx5 and ice have it below the PF's device."""
    machine = tree(load("published"))
    [at] = [path.removesuffix("mtu") for path in machine.files if path.endswith("/ens1f0np0/mtu")]
    rep = at.replace("ens1f0np0", "rep0")
    machine.files |= {
        f"{at}phys_port_name": "p0\n",
        f"{rep}mtu": "1500\n",
        f"{rep}phys_port_name": f"{port}\n",
    }
    machine.links["/sys/class/net/rep0"] = f"../..{rep.removeprefix('/sys').rstrip('/')}"
    network = read_facts(MemoryRoot(machine)).network
    assert [
        n for nic in known(network.nics, ()) for n in nic.interfaces if n.startswith(("rep", "ens1f0"))
    ] == ["ens1f0np0"]
    assert "rep0" in {one.name for one in known(network.interfaces, ())}
