"""The steps of a plan: what each should be, whether it is done, and when it counts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from netplugin.tuning.command_line import PAGES
from netplugin.tuning.facts import Live, OvsLive
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.output.playbook import playbook
from netplugin.tuning.output.text import plan_json, plan_text
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.read.cpus import CPU
from netplugin.tuning.read.kernel import HALT_POLL
from netplugin.tuning.read.memory import HUGEPAGES_UNIT
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import (
    BannedCpus,
    BootPages,
    Effect,
    File,
    KernelArgument,
    OtherConfig,
    ServiceCpus,
    Swap,
    Sysctl,
    ThreadPriority,
    TunedProfile,
)
from tests.unit.tuning.golden import PLANS, arguments, ovs, plan_of, planned, step
from tests.unit.tuning.machines import MemoryRoot, load
from tests.unit.tuning.trees import tree


def test_settings_of_ovs_as_found_count_as_done() -> None:
    found = {
        "dpdk-init": "true",
        "pmd-cpu-mask": "2",
        "dpdk-socket-mem": "1264",
        "pmd-rxq-assign": "cycles",
        "userspace-tso-enable": "true",
        "per-port-memory": "false",
    }
    plan = planned("small", Live(ovs=OvsLive("2.15.3", None, True, found)), pmd_cores=1)
    keys = [s for s in plan.steps if isinstance(s.target, OtherConfig)]
    assert len(keys) == 6 and all(s.done for s in keys)
    newer = planned("small", Live(ovs=OvsLive("3.1.0", None, True, found)), pmd_cores=1)
    [left] = [s for s in newer.steps if isinstance(s.target, OtherConfig) and not s.done]
    assert (left.target, left.now, left.desired) == (
        OtherConfig("pmd-rxq-assign"),
        "cycles",
        "group",
    )


def test_what_takes_a_restart_of_ovs() -> None:
    plan = plan_of("small")
    effects = {s.target.key: s.effect for s in plan.steps if isinstance(s.target, OtherConfig)}
    assert effects == {
        "dpdk-init": Effect.OVS_RESTART,
        "pmd-cpu-mask": Effect.LIVE,
        "pmd-rxq-assign": Effect.LIVE,
        "dpdk-socket-mem": Effect.OVS_RESTART,
    }


def test_a_mask_that_pins_the_threads_of_ovs_goes() -> None:
    plan = planned("small", ovs(dpdk_lcore_mask="0x1"), pmd_cores=1)
    mask = step(plan, OtherConfig("dpdk-lcore-mask"))
    assert (mask.now, mask.desired, mask.effect) == ("0x1", None, Effect.OVS_RESTART)


def test_a_mask_of_ovs_that_is_none_is_unknown_and_not_done() -> None:
    live = Live(ovs=OvsLive("3.1.0", None, True, {"pmd-cpu-mask": "all"}))
    mask = step(planned("small", live, pmd_cores=1), OtherConfig("pmd-cpu-mask"))
    assert isinstance(mask.now, Unknown) and not mask.done


@pytest.mark.parametrize(
    ("version", "initialized", "silent", "extra", "desired"),
    [
        ("4.0.0", False, False, None, "-a 0000:00:00.0"),
        ("4.0.0", False, False, "--in-memory", "--in-memory -a 0000:00:00.0"),
        # It was true with the version before, and this one could not start.
        ("4.0.0", True, True, "--in-memory", "--in-memory -a 0000:00:00.0"),
        ("4.0.0", True, False, "--in-memory", None),
        ("4.0.0", False, False, "-a 0000:03:00.0", None),
        ("3.5.0", False, False, "--in-memory", None),
    ],
)
def test_a_device_is_listed_where_ovs_may_not_start_without(
    version: str, initialized: bool, silent: bool, extra: str | None, desired: str | None
) -> None:
    config = {} if extra is None else {"dpdk-extra": extra}
    silence = Unknown("ovs-vswitchd", "does not answer") if silent else None
    live = Live(ovs=OvsLive(version, None, initialized, config, silent=silence))
    steps = planned("small", live, pmd_cores=1).steps
    found = [s for s in steps if s.target == OtherConfig("dpdk-extra")]
    assert [(s.now, s.desired, s.effect) for s in found] == (
        [(extra, desired, Effect.OVS_RESTART)] if desired else []
    )


def test_a_host_without_ovs_dpdk() -> None:
    plan = planned("published", pmd_cores=0, vm_cores=4)
    assert not [s for s in plan.steps if isinstance(s.target, OtherConfig)]
    assert plan.partition.isolated == plan.partition.vm and not any(p.pages for p in plan.pages)


def test_real_time_asks_for_more() -> None:
    usual, realtime = (
        planned("published", pmd_cores=2),
        planned("published", pmd_cores=2, realtime=True),
    )
    extra = set(arguments(realtime)) - set(arguments(usual))
    assert extra == {
        "mce",
        "tsc",
        "intel_idle.max_cstate",
        "processor.max_cstate",
        "intel_pstate",
        "pcie_aspm.policy",
    }
    targets = {s.target for s in realtime.steps} - {s.target for s in usual.steps}
    assert {Swap(), Sysctl("kernel.sched_rt_runtime_us"), ThreadPriority("ksoftirqd")} <= targets
    assert ThreadPriority("rcuc") not in targets  # this kernel has no such threads
    assert step(realtime, TunedProfile()).desired == "realtime-virtual-host"
    assert step(realtime, Swap()).now == "/dev/dm-1"


def test_a_cpu_polls_while_it_idles_only_where_it_has_no_sibling() -> None:
    for machine, idle_siblings in (("published", False), ("published", True), ("amd-nps4", True)):
        plan = planned(machine, pmd_cores=1, realtime=True, idle_siblings=idle_siblings)
        assert "idle" not in arguments(plan) and arguments(plan)["processor.max_cstate"] == "1"
    alone = arguments(planned("edge", pmd_cores=1, realtime=True))
    assert alone["idle"] == "poll" and "processor.max_cstate" not in alone


def test_amd_has_its_own_arguments() -> None:
    found = arguments(planned("amd-4-nodes", pmd_cores=1, realtime=True))
    assert found["iommu"] == "pt" and "amd_iommu" not in found
    off = replace(load("amd-4-nodes"), cmdline="ro amd_iommu=fullflush,off")
    plan = make_plan(read_facts(MemoryRoot(tree(off))), HostIntent(pmd_cores=1))
    gone = step(plan, KernelArgument("amd_iommu"))
    assert (gone.now, gone.desired, gone.done) == ("fullflush,off", None, False)
    assert "intel_iommu" not in found and "intel_pstate" not in found
    for release, has in (("6.0.12", False), ("6.1.0", True)):
        newer = replace(load("amd-4-nodes"), release=release)
        plan = make_plan(read_facts(MemoryRoot(tree(newer))), HostIntent(pmd_cores=1, realtime=True))
        assert ("amd_pstate" in arguments(plan)) is has, release


def test_arm_has_arguments_of_its_own_and_none_of_x86() -> None:
    found = arguments(planned("arm", pmd_cores=2, realtime=True, vm_memory_mb=4096))
    assert found["iommu.passthrough"] == "1" and found["hugepagesz"] == "512M"
    x86 = {
        "iommu",
        "mce",
        "tsc",
        "idle",
        "processor.max_cstate",
        "pcie_aspm.policy",
        "intel_pstate",
    }
    assert not x86 & set(found) and found["isolcpus"]


@pytest.mark.parametrize(
    ("now", "idle_siblings", "desired"),
    [(200000, False, "0"), (200000, True, "200000"), (0, True, "200000"), (50000, True, "50000")],
)
def test_a_halted_vcpu_polls_where_it_has_its_core_to_itself(
    now: int, idle_siblings: bool, desired: str
) -> None:
    facts = read_facts(MemoryRoot(tree(replace(load("published"), halt_poll_ns=now))))
    plan = make_plan(facts, HostIntent(pmd_cores=1, realtime=True, idle_siblings=idle_siblings))
    assert step(plan, File(HALT_POLL)).desired == desired
    usual = make_plan(facts, HostIntent(pmd_cores=1))
    assert File(HALT_POLL) not in {s.target for s in usual.steps}


def test_threads_have_the_priorities_of_tuned_s_profile() -> None:
    plan = planned("edge", pmd_cores=1, realtime=True)
    found = {s.target.threads: s.desired for s in plan.steps if isinstance(s.target, ThreadPriority)}
    assert found == {"ksoftirqd": "2", "ktimers": "2", "rcuc": "4", "rcub": "4"}


def test_irqbalance_leaves_isolated_cpus_alone() -> None:
    target = BannedCpus("/etc/default/irqbalance")
    banned = step(planned("edge", pmd_cores=1), target)
    assert (banned.now, banned.desired, banned.effect) == (None, "1,3-7", Effect.LIVE)
    reported = {"/etc/default/irqbalance": 'IRQBALANCE_BANNED_CPULIST="1,3-5,6,7"\n'}
    facts = read_facts(MemoryRoot(tree(replace(load("edge"), irqbalance=reported))))
    assert step(make_plan(facts, HostIntent(pmd_cores=1)), target).done
    # The older mask goes before the list.
    reported = {"/etc/default/irqbalance": "IRQBALANCE_BANNED_CPUS=2\nIRQBALANCE_BANNED_CPULIST=1,3-7\n"}
    facts = read_facts(MemoryRoot(tree(replace(load("edge"), irqbalance=reported))))
    assert step(make_plan(facts, HostIntent(pmd_cores=1)), target).now == "1"
    assert not [s for s in planned("small", pmd_cores=1).steps if isinstance(s.target, BannedCpus)]


def test_services_start_on_housekeeping() -> None:
    affinity = step(planned("edge", pmd_cores=1), ServiceCpus())
    assert (affinity.now, affinity.desired, affinity.effect) == (None, "0", Effect.REBOOT)
    files = {
        "/etc/systemd/system.conf": "[Manager]\n#CPUAffinity=1\nCPUAffinity=1 2\n",
        "/etc/systemd/system.conf.d/50-a.conf": "[Manager]\nCPUAffinity=3,4\n",
    }
    for last, now in (("", "1-4"), ("CPUAffinity=\nCPUAffinity=0\n", "0")):
        more = files | {"/etc/systemd/system.conf.d/90-b.conf": f"[Manager]\n{last}"}
        facts = read_facts(MemoryRoot(tree(replace(load("edge"), system_conf=more))))
        assert step(make_plan(facts, HostIntent(pmd_cores=1)), ServiceCpus()).now == now


def test_every_step_has_a_source() -> None:
    for name in PLANS:
        plan = plan_of(name)
        assert all(s.source for s in plan.steps), name
        text = plan_text(plan, explain=True)
        shown = [line for line in text.splitlines() if line.startswith("  [")]
        assert text.count("\n      source: ") == len(shown)
        assert "source" not in plan_text(plan)
        assert set(json.loads(plan_json(plan))["sources"]) >= {"hugepages", "PMD cores by node"}


@pytest.mark.parametrize(
    ("release", "isolcpus", "hugepages"),
    [
        ("3.10.0-957.el7.x86_64", "1-31,33-63", None),
        ("5.14.0", "managed_irq,domain,1-31,33-63", None),
        ("5.15.0", "managed_irq,domain,1-31,33-63", None),
        ("5.16.0", "managed_irq,domain,1-31,33-63", "0:2,1:2"),
    ],
)
def test_arguments_that_a_kernel_must_know(release: str, isolcpus: str, hugepages: str | None) -> None:
    """Before 5.16 the command line cannot count hugepages by node, and a unit does at boot."""
    facts = read_facts(MemoryRoot(tree(replace(load("published"), release=release))))
    plan = make_plan(facts, HostIntent(pmd_cores=15, emulator_cores=0, vm_cores=14))
    assert arguments(plan).get("hugepages") == hugepages
    at_boot = [s.desired for s in plan.steps if isinstance(s.target, BootPages)]
    assert at_boot == ([] if hugepages else ["0:2,1:2"])
    assert arguments(plan)["isolcpus"] == isolcpus.replace("1-31,33-63", "1-15,17-31,33-47,49-63")


def test_a_number_of_pages_goes_where_it_would_count_pages_of_another_size() -> None:
    """8192 pages of 2 MB would be 8192 of 1 GB with the new default size."""
    machine = replace(load("published"), release="5.15.0", cmdline="ro hugepages=8192")
    intent = HostIntent(pmd_cores=15, emulator_cores=0, vm_cores=14)
    plan = make_plan(read_facts(MemoryRoot(tree(machine))), intent)
    assert arguments(plan)["default_hugepagesz"] == "1G"
    gone = step(plan, KernelArgument("hugepages"))
    assert (gone.now, gone.desired) == ("8192", None)
    tasks = yaml.safe_load(playbook(plan, machine.online))[0]["tasks"]
    named = {task["name"]: task for task in tasks}
    given = named["Name the kernel's arguments, and in any spelling what they replace"][
        "ansible.builtin.set_fact"
    ]
    assert "hugepages" in given["netplugin_names"]
    assert not any(word.startswith("hugepages=") for word in given["netplugin_words"])
    for line in ("ro", "hugepagesz=2M hugepages=8192", "default_hugepagesz=1G hugepages=4"):
        kept = make_plan(read_facts(MemoryRoot(tree(replace(machine, cmdline=line)))), intent)
        assert "hugepages" not in arguments(kept)


def test_the_unit_that_reserves_hugepages_at_boot_counts_as_done() -> None:
    made = tree(load("amd-nps4"))
    at = "/sys/devices/system/node/node{}/hugepages/hugepages-1048576kB/nr_hugepages"
    lines = [f"w {at.format(node)} - - - - {pages}" for node, pages in ((4, 29), (5, 13), (6, 29))]
    made.files["/etc/tmpfiles.d/netplugin-tuning.conf"] = "\n".join(["# x", "w /a - - - - 1", *lines])
    _, intent = PLANS["amd-nps4"]
    plan = make_plan(read_facts(MemoryRoot(made)), intent)
    assert step(plan, BootPages(1048576)).now is None, "the unit is not enabled"
    made.links[f"/etc/systemd/system/sysinit.target.wants/{HUGEPAGES_UNIT}"] = f"../{HUGEPAGES_UNIT}"
    plan = make_plan(read_facts(MemoryRoot(made)), intent)
    assert step(plan, BootPages(1048576)).done


@pytest.mark.parametrize(
    "line",
    [
        "isolcpus=managed_irq,domain,1,1 nohz_full=1-1 rcu_nocbs=1",
        "isolcpus=domain,managed_irq,1-N isolcpus=0 nohz-full=1 irqaffinity=0",
        "isolcpus=9 isolcpus=managed_irq,1 isolcpus=domain,1 nohz_full=1",
    ],
)
def test_a_list_of_cpus_on_the_command_line_counts_however_it_is_written(line: str) -> None:
    made = tree(replace(load("small"), cmdline=line, isolated="1"))
    made.files[f"{CPU}/nohz_full"] = "1"
    plan = make_plan(read_facts(MemoryRoot(made)), HostIntent(pmd_cores=1))
    for name in ("isolcpus", "nohz_full", "rcu_nocbs"):
        assert step(plan, KernelArgument(name)).done, name


@pytest.mark.parametrize(
    ("line", "isolated", "now"),
    [
        ("isolcpus=managed_irq,domain,1", "", "managed_irq,1"),  # the kernel has refused the other half
        ("isolcpus=managed_irq,domain,1", None, "managed_irq,domain,1"),
        ("isolcpus=1", "1", "1"),
        ("ro", "1", "1"),  # it was built with that argument
        ("isolcpus=2-9", "", None),
        ("isolcpus=2-9", None, None),
    ],
)
def test_what_the_kernel_has_goes_before_what_is_written(
    line: str, isolated: str | None, now: str | None
) -> None:
    made = tree(replace(load("small"), cmdline=line, isolated=isolated or ""))
    if isolated is None:
        del made.files[f"{CPU}/isolated"]
    plan = make_plan(read_facts(MemoryRoot(made)), HostIntent(pmd_cores=1))
    assert step(plan, KernelArgument("isolcpus")).now == now
    assert step(plan, KernelArgument("nohz_full")).now is None


@pytest.mark.parametrize(
    ("line", "now", "done"),
    [
        # Of the words each is as planned, and the kernel reserves no page of 1 GB.
        ("default_hugepagesz=1G hugepagesz=2M hugepages={} hugepagesz=1G", ("1G", "1G", None), False),
        ("hugepages={} hugepagesz=1G", (None, "1G", None), False),
        ("default_hugepagesz=1G hugepagesz=1G hugepages=9:{}", ("1G", "1G", None), False),
        (
            "hugepagesz=1G hugepages={} hugepagesz=2M hugepages=512 default_hugepagesz=1G",
            ("1G", "1G", "{}"),
            True,
        ),
        ("default-hugepagesz=1024M hugepages={}", ("1G", "1G", "{}"), True),
        ("hugepages=0:{} default_hugepagesz=1G", ("1G", "1G", "{}"), True),
        ("hugepagesz=1G hugepages={} default_hugepagesz=2M", ("2M", "1G", "{}"), False),
    ],
)
def test_pages_are_those_that_the_kernel_reserves(line: str, now: tuple[str | None, ...], done: bool) -> None:
    machine, intent = PLANS["edge"]
    planned = str(arguments(plan_of("edge"))["hugepages"])
    assert planned.isdecimal() and arguments(plan_of("edge"))["hugepagesz"] == "1G"
    made = tree(replace(load(machine), cmdline=line.format(planned)))
    plan = make_plan(read_facts(MemoryRoot(made)), intent, ovs(per_port_memory="true"))
    found = [step(plan, KernelArgument(name)) for name in PAGES]
    assert all(each.done for each in found) is done
    desired = (value and value.format(planned) for value in now)
    # Pages of the other size stay as they are: the plan leaves room for them.
    assert [
        str(each.now).partition(" hugepagesz=2M")[0].partition("hugepagesz=2M")[0] or "None" for each in found
    ] == [str(value) for value in desired]


def test_pages_of_another_size_stay() -> None:
    machine, intent = PLANS["intel-snc"]
    line = "hugepagesz=2M hugepages=0:512,3:7 hugepagesz=1G hugepages=4"
    plan = make_plan(read_facts(MemoryRoot(tree(replace(load(machine), cmdline=line)))), intent, ovs())
    pages = step(plan, KernelArgument("hugepages"))
    assert pages.now == "0:1,1:1,2:1,3:1 hugepagesz=2M hugepages=0:512,3:7"
    assert pages.desired and pages.desired.endswith(" hugepagesz=2M hugepages=0:512,3:7") and not pages.done


def test_other_words_of_an_argument_do_not_make_it_undone() -> None:
    line = "iommu=force iommu=pt intel-iommu=on,sm_on mce=no_cmci"
    made = tree(replace(load("published"), cmdline=line))
    plan = make_plan(read_facts(MemoryRoot(made)), HostIntent(pmd_cores=2, realtime=True))
    assert step(plan, KernelArgument("iommu")).done and step(plan, KernelArgument("intel_iommu")).done
    assert step(plan, KernelArgument("mce")).now == "no_cmci"


def test_interrupts_leave_isolated_cpus_and_stay_near() -> None:
    plan = planned("published", pmd_cores=2)
    files = {s.target.path: s for s in plan.steps if isinstance(s.target, File)}
    assert files["/proc/irq/40/smp_affinity_list"].desired == "0,32"
    # One that has isolated CPUs alone goes to the housekeeping of their node.
    assert plan.partition.near(frozenset((20, 21))) == {16, 48}
    assert plan.partition.near(frozenset((99,))) == {0, 16, 32, 48}
    assert not files["/proc/irq/40/smp_affinity_list"].target.lasting  # type: ignore[union-attr]
    assert files["/proc/irq/default_smp_affinity"].desired == "10001,00010001"
