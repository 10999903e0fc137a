"""Applying and undoing on a machine in memory: what is set, read back, put back, and left alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from netplugin.tuning.applying.apply import BAD, StepOutcome, apply, preview, preview_undo
from netplugin.tuning.applying.journal import ApplyJournal, look
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import (
    BannedCpus,
    Effect,
    File,
    OtherConfig,
    Swap,
    Sysctl,
    ThreadPriority,
    TunedProfile,
    TunedVariable,
    VfCount,
)
from tests.unit.tuning.fake_kernel import (
    KSM,
    LATER,
    MANAGED,
    MOVED,
    PAGES,
    SWAPS,
    VARIABLES,
    WORKQUEUES,
)
from tests.unit.tuning.fake_machine import LATERS, FakeMachine, of, outcomes


def test_everything_that_can_be_set_now_is_set(host: FakeMachine, journal: Path) -> None:
    desired = host.plan()
    results = host.apply(journal)
    assert outcomes(results) == {StepOutcome.SET}
    assert {r.target for r in results if r.outcome is StepOutcome.SET} == {
        step.target for step in desired.left(Effect.LIVE)
    }
    assert host.plan().left(Effect.LIVE) == ()
    kinds = {type(r.target) for r in results if r.outcome is StepOutcome.SET}
    assert kinds == {
        File,
        Sysctl,
        OtherConfig,
        TunedVariable,
        TunedProfile,
        ThreadPriority,
        Swap,
        VfCount,
        BannedCpus,
    }
    assert host.ovs.config["pmd-cpu-mask"] == "0x2"
    assert host.kernel.tree.files[SWAPS].count("\n") == 1


def test_what_takes_a_restart_is_listed_and_left(host: FakeMachine, journal: Path) -> None:
    results = host.apply(journal)
    left = {r.target for r in results if r.outcome in LATERS}
    plan = host.plan()
    assert left == {s.target for e in (Effect.OVS_RESTART, Effect.REBOOT) for s in plan.left(e)}
    assert OtherConfig("dpdk-socket-mem") in left and "dpdk-socket-mem" not in host.ovs.config


def test_a_second_apply_changes_nothing(host: FakeMachine, journal: Path) -> None:
    host.apply(journal)
    before, written = host.state(), journal.read_bytes()
    assert outcomes(host.apply(journal)) == set()
    assert host.state() == before and journal.read_bytes() == written


def test_undo_brings_every_value_back_as_it_was_written(host: FakeMachine, journal: Path) -> None:
    before = host.state()
    applied = [r.target for r in host.apply(journal) if r.outcome is StepOutcome.SET]
    assert host.state() != before
    undone = host.undo(journal)
    assert outcomes(undone) == {StepOutcome.RESTORED}
    assert [r.target for r in undone] == applied[::-1]
    assert host.state() == before
    assert journal.read_bytes() == b""
    assert host.undo(journal) == [] and host.state() == before


def test_undo_goes_back_to_before_the_first_apply(host: FakeMachine, journal: Path) -> None:
    before = host.state()
    host.apply(journal)
    again = host.apply(journal, vm_memory_mb=512)
    assert of(again, File(PAGES)).old == "280" and of(again, File(PAGES)).new == "536"
    undone = host.undo(journal)
    assert (of(undone, File(PAGES)).old, of(undone, File(PAGES)).new) == ("536", "0")
    assert host.state() == before


def test_nothing_is_done_unless_requested(host: FakeMachine, journal: Path) -> None:
    before, plan = host.state(), host.plan()
    shown = list(preview(plan))
    assert outcomes(shown) == {StepOutcome.WOULD_SET}
    assert [r.target for r in shown] == [step.target for effect in Effect for step in plan.left(effect)]
    host.apply(journal)
    after, written = host.state(), journal.read_bytes()
    undone = list(preview_undo(look(journal, host.boot), host.machine, force=False))
    assert outcomes(undone) == {StepOutcome.WOULD_RESTORE}
    assert host.state() == after != before and journal.read_bytes() == written
    assert look(journal.with_name("none"), host.boot).changes == ()


# -- what does not take --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EINVAL, errno.EBUSY])
def test_what_is_refused_is_left_and_the_others_go_on(host: FakeMachine, journal: Path, number: int) -> None:
    refused = [PAGES, MOVED, WORKQUEUES, KSM, VARIABLES]
    host.kernel.refusing = dict.fromkeys(refused, number)
    before = host.state()
    results = host.apply(journal)
    failed = {str(r.target): r for r in results if r.outcome is StepOutcome.FAILED}
    variable = "isolated_cores of tuned's realtime-virtual-host"
    assert set(failed) == {*refused[:4], variable}
    for result in failed.values():
        assert result.reason and os.strerror(number)[1:] in result.reason
        assert bool(result.fix) == (number in (errno.EROFS, errno.EACCES))
    for path in refused[:4]:
        assert host.kernel.tree.files[path] == before[0][path]
        assert path not in journal.read_text()
    assert host.ovs.config["pmd-cpu-mask"] == "0x2"
    host.undo(journal)
    assert host.state() == before


def test_fewer_hugepages_than_requested_are_returned(host: FakeMachine, journal: Path) -> None:
    host.kernel.pages = 37
    result = of(host.apply(journal), File(PAGES))
    assert result.outcome is StepOutcome.FAILED and result.outcome in BAD
    assert "has 37 pages to give and not 280" in str(result.reason) and "boot" in str(result.fix)
    assert host.kernel.tree.files[PAGES] == "0\n"
    assert PAGES not in journal.read_text()


def test_a_write_is_read_back(host: FakeMachine, journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes one text and keeps another, as for a mask with a CPU that is off line."""
    real = host.kernel._write
    monkeypatch.setattr(
        host.kernel, "_write", lambda path, data: real(path, b"1\n" if data == b"2\n" else data)
    )
    result = of(host.apply(journal), File(KSM))
    assert result.outcome is StepOutcome.FAILED and result.reason == f"{KSM} is 1 afterwards and not 2"
    assert host.kernel.tree.files[KSM] == "1\n", "and it is as it was"
    assert KSM not in journal.read_text()


@pytest.mark.parametrize("number", [errno.EIO, errno.EPERM])
def test_an_interrupt_that_the_kernel_places_is_no_failure(
    host: FakeMachine, journal: Path, number: int
) -> None:
    host.kernel.refusing = {MANAGED: number}
    results = host.apply(journal)
    result = of(results, File(MANAGED, lasting=False))
    assert result.outcome is StepOutcome.KEPT and "kernel" in str(result.reason)
    assert not BAD & outcomes(results)
    written = journal.read_bytes()
    assert outcomes(host.apply(journal)) == {StepOutcome.KEPT}
    assert journal.read_bytes() == written and MANAGED.encode() not in written


def test_an_interrupt_that_has_gone_is_no_failure(host: FakeMachine, journal: Path) -> None:
    before, plan = host.state(), host.plan()
    host.kernel.change({path: None for path in host.kernel.tree.files if "/irq/25/" in path})
    with ApplyJournal(journal, host.boot) as held:
        results = list(apply(plan, host.machine, held))
    assert of(results, File(LATER, lasting=False)).outcome is StepOutcome.KEPT
    host.kernel.change({path: None for path in host.kernel.tree.files if "/irq/24/" in path})
    undone = host.undo(journal)
    assert of(undone, File(MOVED, lasting=False)).outcome is StepOutcome.GONE
    assert not BAD & outcomes(undone) and journal.read_bytes() == b""
    kept = {
        path: text
        for path, text in before[0].items()
        if not path.startswith(("/proc/irq/24/", "/proc/irq/25/"))
    }
    assert host.state()[0] == kept


def test_pmd_threads_that_run_elsewhere_are_a_failure(
    host: FakeMachine, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.ovs, "pmd_cpus", lambda: frozenset({0}))
    result = of(host.apply(journal), OtherConfig("pmd-cpu-mask"))
    assert result.outcome is StepOutcome.FAILED
    assert result.reason == "vswitchd runs PMD threads on 0, not on 1"
    assert host.ovs.config["pmd-cpu-mask"] == "03", "its own text is back"


def test_an_ovs_that_does_not_answer(host: FakeMachine, journal: Path) -> None:
    host.ovs.down = True
    results = host.apply(journal)
    result = of(results, OtherConfig("pmd-cpu-mask"))
    assert result.outcome is StepOutcome.FAILED and result.reason == "no connection"
    assert isinstance(result.old, Unknown)
    assert of(results, File(PAGES)).outcome is StepOutcome.SET


def test_what_cannot_even_be_put_back_waits_for_undo(
    host: FakeMachine, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = host.state()
    real = host.kernel._write
    monkeypatch.setattr(host.kernel, "pages", 37)

    def once(path: str, data: bytes) -> None:
        real(path, data)
        if path == PAGES:
            host.kernel.refusing = {PAGES: errno.EIO}

    monkeypatch.setattr(host.kernel, "_write", once)
    result = of(host.apply(journal), File(PAGES))
    assert result.outcome is StepOutcome.FAILED and "could not be put back" in str(result.reason)
    assert "--undo" in str(result.fix)
    assert of(host.undo(journal), File(PAGES)).outcome is StepOutcome.FAILED
    assert host.state() != before and journal.read_bytes() != b""
    monkeypatch.undo()
    host.kernel.refusing = {}
    host.undo(journal)
    assert host.state() == before and journal.read_bytes() == b""
