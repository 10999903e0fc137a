"""What is set by programs and the scheduler: swap devices with their priorities, threads with theirs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from netplugin.api.errors import HostError
from netplugin.tuning.applying.apply import StepOutcome
from netplugin.tuning.steps import BannedCpus, Swap, ThreadPriority
from tests.unit.tuning.fake_kernel import SWAPS
from tests.unit.tuning.fake_machine import FakeMachine, of

ROWS = (
    "/dev/dm-1                               partition\t1048572\t\t0\t\t-2",
    r"/swap\040file                            file\t1048572\t\t0\t\t5",
    "/dev/dm-2                               partition\t1048572\t\t0\t\t-3",
)


@pytest.fixture
def swapping(host: FakeMachine) -> FakeMachine:
    """Three, of which one has a priority of its own."""
    head = host.kernel.tree.files[SWAPS].splitlines()[0]
    host.kernel.change({SWAPS: "\n".join([head, *(row.replace(r"\t", "\t") for row in ROWS)]) + "\n"})
    return host


def reported(host: FakeMachine, stuck: str = "") -> list[list[str]]:
    """The programs that are run from now on; swapoff of ``stuck`` fails."""
    calls: list[list[str]] = []

    def run(args: Sequence[str], seconds: float) -> str:
        calls.append(list(args))
        if list(args) == ["swapoff", stuck]:
            raise HostError("swapoff: Cannot allocate memory", step="apply")
        return ""

    host.machine = replace(host.machine, run=run)
    return calls


def test_swap_goes_and_comes_back_in_the_order_of_its_priorities(swapping: FakeMachine) -> None:
    calls = reported(swapping)
    before = swapping.machine.read(Swap())
    swapping.machine.write(Swap(), None)
    assert calls == [["swapoff", "/swap file"], ["swapoff", "/dev/dm-1"], ["swapoff", "/dev/dm-2"]]
    calls.clear()
    swapping.kernel.change({SWAPS: "Filename Type Size Used Priority\n"})
    swapping.machine.restore(Swap(), before)
    assert calls == [
        ["swapon", "--priority=5", "/swap file"],
        ["swapon", "/dev/dm-1"],
        ["swapon", "/dev/dm-2"],
    ]


def test_only_the_swap_that_has_gone_comes_back(swapping: FakeMachine) -> None:
    calls = reported(swapping)
    before = swapping.machine.read(Swap())
    text = swapping.kernel.tree.files[SWAPS]
    swapping.kernel.change({SWAPS: "".join(r for r in text.splitlines(True) if "dm-1" not in r)})
    swapping.machine.restore(Swap(), before)
    assert calls == [["swapon", "/dev/dm-1"]]


def test_swap_that_memory_has_no_room_for_is_a_failure(host: FakeMachine, journal: Path) -> None:
    reported(host, stuck="/dev/dm-1")
    result = of(host.apply(journal), Swap())
    assert result.outcome is StepOutcome.FAILED
    assert result.reason == "swapoff: Cannot allocate memory"


def test_threads_have_a_real_time_policy_and_get_their_own_back(host: FakeMachine) -> None:
    target = ThreadPriority("ksoftirqd")
    first, second = 14, 15
    host.set_scheduler(second, os.SCHED_RR, 7)
    before = host.machine.read(target)
    assert before == "ksoftirqd/0=0:0,ksoftirqd/1=2:7" and host.machine.value(target, before) == "0,7"
    calls: list[tuple[int, int, int]] = []
    real = host.set_scheduler
    host.machine = replace(host.machine, set_scheduler=lambda *w: (calls.append(w), real(*w))[1])
    host.machine.write(target, "2")
    host.machine.write(target, "2")
    assert calls == [(first, os.SCHED_FIFO, 2), (second, os.SCHED_FIFO, 2)]
    host.machine.restore(target, before)
    assert calls[2:] == [(first, os.SCHED_OTHER, 0), (second, os.SCHED_RR, 7)]
    assert host.machine.read(target) == before
    host.machine.write(target, "0")
    assert host.machine.read(target) == "ksoftirqd/0=0:0,ksoftirqd/1=0:0"


IRQBALANCE = BannedCpus("/etc/default/irqbalance")
VERSION = ["irqbalance", "--version"]
RESTART = ["systemctl", "try-restart", "irqbalance.service"]


def test_irqbalance_is_configured_and_restarted_if_it_runs(host: FakeMachine) -> None:
    calls, files = reported(host), host.kernel.tree.files
    text = files[IRQBALANCE.path]
    before = host.machine.read(IRQBALANCE)
    host.machine.write(IRQBALANCE, "1,3-7")
    assert files[IRQBALANCE.path] == f"{text}IRQBALANCE_BANNED_CPULIST=1,3-7\n"
    assert calls == [VERSION, RESTART]
    assert host.machine.value(IRQBALANCE, host.machine.read(IRQBALANCE)) == "1,3-7"
    host.machine.write(IRQBALANCE, "1,3-7")
    assert calls == [VERSION, RESTART, VERSION], "nothing has changed"
    host.machine.restore(IRQBALANCE, before)
    assert files[IRQBALANCE.path] == text and calls[3:] == [RESTART]


def test_an_irqbalance_that_does_not_know_the_list_gets_a_mask(host: FakeMachine) -> None:
    """Debian 11 and Ubuntu 20.04 have such; ``--version`` ends with status 1 up to 1.9."""
    run, text = host.run, host.kernel.tree.files[IRQBALANCE.path]

    def older(args: Sequence[str], seconds: float) -> str:
        if args[0] == "irqbalance":
            raise HostError("irqbalance: irqbalance version 1.7.0", step="apply")
        return run(args, seconds)

    host.machine = replace(host.machine, run=older)
    with pytest.raises(HostError, match=r"irqbalance 1\.7 does not know") as refused:
        host.machine.write(IRQBALANCE, "1,3-7")
    assert "IRQBALANCE_BANNED_CPUS=fa in" in str(refused.value.fix)
    assert host.kernel.tree.files[IRQBALANCE.path] == text
    listed = "IRQBALANCE_BANNED_CPULIST=1,3-7\nIRQBALANCE_BANNED_CPULIST=1,3-7\n"
    host.kernel.change({IRQBALANCE.path: listed})
    with pytest.raises(HostError, match="does not know"):
        host.machine.write(IRQBALANCE, "1,3-7")
    # What the fix requests will do.
    host.kernel.change({IRQBALANCE.path: "IRQBALANCE_BANNED_CPUS=fa\n"})
    host.machine.write(IRQBALANCE, "1,3-7")
    assert host.machine.value(IRQBALANCE, host.machine.read(IRQBALANCE)) == "1,3-7"
    host.kernel.change({IRQBALANCE.path: "IRQBALANCE_BANNED_CPUS=2\n"})
    with pytest.raises(HostError, match="does not know"):
        host.machine.write(IRQBALANCE, "1,3-7")


def test_an_older_mask_of_irqbalance_is_reported_and_not_changed(host: FakeMachine) -> None:
    reported(host)
    host.kernel.change({IRQBALANCE.path: "IRQBALANCE_BANNED_CPUS=2\n"})
    with pytest.raises(HostError, match="IRQBALANCE_BANNED_CPUS, which goes before"):
        host.machine.write(IRQBALANCE, "1,3-7")
