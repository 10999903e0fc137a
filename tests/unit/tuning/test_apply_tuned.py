"""tuned: the profile that sets more than is requested, and files that go back to the letter."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from netplugin.api.errors import BackendUnavailable, HostError
from netplugin.tuning.applying.accessor import WritableRoot, run_program
from netplugin.tuning.applying.apply import StepOutcome
from netplugin.tuning.applying.services import TunedProfiles
from netplugin.tuning.facts import Tuned
from netplugin.tuning.read.kernel import read_kernel, variables_path
from netplugin.tuning.steps import (
    BannedCpus,
    Effect,
    File,
    TunedProfile,
    TunedVariable,
)
from tests.unit.tuning.fake_kernel import KSM, WORKQUEUES
from tests.unit.tuning.fake_machine import FakeMachine, outcomes


def test_what_a_profile_of_tuned_sets_otherwise_is_set_again_and_all_goes_back(
    host: FakeMachine, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As real profiles do: some values like the plan's, some not, and one that stays when it ends."""
    before = host.state()
    saved: dict[str, str] = {}
    theirs = {KSM: "2\n", WORKQUEUES: "1\n", "/proc/sys/vm/swappiness": "10\n"}
    host.kernel.change({"/proc/sys/vm/swappiness": "60\n"})
    before[0]["/proc/sys/vm/swappiness"] = "60\n"
    run = host.run

    def with_settings(args: list[str], seconds: float) -> str:
        if args[0] == "tuned-adm" and args[1] == "profile":
            saved.update({path: host.kernel.tree.files[path] for path in theirs})
            host.kernel.change(theirs)
        elif args[0] == "tuned-adm":
            saved.pop(WORKQUEUES)
            host.kernel.change(saved)
        return run(args, seconds)

    host.machine = replace(host.machine, run=with_settings)
    results = host.apply(journal)
    assert outcomes(results) == {StepOutcome.SET}
    assert [(r.old, r.new) for r in results if r.target == File(KSM)] == [("1", "2")], (
        "the plan and the profile agree"
    )
    assert host.plan().left(Effect.LIVE) == ()
    assert outcomes(host.undo(journal)) == {StepOutcome.RESTORED}
    assert host.state() == before and journal.read_bytes() == b""


@pytest.mark.parametrize("before", ["", "IRQBALANCE_BANNED_CPULIST=0\n"])
def test_the_list_of_irqbalance_that_tuned_took_out_comes_back(
    host: FakeMachine, journal: Path, before: str
) -> None:
    """As its plug-in does: a profile puts its own list in the place of any, and takes any out at its end."""
    path = "/etc/default/irqbalance"
    host.kernel.change({path: f"# irqbalance\n{before}"})
    run = host.run

    def with_lists(args: Sequence[str], seconds: float) -> str:
        if args[0] == "tuned-adm":
            lines = host.kernel.tree.files[path].splitlines(keepends=True)
            kept = "".join(line for line in lines if "BANNED_CPULIST=" not in line)
            mine = f"IRQBALANCE_BANNED_CPULIST={desired}\n" if args[1] == "profile" else ""
            host.kernel.change({path: kept + mine})
        return run(args, seconds)

    desired = of_target(host, BannedCpus(path))
    host.machine = replace(host.machine, run=with_lists)
    assert outcomes(host.apply(journal)) == {StepOutcome.SET}
    assert outcomes(host.undo(journal)) == {StepOutcome.RESTORED}
    assert host.kernel.tree.files[path] == f"# irqbalance\n{before}"
    assert journal.read_bytes() == b""


def of_target(host: FakeMachine, target: BannedCpus) -> str | None:
    [desired] = [step.desired for step in host.plan().steps if step.target == target]
    return desired


def test_tuned_is_set_by_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script in the place of tuned-adm, which is not on every machine that runs this."""
    active = tmp_path / "etc" / "tuned" / "active_profile"
    active.parent.mkdir(parents=True)
    place, target = TunedProfiles(WritableRoot(tmp_path), run_program), TunedProfile()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(BackendUnavailable, match="tuned-adm is not installed"):
            place.write(target, "cpu-partitioning")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    script = tmp_path / "tuned-adm"
    script.write_text(
        f'#!/bin/sh\n[ "$2" != wrong ] || {{ echo no such profile >&2; exit 1; }}\n'
        f'echo "$@" >> {tmp_path}/told; shift; echo "$@" > {active}\n'
    )
    script.chmod(0o755)
    place.write(target, "cpu-partitioning")
    assert place.read(target) == place.value(target, place.read(target)) == "cpu-partitioning"
    place.restore(target, "one two")
    place.restore(target, None)
    place.restore(target, "auto balanced")
    assert (tmp_path / "told").read_text().splitlines() == [
        "profile cpu-partitioning",
        "profile one two",
        "off",
        "auto_profile",
    ]
    with pytest.raises(HostError, match="no such profile"):
        place.write(target, "wrong")


VARIABLE = TunedVariable("cpu-partitioning", "isolated_cores")


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "# isolated_cores=2-4\n",
        "isolated_cores=2-4\n",
        "isolated_cores = 2-4  \nlast=1",
        "first=1\nisolated_cores=${f:calc_isolated_cores:1}",
        "isolated_cores=1\nx=2\nisolated_cores=3\n",
        "no newline",
        "\n\nblank lines\n\n",
        "isolated_cores=\n",
        "\xe9\n",
    ],
)
def test_a_file_of_variables_is_back_to_the_letter(host: FakeMachine, text: str | None) -> None:
    path = variables_path(VARIABLE.profile)
    host.kernel.change({path: text})
    before = host.machine.read(VARIABLE)
    for desired in ("1", "1-3"):
        host.machine.write(VARIABLE, desired)
        tuned = read_kernel(host.kernel).tuned
        assert isinstance(tuned, Tuned) and tuned.isolated_cores[VARIABLE.profile] == desired
        assert host.machine.value(VARIABLE, host.machine.read(VARIABLE)) == desired
    host.machine.restore(VARIABLE, before)
    assert host.kernel.tree.files.get(path) == text


def test_a_file_that_is_replaced_keeps_its_mode_and_owner(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "real"
    file.parent.mkdir()
    file.write_text("old")
    file.chmod(0o640)
    (tmp_path / "etc" / "link").symlink_to("real")
    root = WritableRoot(tmp_path)
    root.replace("/etc/link", "new")
    assert file.read_text() == "new" and stat.S_IMODE(file.stat().st_mode) == 0o640
    root.replace("/etc/other", "text")
    assert stat.S_IMODE((file.parent / "other").stat().st_mode) == 0o644
    root.remove("/etc/other")
    root.remove("/etc/other")
    assert sorted(os.listdir(file.parent)) == ["link", "real"]


def test_a_file_of_the_kernel_is_written_and_never_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        WritableRoot(tmp_path).write("/proc/new", "1")
    assert os.listdir(tmp_path) == []
