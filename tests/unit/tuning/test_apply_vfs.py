"""Virtual functions as steps: planned, refused where they cannot be, and left alone while in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from netplugin.api.errors import HostError, InvalidRequest
from netplugin.tuning.applying.apply import Result, StepOutcome
from netplugin.tuning.applying.kernel import vf_uses
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.steps import Effect, Group, Step, VfCount
from tests.unit.tuning.fake_kernel import IFACE, NIC, NUMVFS
from tests.unit.tuning.fake_machine import FakeMachine

VF = "/sys/bus/pci/devices/0000:05:00.2"


def vf_steps(host: FakeMachine, *vfs: str) -> list[Step]:
    return [step for step in host.plan(vfs=vfs).steps if step.group is Group.VFS]


@pytest.mark.parametrize("name", [NIC, IFACE])
def test_a_nic_by_address_or_interface(name: str) -> None:
    [step] = vf_steps(FakeMachine(), f"{name}=07")
    assert (step.target, step.now, step.desired) == (VfCount(NIC), "0", "7")
    assert step.effect is Effect.LIVE and not step.done
    [step] = vf_steps(FakeMachine(vfs=2), f"{name}=2")
    assert step.done


@pytest.mark.parametrize(
    ("vfs", "words"),
    [
        (["eth7=1"], "no NIC eth7"),
        (["ens3=1"], "ens3 has no virtual functions"),
        ([f"{IFACE}=8"], "can have 7 virtual functions and not 8"),
        ([f"{IFACE}=1", f"{NIC}=2"], "named twice"),
    ],
)
def test_what_cannot_be_planned(vfs: list[str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        vf_steps(FakeMachine(), *vfs)
    assert [wrong.field for wrong in refused.value.errors] == ["vfs"] and refused.value.fix


def test_no_step_without_the_fact_it_stands_on() -> None:
    host = FakeMachine()
    host.kernel.change({host.kernel._real(f"/sys/bus/pci/devices/{NIC}/sriov_totalvfs"): "many"})
    with pytest.raises(HostError, match="sriov_totalvfs"):
        vf_steps(host, f"{IFACE}=1")


def test_a_check_against_the_plan_tells_of_them() -> None:
    host = FakeMachine(vfs=2)
    facts = read_facts(host.kernel)
    plan = make_plan(facts, HostIntent(pmd_cores=0, vfs=(f"{NIC}=4",)))
    [finding] = [f for f in check(Scene(facts, plan=plan)) if f.id == "plan-vfs"]
    assert finding.status == "warn" and finding.found == f"virtual functions of {NIC} is 2"


# -- another number ------------------------------------------------------------------------------------


def only_vfs(host: FakeMachine, journal: Path, number: int) -> Result:
    results = host.apply(journal, vfs=(f"{NIC}={number}",))
    [found] = [result for result in results if result.group is Group.VFS]
    return found


def count(host: FakeMachine) -> str:
    return host.kernel.tree.files[host.kernel._real(NUMVFS)].strip()


@pytest.mark.parametrize("number", [0, 1, 7])
def test_another_number_while_none_is_in_use(journal: Path, number: int) -> None:
    host = FakeMachine(vfs=4)
    result = only_vfs(host, journal, number)
    assert (result.outcome, result.old) == (StepOutcome.SET, "4") and count(host) == str(number)
    host.undo(journal)
    assert count(host) == "4"


def bound(host: FakeMachine, driver: str, flags: str | None = None, master: bool = False) -> None:
    """The second VF as a driver has it, with an interface of these flags."""
    real = host.kernel._real(VF)
    links = {f"{real}/driver": f"../../bus/pci/drivers/{driver}"}
    files: dict[str, str | None] = {}
    if flags is not None:
        files[f"{real}/net/eth9/flags"] = flags
    if master:
        links[f"{real}/net/eth9/master"] = "../../../virtual/net/bond0"
    host.kernel.change(files, links)


@pytest.mark.parametrize(
    ("driver", "flags", "master", "words"),
    [
        ("vfio-pci", None, False, "bound to vfio-pci"),
        ("mlx5_vfio_pci", None, False, "bound to mlx5_vfio_pci"),
        ("igb_uio", None, False, "bound to igb_uio"),
        ("igbvf", "0x1003", False, "eth9 is up"),
        ("igbvf", "0x1002", True, "eth9 is enslaved"),
        ("igbvf", None, False, "in another network namespace"),
    ],
)
def test_one_in_use_keeps_them_all(
    journal: Path, driver: str, flags: str | None, master: bool, words: str
) -> None:
    host = FakeMachine(vfs=4)
    bound(host, driver, flags, master)
    for number in (0, 2, 6):
        result = only_vfs(host, journal, number)
        assert result.outcome is StepOutcome.FAILED and words in str(result.reason)
        assert "0000:05:00.2" in str(result.reason) and result.fix
        assert count(host) == "4"
    assert not [r for r in host.apply(journal, vfs=(f"{NIC}=4",)) if r.group is Group.VFS]


def test_one_of_a_port_keeps_them_all_and_an_undo_waits_for_it(journal: Path) -> None:
    host = FakeMachine()
    assert only_vfs(host, journal, 4).outcome is StepOutcome.SET
    host.ports = {"0000:05:00.2": "nic1", "0000:05:00.3": "nic2", "0000:99:00.1": "other"}
    result = only_vfs(host, journal, 2)
    assert (result.outcome, result.code) == (StepOutcome.FAILED, "conflict")
    assert result.reason == (f"VF 0000:05:00.2 of {NIC} is in use: port nic1 has it; so are 0000:05:00.3")
    assert result.fix == "free VF 0000:05:00.2: delete port nic1; then try again"
    undone = [r for r in host.undo(journal) if r.outcome is not StepOutcome.RESTORED]
    assert [(r.target, r.outcome) for r in undone] == [(VfCount(NIC), StepOutcome.FAILED)]
    assert count(host) == "4"
    host.ports = {}
    assert [r.outcome for r in host.undo(journal)] == [StepOutcome.RESTORED]
    assert count(host) == "0" and journal.read_bytes() == b""


def test_one_whose_interface_is_down_is_free() -> None:
    host = FakeMachine(vfs=4)
    bound(host, "igbvf", "0x1002")
    assert list(vf_uses(host.kernel, NIC, 4, {})) == []
    assert [use.how for use in vf_uses(host.kernel, NIC, 4, {"0000:05:00.1": "a"})] == ["port a has it"]
