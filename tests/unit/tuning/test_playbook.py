"""A playbook has every step of its plan, in modules that every Ansible has."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jinja2
import pytest
import yaml
from packaging.version import Version

from netplugin.host.cpus import parse_list, to_kernel
from netplugin.tuning.guest.plan import guest_text, plan_guest
from netplugin.tuning.guest.playbook import guest_playbook
from netplugin.tuning.guest.settings import GuestOptions
from netplugin.tuning.output.playbook import playbook
from netplugin.tuning.read import read_facts
from netplugin.tuning.read.kernel import read_kernel
from netplugin.tuning.read.network import PCI
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import (
    BannedCpus,
    BootPages,
    Effect,
    File,
    Group,
    KernelArgument,
    OtherConfig,
    ServiceCpus,
    Step,
    Swap,
    Sysctl,
    Target,
    ThreadPriority,
    TunedProfile,
    TunedVariable,
    VfCount,
)
from tests.unit.tuning.golden import OVS, PLANS, plan_of
from tests.unit.tuning.machines import MemoryRoot, load
from tests.unit.tuning.trees import tree


def tasks(name: str) -> list[dict[str, Any]]:
    [play] = yaml.safe_load(playbook(plan_of(name), load(PLANS[name][0]).online))
    return [*play["tasks"], *play["handlers"]]


@pytest.mark.parametrize("name", PLANS)
def test_a_playbook_has_every_step_in_builtin_modules(name: str) -> None:
    found = tasks(name)
    for task in found:
        modules = [key for key in task if "." in key]
        assert len(modules) == 1 and modules[0].startswith("ansible.builtin."), task
    text = str(found)
    for step in plan_of(name).steps:
        assert _name(step.target) in text, step
        # Those of boot are counts by node, and in the file as lines of their own.
        assert step.desired is None or step.desired in text or isinstance(step.target, BootPages), step


def _name(target: Target) -> str:
    match target:
        case File(path):
            return f"{path} - - - - "
        case Sysctl(name) | KernelArgument(name) | TunedVariable(_, name):
            return name
        case OtherConfig(key):
            return key
        case ThreadPriority(threads):
            return threads
        case TunedProfile():
            return "tuned-adm"
        case Swap():
            return "swapoff"
        case VfCount(address):
            return f"{address}/sriov_numvfs"
        case BannedCpus(path):
            return path
        case ServiceCpus():
            return "CPUAffinity="
        case BootPages():
            return "netplugin-hugepages.service"


@pytest.mark.parametrize("name", PLANS)
def test_lines_are_no_longer_than_ansible_lint_has_them(name: str) -> None:
    text = playbook(plan_of(name), load(PLANS[name][0]).online)
    assert [line for line in text.splitlines() if len(line) > 160] == []


def test_a_playbook_asks_for_a_restart_and_takes_none() -> None:
    found = tasks("published-realtime")
    assert not [t for t in found if "ansible.builtin.reboot" in t or "ansible.builtin.service" in t]
    assert (
        "after a reboot"
        in found[[t["name"] for t in found].index("Say what is left to do")]["ansible.builtin.debug"]["msg"]
    )


def test_hugepages_that_the_command_line_cannot_count_are_there_before_ovs() -> None:
    found = tasks("amd-nps4")
    [unit] = [t for t in found if t["name"] == "Reserve hugepages at boot, before OVS starts"]
    text = unit["ansible.builtin.copy"]["content"]
    [before] = [line for line in text.splitlines() if line.startswith("Before=")]
    assert {"ovs-vswitchd.service", "libvirtd.service"} <= set(before.removeprefix("Before=").split())
    assert "/etc/tmpfiles.d/netplugin-tuning.conf" in text
    assert not any("Reserve hugepages" in t["name"] for t in tasks("intel-snc"))


def test_parameters_of_a_module_are_there_when_it_is_loaded() -> None:
    """systemd-tmpfiles may run before kvm is loaded, and then has nothing to write to."""
    [task] = [t for t in tasks("edge") if t["name"].startswith("Set parameters of modules")]
    copied = task["ansible.builtin.copy"]
    assert copied["dest"] == "/etc/modprobe.d/netplugin-tuning.conf"
    assert copied["content"].splitlines()[1:] == ["options kvm halt_poll_ns=200000"]
    assert "/sys/module/kvm/parameters/halt_poll_ns - - - - 200000" in str(tasks("edge"))
    # What an older plan had set there is gone with it.
    [none] = [t for t in tasks("intel-snc") if "modules" in t["name"]]
    assert none["ansible.builtin.file"] == {"path": copied["dest"], "state": "absent"}


def test_what_may_stop_a_playbook_comes_before_all_that_changes() -> None:
    """A handler that was notified before a task fails is not run, and not notified by the next run."""
    found = tasks("edge")
    stops = [i for i, task in enumerate(found) if "ansible.builtin.assert" in task]
    reads = {f"ansible.builtin.{module}" for module in ("slurp", "find", "assert", "command")}
    before = found[: max(stops) + 1]
    assert len(stops) == 3 and all(reads & task.keys() for task in before)
    assert all(t.get("changed_when", False) is False and "notify" not in t for t in before)


def holds(task: dict[str, Any], registered: dict[str, Any]) -> bool:
    """Whether an assert task lets a play go on; Ansible's filters as far as this one needs them."""
    env = jinja2.Environment()
    env.filters["b64decode"] = lambda text: base64.b64decode(text).decode()
    env.filters["regex_findall"] = lambda text, pattern, multiline: re.findall(pattern, text, re.M)
    env.filters["regex_replace"] = lambda text, old, new: re.sub(old, new, text)
    env.filters["regex_search"] = lambda text, pattern, group: re.findall(pattern, text)[:1]
    env.tests["version"] = lambda one, other, _: Version(one) >= Version(other)
    named = {name: env.from_string(text).render(registered) for name, text in task["vars"].items()}
    conditions = task["ansible.builtin.assert"]["that"]
    return all(env.compile_expression(each)(**registered, **named) for each in conditions)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize(
    ("version", "mask", "heeded"),
    [
        ("1.9.2", "", True),
        ("1.8.0", "'00000000,{mask}'", True),
        ("1.7.0", "", False),
        ("1.7.0", "{mask}", True),
        ("1.9.2", "2", False),
        ("1.7.0", "2", False),
        ("1.9.2", "0", False),
    ],
)
def test_irqbalance_heeds_a_mask_of_these_cpus_or_from_1_8_the_list(
    version: str, mask: str, heeded: bool
) -> None:
    [task] = [t for t in tasks("edge") if t["name"] == "Stop where irqbalance would not heed the list"]
    [banned] = [s for s in plan_of("edge").steps if isinstance(s.target, BannedCpus)]
    desired = to_kernel(parse_list(str(banned.desired))).rjust(8, "0")
    text = f"IRQBALANCE_BANNED_CPUS={mask.format(mask=desired)}\n" if mask else "# nothing\n"
    registered = {
        "netplugin_irqbalance": {"stdout": f"irqbalance version {version}"},
        "netplugin_banned": {"content": base64.b64encode(text.encode()).decode()},
    }
    assert holds(task, registered) is heeded


def test_a_setting_of_ovs_that_should_go_is_removed() -> None:
    [task] = [t for t in tasks("intel-snc") if t["name"] == "Remove from other_config of OVS"]
    assert task["loop"] == ["dpdk-lcore-mask"]
    assert not any("Remove from" in t["name"] for t in tasks("small"))


def test_handlers_that_are_notified_exist() -> None:
    found = tasks("published-realtime")
    names = {task["name"] for task in found}
    assert {task["notify"] for task in found if "notify" in task} <= names


def test_ovs_of_the_golden_plans_is_asked() -> None:
    assert not any(
        isinstance(s.now, Unknown) for name in PLANS for s in plan_of(name).steps
    ) and not isinstance(OVS.ovs, Unknown)


# -- text of others ------------------------------------------------------------------------------


#: Would run a command where the playbook is played, as one of the three things that begin a template.
HOSTILE = "{{ lookup('pipe', 'touch owned') }}{% if x %}{# #}\n- name: \"x\" & !!python/name:os.system"


class Unsafe(str):
    """A scalar with the tag that Ansible does not evaluate."""


class Loader(yaml.SafeLoader):
    pass


Loader.add_constructor("!unsafe", lambda loader, node: Unsafe(loader.construct_scalar(node)))


def scalars(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for each in value:
            yield from scalars(each)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("name", ["published-realtime", "amd-nps4", "small"])
def test_every_value_of_a_step_is_data(name: str) -> None:
    plan = plan_of(name)
    steps = tuple(replace(step, desired=None if step.desired is None else HOSTILE) for step in plan.steps)
    steps = tuple(s for s in steps if not isinstance(s.target, BannedCpus))  # its list is parsed
    targets = (
        File(f"/sys/{HOSTILE}"),
        File(f"/sys/{HOSTILE}", lasting=False),
        VfCount(HOSTILE),
        OtherConfig(HOSTILE),
        Sysctl(HOSTILE),
        KernelArgument(HOSTILE),
        TunedVariable(HOSTILE, HOSTILE),
    )
    steps += tuple(Step(Group.OVS, each, None, HOSTILE, Effect.LIVE, "", "") for each in targets)
    steps += (Step(Group.OVS, OtherConfig(HOSTILE), None, None, Effect.LIVE, "", ""),)
    found = list(scalars(yaml.load(playbook(replace(plan, steps=steps), frozenset({0})), Loader)))
    hostile = [text for text in found if "lookup('pipe'" in text]
    assert len(hostile) > len(targets) and all(isinstance(text, Unsafe) for text in hostile)


def test_a_domain_is_data() -> None:
    """Its name is in the play's; a report has it in one line, without what controls a terminal."""
    name = HOSTILE.replace("&", "&amp;").replace("<", "&lt;")
    xml = f"""<domain><name>\x85{name}</name><vcpu>2</vcpu><memory unit='GiB'>4</memory>
        <os><type machine="{{{{ 1 }}}}&#10;&#9;x">hvm</type></os>
        <devices><iommu model="{{{{ 2 }}}}&#10;x"/></devices></domain>"""
    plan = plan_guest(xml, GuestOptions())
    play = yaml.load(guest_playbook(plan), Loader)[0]
    assert isinstance(play["name"], Unsafe) and "lookup" in play["name"] and "\n" not in play["name"]
    assert "\x85" not in guest_text(plan)
    assert [line for line in guest_text(plan).splitlines() if line.startswith(("x", "- name"))] == []


def test_a_folder_that_is_no_pci_address_is_no_nic() -> None:
    made = tree(load("small"))
    before = read_facts(MemoryRoot(made))
    device = f"{PCI}/0000:00:03.0"
    for name in ("{{ lookup('pipe', 'id') }}", '0000:00:1f.6"', "0000:00:1f.6\n", "0000:00:1F.6"):
        made.links[f"{PCI}/{name}"] = made.links[device]
    made.files["/proc/irq/²/smp_affinity_list"] = "0"
    made.files["/sys/devices/system/cpu/cpufreq/policy0\nx/affected_cpus"] = "0"
    facts = read_facts(MemoryRoot(made))
    assert facts.network.nics == before.network.nics != ()
    assert "²" not in str(facts.interrupts) and "\\nx" not in str(facts.power)


def test_a_process_with_the_name_of_a_kernel_thread_is_none() -> None:
    made = tree(load("published"))
    path = next(p for p, text in made.files.items() if p.startswith("/proc/") and "(ksoftirqd/" in text)
    before = read_kernel(MemoryRoot(made)).threads
    made.files["/proc/99999/stat"] = made.files[path].replace(" S 2 ", " S 1234 ")
    assert not isinstance(before, Unknown) and read_kernel(MemoryRoot(made)).threads == before
    commands = [t.get("ansible.builtin.command", {}).get("argv", []) for t in tasks("published-realtime")]
    assert ["ps", "--ppid", "2"] in [argv[:3] for argv in commands]
