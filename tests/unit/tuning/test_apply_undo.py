"""What others do between apply and undo, what a boot does, and the journal that remembers."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from netplugin.api.errors import Conflict, HostError
from netplugin.tuning.applying.apply import BAD, StepOutcome, apply, undo
from netplugin.tuning.applying.journal import ApplyJournal, JournalEvent
from netplugin.tuning.steps import (
    BannedCpus,
    File,
    Group,
    OtherConfig,
    Target,
    TunedProfile,
    TunedVariable,
    VfCount,
)
from tests.unit.tuning.fake_kernel import (
    KSM,
    MOVED,
    NIC,
    NUMVFS,
    PAGES,
    PROFILE,
    WORKQUEUES,
)
from tests.unit.tuning.fake_machine import FakeMachine, of, outcomes


def test_what_somebody_else_set_since_is_left_unless_forced(host: FakeMachine, journal: Path) -> None:
    before = host.state()
    host.apply(journal)
    host.kernel.change({PAGES: "300\n", KSM: "0\n", PROFILE: "powersave\n"})
    host.ovs.config["pmd-cpu-mask"] = "0x1"
    theirs: set[Target] = {File(PAGES), File(KSM), TunedProfile(), OtherConfig("pmd-cpu-mask")}
    undone = host.undo(journal)
    assert {r.target for r in undone if r.outcome is StepOutcome.CHANGED_SINCE} == theirs
    assert {r.target for r in undone if r.outcome in BAD} == theirs
    assert host.kernel.tree.files[PAGES] == "300\n" and host.ovs.config["pmd-cpu-mask"] == "0x1"
    assert {r.target for r in host.undo(journal)} == theirs
    assert outcomes(host.undo(journal, force=True)) == {StepOutcome.RESTORED}
    assert host.state() == before and journal.read_bytes() == b""


def test_what_somebody_else_brought_back_is_done(host: FakeMachine, journal: Path) -> None:
    before = host.state()
    host.apply(journal)
    host.kernel.change({PAGES: "0\n"})
    assert outcomes(host.undo(journal)) == {StepOutcome.RESTORED}
    assert host.state() == before


def test_our_value_in_another_form_is_still_ours(host: FakeMachine, journal: Path) -> None:
    before = host.state()
    host.apply(journal)
    host.ovs.config["pmd-cpu-mask"] = "02"
    host.kernel.change({WORKQUEUES: "00000001\n"})
    host.undo(journal)
    assert host.state() == before


def test_a_boot_undoes_what_is_the_kernel_s(host: FakeMachine, journal: Path) -> None:
    before = host.state()
    host.apply(journal)
    after = host.state()
    # The kernel starts again, with other interrupts under the old numbers; disks keep what they have.
    for path, text in after[0].items():
        if not path.startswith("/etc/"):
            host.kernel.tree.files[path] = before[0].get(path, text)
    host.kernel.change({"/proc/sys/kernel/random/boot_id": "second\n", MOVED: "0\n", PAGES: "280\n"})
    undone = host.undo(journal)
    gone = {r.target for r in undone if r.outcome is StepOutcome.GONE}
    back = {type(r.target) for r in undone if r.outcome is StepOutcome.RESTORED}
    assert {File(MOVED, lasting=False), File(PAGES), VfCount(NIC)} <= gone
    assert back == {OtherConfig, TunedVariable, TunedProfile, BannedCpus}
    assert host.kernel.tree.files[MOVED] == "0\n" and host.kernel.tree.files[PAGES] == "280\n"
    assert host.ovs.config == before[2] and journal.read_bytes() == b""


def test_after_a_boot_an_interrupt_has_a_first_value_again(host: FakeMachine, journal: Path) -> None:
    host.apply(journal)
    host.kernel.change({"/proc/sys/kernel/random/boot_id": "second\n", MOVED: "1\n"})
    assert of(host.apply(journal), File(MOVED, lasting=False)).old == "1"
    assert of(host.undo(journal), File(MOVED, lasting=False)).new == "1"
    assert host.kernel.tree.files[MOVED] == "1\n"


# -- the journal ----------------------------------------------------------------------------------


def test_only_one_at_a_time(host: FakeMachine, journal: Path) -> None:
    with ApplyJournal(journal, host.boot), pytest.raises(Conflict, match="another apply"):
        host.apply(journal)
    assert outcomes(host.apply(journal)) == {StepOutcome.SET}


def test_a_journal_is_for_root_alone(host: FakeMachine, journal: Path) -> None:
    host.apply(journal)
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600
    assert stat.S_IMODE(journal.parent.stat().st_mode) == 0o700
    events = [json.loads(text)["event"] for text in journal.read_text().splitlines()]
    assert set(events) == {"writing", "written"} and events[::2] == ["writing"] * (len(events) // 2)


@pytest.mark.parametrize(
    "text",
    [
        "{}\n",
        "words\n",
        '{"event": "written", "boot": "first", "group": "ovs", "target": {}}\n',
        '{"event": "written", "boot": "first", "group": "vfs", "target": {"kind": "swap"}}\n',
    ],
)
def test_a_file_that_is_no_journal_is_not_touched(host: FakeMachine, journal: Path, text: str) -> None:
    journal.parent.mkdir()
    journal.write_text(text)
    before = host.state()
    for command in (host.apply, host.undo):
        with pytest.raises(HostError, match="is no journal"):
            command(journal)
    assert journal.read_text() == text and host.state() == before


def test_nothing_is_done_that_the_journal_has_no_room_for(
    host: FakeMachine, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, plan = host.state(), host.plan()
    real, lines = os.write, 0

    def full(descriptor: int, data: bytes) -> int:
        nonlocal lines
        lines += 1
        return real(descriptor, data if lines < 6 else data[:20])

    with ApplyJournal(journal, host.boot) as held:
        monkeypatch.setattr(os, "write", full)
        results = apply(plan, host.machine, held)
        assert [next(results).outcome for _ in range(2)] == [StepOutcome.SET] * 2
        with pytest.raises(HostError, match="cannot be used: No space left"):
            next(results)
    monkeypatch.undo()
    assert len(outcomes(host.undo(journal))) == 1
    assert host.state() == before


@pytest.mark.parametrize("room", range(4), ids="line {}".format)
def test_undo_ends_where_the_journal_has_no_room(
    host: FakeMachine, journal: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Two lines of each kind: before a value is restored, and after."""
    before = host.state()
    host.apply(journal)
    whole, after = journal.read_bytes(), host.state()
    real, lines = os.write, 0

    def full(descriptor: int, data: bytes) -> int:
        nonlocal lines
        lines += 1
        return real(descriptor, data[:20] if lines == room + 1 else data)

    with ApplyJournal(journal, host.boot) as held:
        monkeypatch.setattr(os, "write", full)
        results = undo(host.machine, held, force=False)
        assert [next(results).outcome for _ in range(room // 2)] == [StepOutcome.RESTORED] * (room // 2)
        with pytest.raises(HostError, match="cannot be used: No space left"):
            list(results)
        assert lines == room + 1, "nothing more is written"
        assert (host.state() == after) == (room == 0), "room for no line: nothing is changed"
        written = journal.read_bytes()
        assert written.startswith(whole) and written.endswith(b"\n"), "whole lines only"
        assert written.count(b"\n") == whole.count(b"\n") + room
        monkeypatch.undo()
        held.mark(JournalEvent.UNDOING, Group.HUGEPAGES, File(PAGES))
        assert held.history().changes, "a later line stands alone"
    assert outcomes(host.undo(journal)) == {StepOutcome.RESTORED}
    assert host.state() == before and journal.read_bytes() == b""


def test_a_journal_that_cannot_be_written(host: FakeMachine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot be used") as refused:
        host.apply(tmp_path / "file" / "journal")
    assert "--journal" in str(refused.value.fix)


def test_numvfs_of_the_fake_is_that_of_the_nic(host: FakeMachine) -> None:
    host.kernel.write(NUMVFS, "4")
    with pytest.raises(OSError, match="busy"):
        host.kernel.write(NUMVFS, "2")
