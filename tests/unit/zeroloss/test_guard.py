"""``guard``: a device that is worse is found, one that is not is left alone, and nothing is sent in vain."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.generators.sim import SimGenerator
from netplugin_zeroloss.journal import FILE, Journal, PastTrial
from netplugin_zeroloss.matrix.bench import BareBench, CellError
from netplugin_zeroloss.search.guard import GuardPlan, GuardVerdict, Scores, Visit, Visited, guard
from netplugin_zeroloss.search.search import carry_out
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import Measurement, TrialRequest, headline

from tests.bench.guard import MINUTES, of_ratio, once, stalling, stepping
from tests.unit.zeroloss.made_up_agent import MadeUpAgent
from tests.unit.zeroloss.matrix_runs import described, with_agent, write


def _verdicts(device_of: Callable[..., Any], *of: Any, runs: int = 20) -> Counter[str]:
    found = [once(partial(device_of, *of), f"test/{seed}") for seed in range(runs)]
    assert all(seconds <= 60 * MINUTES for _, seconds in found)
    return Counter(each.verdict for each, _ in found)


@pytest.mark.parametrize(("name", "ratio"), [("clean", 1.02), ("clean", 0.98), ("noisy", 0.98), ("drift", 1)])
def test_a_device_that_is_as_good_is_not_called_worse(name: str, ratio: float) -> None:
    assert _verdicts(of_ratio, name, ratio)["not worse"] >= 19


@pytest.mark.parametrize("name", ["clean", "noisy", "flaky-generator"])
def test_one_that_does_5_percent_less_is_found_in_20_minutes(name: str) -> None:
    assert _verdicts(of_ratio, name, 0.95)["worse"] >= 19


def test_between_it_is_undecided() -> None:
    assert _verdicts(of_ratio, "noisy", 0.965, runs=5)["undecided"] >= 4


def test_a_machine_that_changes_every_few_visits_does_not_mislead() -> None:
    same, worse = (_verdicts(stepping, "noisy", ratio) for ratio in (1.0, 0.95))
    assert same["worse"] == worse["not worse"] == 0 and worse["worse"] >= 10


def test_stalls_that_only_b_has_are_found_though_it_is_as_fast() -> None:
    assert _verdicts(stalling)["worse"] >= 19


# -- the order of the visits, and what is no result -----------------------------------------------

_PLAN = GuardPlan(SearchPlan((headline(),), 14.88e6), 4e6, 4e6, "1/cell", 1e4)
_SCORES = Scores(4e6, at_top=False)


def _visits(plan: GuardPlan, answers: Callable[[Visit], Visited], most: int) -> list[Visit]:
    asking = guard(plan)
    seen = [next(asking)]
    while len(seen) < most:
        seen.append(asking.send(answers(seen[-1])))
    return seen


def test_the_order_is_that_of_the_seed_and_balanced() -> None:
    one, again = (_visits(_PLAN, lambda _: Visited(_SCORES, 1.0), 150) for _ in range(2))
    assert [v.is_b for v in one] == [v.is_b for v in again]
    rounds = [(first.is_b, second.is_b) for first, second in zip(one[::2], one[1::2], strict=True)]
    assert all(first != second for first, second in rounds)
    assert 25 < sum(first for first, _ in rounds) < 50


def test_rounds_in_which_a_does_next_to_nothing_do_not_bring_the_next_to_nothing() -> None:
    visits = _visits(_PLAN, lambda _: Visited(Scores(0.01, at_top=False), 1.0), 20)
    assert all(next(each.trials()).rate_pps > 4e6 / 64 / 4 for each in visits)


def test_a_visit_without_a_valid_trial_is_made_again_and_not_forever() -> None:
    luck = iter([None, None, _SCORES, None, _SCORES, None, None, None])
    asking = guard(_PLAN)
    visit, seen = next(asking), []
    with pytest.raises(StopIteration) as end:
        while True:
            seen.append((visit.round, visit.is_b))
            visit = asking.send(Visited(next(luck), 1.0, "it broke"))
    assert [number for number, _ in seen] == [1, 1, 1, 1, 1, 2, 2, 2]
    assert len(set(seen[:3])) == len(set(seen[3:5])) == 1 and seen[0] != seen[3]
    found = end.value.value
    assert found.verdict is GuardVerdict.FAILED and found.reason.endswith("3 times in a row: it broke")


@dataclass
class _Lying(Generator):
    """Counts more than it sent, in each trial."""

    inner: Generator

    @property
    def info(self) -> Any:
        return self.inner.info

    def run(self, request: TrialRequest) -> Measurement:
        found = self.inner.run(request)
        return Measurement(found.tx_packets, found.tx_packets + 1, found.elapsed_s)


def test_a_generator_that_lies_gives_no_scores() -> None:
    visit = next(guard(_PLAN))
    generator = _Lying(SimGenerator(of_ratio("clean", 1.0, False, 0), random.Random(1)))
    assert carry_out(visit.trials(), generator) is None


def test_a_device_is_warmed_up_for_longer_than_a_trial_may_be() -> None:
    visit = next(guard(replace(_PLAN, plan=SearchPlan((headline(10.0),), 14.88e6, warm_up_s=25.0))))
    generator = SimGenerator(of_ratio("clean", 1.0, False, 0), random.Random(1))
    seen: list[TrialRequest] = []
    carry_out(visit.trials(), generator, lambda asked, _: seen.append(asked))
    assert [asked.duration_s for asked in seen if asked.purpose == "warming up"] == [10.0, 10.0, 5.0]


# -- as a user runs it ----------------------------------------------------------------------------


def _simulated(capacity_pps: float, device: str = "noisy", **sections: Any) -> Mapping[str, Any]:
    generator = {"type": "sim", "device": device, "capacity_pps": capacity_pps}
    return described(generator=generator, **sections)


def _call(folder: Path, *more: str) -> tuple[int, str, str]:
    words = ["guard", str(folder / "a.yaml"), str(folder / "b.yaml"), "--folder", str(folder / "run"), *more]
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        status = main(words)
    return status, output.getvalue(), errors.getvalue()


_TWO_QUEUES = {"backends": ["dpdkvhostuser"], "pmd_cores": [2], "queues": [2]}


def _written(folder: Path, a: Mapping[str, Any], b: Mapping[str, Any]) -> Path:
    write(folder, a, "a.yaml")
    write(folder, b, "b.yaml")
    return folder


@pytest.mark.parametrize(
    ("pps", "device", "status", "words"),
    [
        (4.2e6, "clean", 0, "not worse: 1 cell\n"),
        (3.99e6, "noisy", 1, "worse: 1 cell\n"),
        (3e3, "clean", 1, "worse: 1 cell\n"),
        (4.053e6, "noisy", 3, "undecided: 1 cell\n"),
    ],
)
def test_the_status_tells_the_verdict(
    tmp_path: Path, pps: float, device: str, status: int, words: str
) -> None:
    _written(tmp_path, _simulated(4.2e6, device), _simulated(pps, device))
    found, output, errors = _call(tmp_path, "--json", str(tmp_path / "out.json"))
    assert (found, output.splitlines(keepends=True)[0]) == (status, words)
    assert "round 1, A: loses a short trial at 4.1" in errors or "at 4.2" in errors
    whole = json.loads((tmp_path / "out.json").read_text())
    assert whole["status"] == status and whole["cells"][0]["verdict"] == words.partition(":")[0]
    if pps > 1e6:
        low, high = whole["cells"][0]["ratio"]["interval"]
        assert low - 0.02 < pps / 4.2e6 < high + 0.02
    # The run of A is one as any other.
    assert main(["report", str(tmp_path / "run/a"), "--output", str(tmp_path / "report")]) == 0


def test_what_the_generator_can_show_of_a_is_what_b_must_do(tmp_path: Path) -> None:
    both = _simulated(4.2e6, "short-generator")
    _written(tmp_path, both, both)
    status, output, errors = _call(tmp_path, "--json", str(tmp_path / "out.json"))
    assert status == 0, output
    assert "  A: >= 2.99 Mpps  B / A at once: at least 96.5 % (the highest load, 97 % confidence)" in output
    assert "A: loses no short trial up to 2.992 Mpps" in errors
    assert json.loads((tmp_path / "out.json").read_text())["cells"][0]["ratio"]["limited"] == "at least"


def test_where_only_a_reaches_the_highest_load_b_does_at_most_what_is_seen(tmp_path: Path) -> None:
    _written(tmp_path, _simulated(4.2e6, "short-generator"), _simulated(2.7e6, "clean"))
    status, output, _ = _call(tmp_path, "--quiet")
    assert status == 1 and "B / A at once: at most 90." in output, output


_ONLY_SHORT = """import json, sys
for question in map(json.loads, sys.stdin):
    answer = {"ok": True, "virtual_time": True}
    if question["op"] == "trial":
        asked = round(question["rate_pps"] * question["duration_s"])
        sent = asked if question["duration_s"] < 1 else asked // 2
        answer = {"tx_packets": sent, "rx_packets": sent, "elapsed_s": question["duration_s"]}
    print(json.dumps(answer), flush=True)
"""


def test_a_generator_that_can_do_no_long_trial_of_a_is_reported_as_the_limit(tmp_path: Path) -> None:
    program = tmp_path / "generator.py"
    program.write_text(_ONLY_SHORT)
    tool = {"type": "exec", "command": f"{sys.executable} {program}"}
    both = described(generator=tool, search={"max_loss_ratio": 0.001})
    _written(tmp_path, both, both)
    status, output, _ = _call(tmp_path, "--quiet")
    assert status == 2 and "the search of A: asked" in output, output


def test_a_floor_is_compared_by_short_trials_only(tmp_path: Path) -> None:
    _written(tmp_path, _simulated(4.2e6, "glitch"), _simulated(3.9e6, "glitch"))
    status, output, _ = _call(tmp_path, "--quiet")
    assert status == 1 and "at once in 7 of 7 rounds" in output


_SOME_COME_BACK = """import json, sys
for question in map(json.loads, sys.stdin):
    answer = {"ok": True, "virtual_time": True}
    if question["op"] == "trial":
        sent = round(question["rate_pps"] * question["duration_s"])
        back = min(sent, round(4.2e6 * question["duration_s"]))
        answer = {"tx_packets": sent, "rx_packets": round(back * float(sys.argv[1]))}
        answer |= {"elapsed_s": question["duration_s"]}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize("strict", [False, True])
def test_b_that_loses_a_tenth_or_more_at_any_load_is_worse(tmp_path: Path, strict: bool) -> None:
    """It forwards, and so can be measured, unlike one with a dead direction."""
    program = tmp_path / "generator.py"
    program.write_text(_SOME_COME_BACK)
    tools = ({"type": "exec", "command": f"{sys.executable} {program} {share}"} for share in (1, 0.85))
    search = {"strict_rfc9971": strict}
    _written(tmp_path, *(described(generator=each, search=search) for each in tools))
    status, output, _ = _call(tmp_path, "--quiet")
    assert status == 1 and "it does less than 96.5% of A at once in 8 of 8 rounds" in output, output
    assert strict or "in round 8, loss does not fall with the load: at" in output
    assert _call(tmp_path, "--quiet", "--resume")[:2] == (status, output)


@pytest.mark.parametrize("dead", ["A", "B"])
def test_a_dead_direction_is_named(tmp_path: Path, dead: str) -> None:
    ways = [_simulated(4.2e6, "dead-direction" if side == dead else "one-direction") for side in "AB"]
    _written(tmp_path, *ways)
    for again in ("", "--resume"):
        status, output, _ = _call(tmp_path, *filter(None, ["--quiet", again]))
        assert status == 2 and "direction 1 is dead" in output, output


@pytest.mark.parametrize(
    ("b", "words"),
    [
        ({"matrix": {"backends": ["dpdkvhostuser"], "flows": [1024, 1]}}, "only in B: dpdkvhostuser"),
        ({"matrix": {"backends": ["linuxbridge"]}}, "only in A: dpdkvhostuser"),
        ({"search": {"final_duration": 30}}, "search.final_duration: 60.0 before, 30.0 now"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_sent(
    tmp_path: Path, b: dict[str, Any], words: str
) -> None:
    _written(tmp_path, _simulated(4.2e6), _simulated(4.2e6, **b))
    status, _, errors = _call(tmp_path)
    assert status == 2 and words in errors and not (tmp_path / "run").exists()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    _written(tmp_path, _simulated(4.2e6), _simulated(4.2e6))
    with pytest.raises(SystemExit) as end:
        _call(tmp_path, "--json", "/no/such/folder/x.json")
    assert end.value.code == 2 and not (tmp_path / "run").exists()


def test_one_at_a_time_runs_in_a_folder_and_a_used_one_is_refused(tmp_path: Path) -> None:
    _written(tmp_path, _simulated(4.2e6), _simulated(4.2e6))
    with closing(Journal(tmp_path / "run/b")):
        status, _, errors = _call(tmp_path)
    assert status == 2 and "another zeroloss is running in it" in errors
    assert _call(tmp_path, "--quiet")[0] == 0
    status, _, errors = _call(tmp_path)
    assert status == 2 and "not empty" in errors


def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended at any of its trials, and in the search of A."""
    whole, often = tmp_path / "whole", tmp_path / "often"
    for folder in (whole, often):
        folder.mkdir()
        _written(folder, _simulated(4.2e6), _simulated(3.99e6))
    expected = _call(whole, "--quiet", "--json", "-")
    assert expected[0] == 1
    write_trial, left = Journal.trial, 0

    def trial(self: Journal, cell: Any, part: Any, number: int, past: PastTrial) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        write_trial(self, cell, part, number, past)

    monkeypatch.setattr(Journal, "trial", trial)
    for more in (3, 40, 31, 7, 55, 23):
        left = more
        assert _call(often, "--quiet", "--resume")[0] == 130
    left = 10_000
    assert _call(often, "--quiet", "--resume", "--json", "-") == expected
    # What is decided is not measured again.
    lines = (often / "run/b" / FILE).read_bytes().count(b'"entry": "trial"')
    assert _call(often, "--quiet", "--resume", "--json", "-") == expected
    assert (often / "run/b" / FILE).read_bytes().count(b'"entry": "trial"') == lines


def test_a_device_that_cannot_be_set_up_is_tried_again_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _written(tmp_path, _simulated(4.2e6), _simulated(4.2e6))
    stand, calls = BareBench.stand, Counter[str]()

    def failing(self: BareBench, task: Any) -> Any:
        calls["all"] += 1
        if calls["all"] > 4:
            raise CellError("OVS is gone")
        return stand(self, task)

    monkeypatch.setattr(BareBench, "stand", failing)
    status, output, _ = _call(tmp_path)
    assert (status, calls["all"]) == (2, 7) and "3 times in a row: OVS is gone" in output


def test_each_visit_sets_up_its_side_through_the_agent_and_gives_it_back(
    agent: MadeUpAgent, tmp_path: Path
) -> None:
    quick = {"evidence": {"ovs_rundir": None}, "timeouts": {"active": 0.2, "forwarding": 0.2}}
    generators = [{"type": "sim", "capacity_pps": pps} for pps in (4.2e6, 3.9e6)]
    _written(tmp_path, *(with_agent(generator=each, matrix=_TWO_QUEUES, **quick) for each in generators))
    status, output, errors = _call(tmp_path)
    assert status == 1, output + errors
    visits = errors.count("  round ")
    assert visits >= 16 and agent.calls.count("put") >= 2 * (1 + visits)
    assert agent.ports == {} and agent.cpus == "1"
