"""Differences between runs: those beyond the noise of the rounds are told, others are not."""

from __future__ import annotations

import random

from tests.bench.comparison import BLOCKS, Verdict, blocks, compare, doubts
from tests.bench.names import ONE_PORT, START
from tests.bench.recorder import Recorder
from tests.bench.tables import comparison_table
from tests.bench.values import Run
from tests.unit.bench.runs import MACHINE, run_of


def plugs(seed: int, slower: float = 1.0, machine: float = 1.0, count: int = 100) -> Run:
    """Agent and os-vif in turn; ``machine`` slows both."""
    rng, record = random.Random(seed), Recorder()
    for _ in range(count):
        record.add(ONE_PORT, "plug", 20 * slower * machine * rng.lognormvariate(0, 0.1), ports=0, addresses=1)
        record.add(ONE_PORT, "plug", 15 * machine * rng.lognormvariate(0, 0.1), way="os-vif", ports=0)
    return run_of(record)


def verdict(old: Run, new: Run) -> Verdict:
    return compare(old, new)[0].verdict


def test_noise_is_no_difference() -> None:
    found = [verdict(plugs(2 * n), plugs(2 * n + 1)) for n in range(40)]
    assert found.count(Verdict.SAME) >= 38


def test_a_change_of_a_fifth_is_found_in_both_directions() -> None:
    assert verdict(plugs(1), plugs(2, slower=1.2)) is Verdict.MORE
    assert verdict(plugs(1), plugs(2, slower=0.8)) is Verdict.LESS


def test_a_slower_machine_is_no_slower_agent() -> None:
    row = compare(plugs(1), plugs(2, machine=1.5))[0]
    assert row.verdict is Verdict.SAME and row.yardstick == "os-vif"
    assert row.after > 1.3 * row.before, "the milliseconds are shown as they are"


def test_few_rounds_are_not_judged() -> None:
    record = Recorder()
    record.add(START, "to ready", 0.5, 0.6, ports=1000, unit="s")
    slow = Recorder()
    slow.add(START, "to ready", 5.0, 6.0, ports=1000, unit="s")
    row = compare(run_of(record), run_of(slow))[0]
    assert row.verdict is Verdict.FEW
    assert "too few rounds" in comparison_table([row])


def test_what_one_run_lacks_is_left_out() -> None:
    assert compare(run_of(Recorder()), plugs(1)) == []


def test_blocks_follow_each_other() -> None:
    assert blocks(range(100)) == tuple(10 * n + 4.5 for n in range(BLOCKS))
    assert blocks([3.0, 1.0]) == (3.0, 1.0)
    assert len(blocks(range(15))) == BLOCKS


def test_what_else_differs_is_reported() -> None:
    record = Recorder()
    other = MACHINE.model_copy(update={"kernel": "6.12", "load": 2.0})
    found = doubts(run_of(record), run_of(record, form="quick", machine=other))
    assert found == [
        "form: full, then quick",
        "kernel: 6.1, then 6.12",
        "the machine was not idle (new run): load 2",
    ]
    assert doubts(run_of(record), run_of(record)) == []
