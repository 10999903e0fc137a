"""What a run measures on a machine that is data: the CPUs, the memory, the settings that are kept with it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from netplugin.api.errors import InvalidRequest
from netplugin.api.pmd_models import PmdCore
from netplugin.cli.main import main
from netplugin.tuning.facts import DomainLive, Facts, Live, OvsLive
from netplugin.tuning.root import Unknown, known
from netplugin.tuning.verifying import result
from netplugin.tuning.verifying.measure import conditions
from netplugin.tuning.verifying.options import Options, settings_of
from netplugin.tuning.verifying.result import LatencySettings, ThroughputSettings
from tests.unit.tuning.golden import facts_of, plan_of, planned
from tests.unit.tuning.runs import FAST, SLOW, run, throughput


def isolated(facts: Facts, *cpus: int) -> Facts:
    return replace(facts, cpus=replace(facts.cpus, isolated=frozenset(cpus)))


def polling(*cpus: int) -> Live:
    pmds = tuple(PmdCore(cpu=cpu, numa_node=0, isolated=False, busy_percent=None, queues=()) for cpu in cpus)
    return Live(ovs=OvsLive("3.1.0", "DPDK 22.11", True, {"pmd-cpu-mask": "0x6"}, pmds=pmds))


class HostSettings(NamedTuple):
    latency: LatencySettings | None
    throughput: ThroughputSettings | None


def asked(facts: Facts, live: Live | None = None, plan: Any = None, **options: Any) -> HostSettings:
    return HostSettings(*settings_of(Options(**options), facts, live or Live(), plan))


def pair(found: HostSettings) -> tuple[int, int]:
    assert found.throughput
    return found.throughput.host_cpu, found.throughput.guest_cpu


def test_isolated_cpus_come_before_those_of_a_plan() -> None:
    facts = facts_of("published")
    found = asked(isolated(facts, 2, 3, 34, 35), plan=plan_of("published-realtime"))
    assert found.latency and found.latency.cpus == "2-3,34-35"
    assert pair(found) == (2, 3)  # 34 is the sibling of 2
    found = asked(facts, plan=plan_of("published-realtime"))
    assert found.latency and found.latency.cpus == "4-11"
    assert pair(found) == (4, 5)


def test_who_has_a_cpu_for_itself_keeps_it() -> None:
    domain = DomainLive("vm", (frozenset({5}), frozenset(range(64))), frozenset({0}), frozenset())
    live = replace(polling(2, 3), domains=(domain,))
    facts = isolated(facts_of("published"), 2, 3, 4, 5, 6)
    found = asked(facts, live)
    assert found.latency and found.latency.cpus == "4,6"
    assert pair(found) == (4, 6)
    named = asked(facts, live, cpus="2,5")
    assert named.latency and named.latency.cpus == "2,5"
    assert pair(named) == (2, 5)


def test_the_loop_stays_on_one_node() -> None:
    facts = isolated(facts_of("published"), 5, 20, 21)
    assert pair(asked(facts)) == (20, 21)
    assert pair(asked(isolated(facts, 5, 20))) == (5, 20)  # measured ones, on two nodes
    assert pair(asked(facts, only="throughput", loop_cpus="7,9")) == (7, 9)


def test_the_loop_takes_the_housekeeping_core_of_a_node_last() -> None:
    facts = facts_of("published")
    assert pair(asked(facts, only="throughput")) == (1, 2)
    assert pair(asked(facts, only="throughput", cpus="5")) == (1, 5)
    assert pair(asked(facts, only="throughput", cpus="0")) == (0, 1)  # if it is named
    # On node 0 only core 0, with its sibling 32, and core 1 are free.
    live = polling(*range(2, 16), *range(34, 48))
    assert pair(asked(facts, live, only="throughput")) == (17, 18)
    assert pair(asked(facts, polling(*range(2, 32), *range(34, 64)), only="throughput")) == (0, 1)


def test_without_two_measured_cpus_the_loop_takes_another() -> None:
    assert pair(asked(facts_of("small"), cpus="1")) == (0, 1)
    assert pair(asked(facts_of("small"), only="throughput")) == (0, 1)
    with pytest.raises(InvalidRequest) as refused:
        asked(facts_of("small"), polling(0), cpus="1", only="throughput", loop_cpus="1")
    assert refused.value.detail == "loop_cpus: 1 CPUs, and not 2"
    with pytest.raises(InvalidRequest) as refused:
        asked(facts_of("small"), polling(0, 1), only="throughput")
    assert "loop_cpus: the two sides need two CPUs" in refused.value.detail


@pytest.mark.parametrize(
    ("cpus", "words"),
    [
        (None, "cpus: none is isolated"),
        ("2", "cpus: 2 is no list of the CPUs on line, which are 0-1"),
        ("x", "cpus: x is no list of the CPUs on line"),
        ("", "cpus:  is no list of the CPUs on line"),
        ("3-1", "cpus: 3-1 is no list of the CPUs on line"),
    ],
)
def test_cpus_that_cannot_be_measured(cpus: str | None, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(facts_of("small"), cpus=cpus)
    assert words in refused.value.detail and refused.value.fix


def test_what_is_requested() -> None:
    found = asked(facts_of("small"), cpus="0-1", duration=600, rounds=7, frame_size=1024, window=5)
    assert found.latency and found.latency.round_s == 86  # no less than asked in all
    assert found.throughput and found.throughput.model_dump() == {
        "host_cpu": 0,
        "guest_cpu": 1,
        "hugepage_node": None,
        "window_s": 5,
        "frame_size": 1024,
    }
    assert asked(facts_of("small"), cpus="0", only="latency").throughput is None
    assert asked(facts_of("small"), cpus="0", only="throughput").latency is None


@pytest.mark.parametrize(("free", "expected"), [(63, None), (64, 0)])
def test_hugepages_are_used_if_enough_are_free(free: int, expected: int | None) -> None:
    facts = facts_of("small")
    pools = tuple(
        replace(pool, free=free if pool.size_kb == 2048 else 0) for pool in known(facts.memory.pools, ())
    )
    facts = replace(facts, memory=replace(facts.memory, pools=pools))
    found = asked(facts, cpus="0-1").throughput
    assert found and found.hugepage_node == expected


# -- the machine's settings ----------------------------------------------------------------------


def test_the_settings_that_are_kept() -> None:
    facts = isolated(facts_of("published"), 2, 3)
    found = conditions(facts, polling(1), frozenset({2, 3}))
    assert found["isolated CPUs"] == "2-3"
    assert found["OVS other_config:pmd-cpu-mask"] == "0x6"
    assert found["OVS"] == "3.1.0"
    assert (found["kernel in real time"], found["turbo"]) == ("off", "on")
    assert found["CPU model"] == known(facts.cpus.model, "")
    assert set(found) >= {
        "kernel",
        "nohz_full CPUs",
        "SMT",
        "turbo",
        "frequency governors",
        "tuned profile",
        "KSM",
        "transparent hugepages",
        "swap",
        "workqueues",
        "writeback",
        "sysctl kernel.nmi_watchdog",
        "hugepages of 2048 KB on node 0",
        "default affinity of interrupts",
        "interrupts that may come to the measured CPUs",
    }
    assert all(isinstance(value, str) and value for value in found.values())


def test_each_argument_of_the_kernel_stands_alone() -> None:
    found = conditions(facts_of("published"), Live(), frozenset())
    line = known(facts_of("published").kernel.arguments, None)
    assert line and {f"kernel argument {name}" for name, _ in line.arguments} == {
        name for name in found if name.startswith("kernel argument ")
    }


def test_what_cannot_be_read_is_reported_as_unknown() -> None:
    facts = facts_of("small")
    facts = replace(facts, memory=replace(facts.memory, ksm=Unknown("/sys/ksm", "not allowed")))
    found = conditions(facts, Live(ovs=Unknown("db.sock", "it hangs")), frozenset())
    assert found["KSM"] == "unknown (/sys/ksm: not allowed)"
    assert found["OVS"] == "unknown (db.sock: it hangs)"


# -- the command ---------------------------------------------------------------------------------


def command(line: str) -> int:
    try:
        return main(shlex.split(line))
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rounds 0", "rounds: must be at least 1"),
        ("--frame-size 9000", "frame_size: must be at most 1518"),
        ("--label ../x", "label: must be 1 to 64 letters, digits"),
        ("--only packets", "only: must be 'latency' or 'throughput'"),
        ("--cpus 8191", "cpus: 8191 is no list of the CPUs on line"),
        ("--root /tmp", "root: only this machine can be measured"),
    ],
)
def test_an_option_that_is_wrong_is_named(
    capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert command(f"host verify {options}") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and words in shown.err and "Traceback" not in shown.err


def test_every_option_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("help host verify") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in Options.model_fields.items():
        assert "--" + name.replace("_", "-") in shown
        assert str(field.description).split(";")[0] in shown


def test_compare_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label, samples in (("before", SLOW), ("after", FAST)):
        result.write(tmp_path, run(label, throughput=throughput(samples)))
    line = f"host verify compare --results {tmp_path}"
    assert command(f"{line} before after -f json --plot {tmp_path / 'p.svg'}") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "Better: throughput."
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    assert command(f"{line} after before") == 1
    assert "Worse: throughput." in capsys.readouterr().out
    assert command(f"{line} before gone") == 1
    assert "there are: after, before" in capsys.readouterr().err


def test_a_plan_of_the_options_gives_the_cpus() -> None:
    found = asked(facts_of("published"), plan=planned("published", pmd_cores=2, vm_cores=2))
    assert found.latency and found.latency.cpus == "4-5,36-37"
