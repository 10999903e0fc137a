"""A playbook has every step of its plan, in modules that every Ansible has."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from netplugin.tuning.output.playbook import playbook
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import (
    File,
    KernelArgument,
    OtherConfig,
    Swap,
    Sysctl,
    Target,
    ThreadPriority,
    TunedProfile,
    TunedVariable,
    VfCount,
)
from tests.unit.tuning.golden import OVS, PLANS, plan_of
from tests.unit.tuning.machines import load


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
        assert step.wanted is None or step.wanted in text, step


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


@pytest.mark.parametrize("name", PLANS)
def test_lines_are_no_longer_than_ansible_lint_has_them(name: str) -> None:
    text = playbook(plan_of(name), load(PLANS[name][0]).online)
    assert [line for line in text.splitlines() if len(line) > 160] == []


def test_a_playbook_asks_for_a_restart_and_takes_none() -> None:
    found = tasks("published-realtime")
    assert not [t for t in found if "ansible.builtin.reboot" in t or "ansible.builtin.service" in t]
    assert "after a reboot" in found[[t["name"] for t in found].index("Say what is left to do")][
        "ansible.builtin.debug"
    ]["msg"]  # fmt: skip


def test_handlers_that_are_notified_exist() -> None:
    found = tasks("published-realtime")
    names = {task["name"] for task in found}
    assert {task["notify"] for task in found if "notify" in task} <= names


def test_ovs_of_the_golden_plans_is_asked() -> None:
    assert not any(
        isinstance(s.now, Unknown) for name in PLANS for s in plan_of(name).steps
    ) and not isinstance(OVS.ovs, Unknown)
