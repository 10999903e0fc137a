"""More than two ends: pairs of them, each a path through the VNF, and the path that is dead or loses."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from netplugin_zeroloss import paths
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.generators.contract import Generator, GeneratorInfo
from netplugin_zeroloss.journal import Cell, Part
from netplugin_zeroloss.matrix.agent_bench import addressed
from netplugin_zeroloss.matrix.bench import CheckedGenerator, wait_until_forwarding
from netplugin_zeroloss.matrix.cells import CellTask
from netplugin_zeroloss.report.figures import report_of
from netplugin_zeroloss.report.table import csv_text, markdown
from netplugin_zeroloss.search.result import result_of
from netplugin_zeroloss.values import Direction, GeneratorError, Measurement, TrialRequest, UnusableInput
from netplugin_zeroloss.vnf.contract import TestpmdDescription

from netplugin.libvirt.image_domain import NICS
from tests.unit.zeroloss.helpers import plan, run_search
from tests.unit.zeroloss.made_up_agent import MadeUpAgent, bench_on, cell_description, search_of
from tests.unit.zeroloss.matrix_runs import description, with_agent
from tests.unit.zeroloss.report_runs import record, run_of

FOUR = ["left", "right", "third", "fourth"]
PORTS = [f"zeroloss-{number}" for number in range(1, 5)]


def ends(*networks: str, **more: Any) -> list[dict[str, Any]]:
    return [{"network": {"type": "flat", "physical_network": name}, **more} for name in networks]


def interfaces(count: int) -> dict[str, Any]:
    made = [{"send": f"g{n}", "receive": f"g{n ^ 1}"} for n in range(count)]
    return {"type": "tcpreplay", "paths": made}


# -- which path enters where ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "of", "where"),
    [
        (1, 2, (0,)),
        (2, 2, (0, 1)),
        (4, 2, (0, 1, 0, 1)),
        (2, 4, (0, 2)),
        (4, 4, (0, 1, 2, 3)),
        (3, 6, (0, 2, 4)),
        (8, 8, tuple(range(8))),
    ],
)
def test_each_path_has_an_end(count: int, of: int, where: tuple[int, ...]) -> None:
    assert paths.fit(count, of) and paths.entrances(count, of) == where
    assert len({end // 2 for end in where}) == of // 2, "no pair is without traffic"


def test_paths_have_the_names_of_their_ports() -> None:
    assert paths.names(2, PORTS) == ("zeroloss-1 to zeroloss-2", "zeroloss-3 to zeroloss-4")
    assert paths.names(4, PORTS)[3] == "zeroloss-4 to zeroloss-3"
    assert paths.names(3, PORTS) == paths.names(2, ()) == ()
    assert paths.described([1, 7], paths.names(4, PORTS)) == "path 1 (zeroloss-2 to zeroloss-1) and path 7"


# -- the description -----------------------------------------------------------------------------


def test_ends_have_names_and_addresses_of_their_own() -> None:
    run = description(**with_agent(ends=ends(*FOUR), generator=interfaces(4)))
    assert run.ends is not None
    assert [end.port_id for end in run.ends] == PORTS
    assert len({*(end.mac for end in run.ends), *(end.peer_mac for end in run.ends)}) == 8


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ends": ends("a", "b", "c")}, "ends: they come in pairs, and there are 3"),
        ({"ends": ends("a")}, "ends"),
        ({"ends": ends(*map(str, range(10)))}, "ends"),
        (
            {"ends": [*ends("a", "b"), *ends("c", mac="52:54:00:5a:00:01"), *ends("d")]},
            "ends: two have mac 52:54:00:5a:00:01",
        ),
        ({"ends": ends(*FOUR), "generator": interfaces(1)}, "generator.paths: 1 for 4 ends"),
        ({"ends": ends(*FOUR), "generator": interfaces(3)}, "generator.paths: 3 for 4 ends"),
        (
            {
                "ends": ends(*FOUR),
                "overrides": [{"cells": {"queues": 1}, "generator": interfaces(6)}],
            },
            "generator.paths: 6 for 4 ends",
        ),
        (
            {
                "ends": ends(*FOUR),
                "vnf": {
                    "type": "testpmd",
                    "nics": list(NICS[:2]),
                    "machine": {"type": "ssh", "host": "h", "key": "/k"},
                },
            },
            "vnf.nics: 2 NICs for 4 ends",
        ),
    ],
)
def test_ends_that_cannot_be(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableInput, match=words):
        description(**with_agent(**changed))


def test_a_vm_on_an_image_has_a_nic_for_each_end() -> None:
    run = description(
        **with_agent(
            ends=ends(*FOUR), vm={"image": "/image"}, vnf={"type": "testpmd"}, generator=interfaces(2)
        )
    )
    assert isinstance(run.vnf, TestpmdDescription)
    assert run.vnf.nics == NICS[:4]


# -- the hypervisor ------------------------------------------------------------------------------


def test_all_ports_are_plugged_and_given_back(agent: MadeUpAgent) -> None:
    run = cell_description(ends=ends(*FOUR))
    with bench_on(run).stand(search_of(run)) as stand:
        assert list(agent.ports) == PORTS
        assert [port["port_id"] for port in stand.setup["ports"]] == PORTS
        assert stand.setup["ends"] == PORTS
    assert agent.ports == {}


@pytest.mark.parametrize("number", range(1, 5))
def test_whichever_port_fails_the_others_are_given_back(agent: MadeUpAgent, number: int) -> None:
    agent.fails = ("put", number)
    run = cell_description(ends=ends(*FOUR))
    with ExitStack() as parts, pytest.raises(Exception, match="put is refused"):
        parts.enter_context(bench_on(run).stand(search_of(run)))
    assert agent.ports == {}


@pytest.mark.parametrize(("count", "entered"), [(4, [0, 1, 2, 3]), (2, [0, 2])])
def test_frames_go_to_the_ports_at_which_they_enter(count: int, entered: list[int]) -> None:
    run = description(**with_agent(ends=ends(*FOUR), generator=interfaces(count)))
    assert run.ends is not None
    made = addressed(run.generator, run.ends)
    assert isinstance(made, generators.Tcpreplay)
    found = [(path.frames.source_mac, path.frames.destination_mac) for path in made.paths]
    assert found == [(run.ends[end].peer_mac, run.ends[end].mac) for end in entered]


def test_a_batch_of_trex_has_the_addresses_of_all_ends() -> None:
    run = description(**with_agent(ends=ends(*FOUR), generator={"type": "trex-stf", "trex_dir": "/t"}))
    assert run.ends is not None
    made = addressed(run.generator, run.ends)
    assert isinstance(made, generators.TrexStf)
    assert [macs.destination_mac for macs in made.macs] == [end.mac for end in run.ends]


def test_a_control_has_ends_of_its_own(agent: MadeUpAgent) -> None:
    run = cell_description(ends=ends(*FOUR), controls={"loopback": {"generator": interfaces(1)}})
    bench = bench_on(run)
    task = CellTask(Cell("none"), Part.LOOPBACK)
    assert bench._port_ids(task) == [] and bench._generator_of(task).type == "tcpreplay"


# -- a path that is dead, or loses ---------------------------------------------------------------


class Scripted(Generator):
    """Directions as a script has them, trial by trial; the last goes on."""

    def __init__(self, *trials: Sequence[tuple[int, int]]) -> None:
        self._trials = list(trials)
        self.requests: list[TrialRequest] = []

    @property
    def info(self) -> GeneratorInfo:
        return GeneratorInfo("scripted")

    def run(self, request: TrialRequest) -> Measurement:
        self.requests.append(request)
        ways = self._trials.pop(0) if len(self._trials) > 1 else self._trials[0]
        sent, received = (sum(way[n] for way in ways) for n in (0, 1))
        return Measurement(
            sent, received, request.duration_s, directions=tuple(Direction(*way) for way in ways)
        )


WELL = [(100, 100)] * 4
ASKED = TrialRequest(1000, 1.0)


def test_the_path_that_does_not_forward_is_named_before_the_search() -> None:
    with pytest.raises(GeneratorError) as failed:
        wait_until_forwarding(Scripted([(100, 100), (100, 90), (100, 0), (100, 100)]), ASKED, 0.0, PORTS)
    error_text = str(failed.value)
    assert "on path 2 (zeroloss-3 to zeroloss-4): of 100 sent none came back" in error_text
    assert "on 3 of 4 paths some did" in error_text


def test_all_paths_that_do_not_forward_are_named() -> None:
    with pytest.raises(GeneratorError, match=r"path 0 \(zeroloss-1 to zeroloss-2\) and path 1 \(zeroloss-3"):
        wait_until_forwarding(Scripted([(100, 0), (100, 0)]), ASKED, 0.0, PORTS)


def checked(inner: Generator, *checks: Callable[[], None]) -> CheckedGenerator:
    return CheckedGenerator(inner, checks, PORTS, 0.0)


def test_a_path_that_dies_during_the_search_ends_the_cell_with_its_name() -> None:
    dead = [(100, 100), (100, 100), (100, 100), (100, 0)]
    tool = checked(Scripted(WELL, dead))
    assert tool.run(ASKED).rx_packets == 400
    with pytest.raises(GeneratorError, match=r"path 3 \(zeroloss-4 to zeroloss-3\)"):
        tool.run(ASKED)


def test_a_path_on_which_nothing_is_sent_any_more_ends_the_cell_too() -> None:
    tool = checked(Scripted([(100, 100), (0, 0), (100, 100), (100, 100)]))
    with pytest.raises(GeneratorError, match=r"path 1 \(zeroloss-2 to zeroloss-1\): of 0 sent none came"):
        tool.run(ASKED)


def test_a_path_that_starves_under_overload_counts_as_loss() -> None:
    inner = Scripted([(5000, 5000), (5000, 5000), (5000, 4000), (5000, 0)], WELL)
    measured = checked(inner).run(replace(ASKED, rate_pps=20_000, latency=True, readings=3, burst=8))
    assert measured.directions[3].rx_packets == 0, "the trial is as it was"
    [_, probe] = inner.requests
    assert probe.purpose == "does it forward?" and probe.rate_pps <= 1000
    assert (probe.latency, probe.readings, probe.burst) == (False, 0, 1)


def test_loss_is_reported_by_path() -> None:
    """Three of four paths can take 1 Mpps each, one of them half of it."""

    class Uneven(Generator):
        info = GeneratorInfo("uneven", virtual_time=True)

        def run(self, request: TrialRequest) -> Measurement:
            share = request.rate_pps / 4
            ways = [
                Direction(round(share * request.duration_s), round(min(share, limit) * request.duration_s))
                for limit in (1e6, 1e6, 0.5e6, 1e6)
            ]
            return Measurement(
                sum(way.tx_packets for way in ways),
                sum(way.rx_packets for way in ways),
                request.duration_s,
                directions=tuple(ways),
            )

    run = run_search(plan(), Uneven())
    assert run.headline.lower_pps == pytest.approx(2e6, rel=0.006), "four times the worst path"
    found = result_of(plan(), [run], {"generator": "uneven"})
    lost = found["evidence"]["lost_by_direction"]
    assert lost[2] > 0 and [lost[n] for n in (0, 1, 3)] == [0, 0, 0]
    made = replace(record(Cell("dpdkvhostuser", 2), found), setup={"ends": PORTS})
    report = report_of(run_of([made]))
    assert f"zeroloss-3 to zeroloss-4: {lost[2]:,} frames".replace(",", "") in markdown(report).replace(
        ",", ""
    )
    [row] = csv.DictReader(io.StringIO(csv_text(report)))
    assert (row["paths"], row["worst_path"]) == ("4", "zeroloss-3 to zeroloss-4")
    assert row["worst_path_lost_packets"] == str(lost[2])
    two = report_of(run_of([replace(made, setup={})]))
    assert "lost by path" not in markdown(two) and "lost by path" in markdown(report)
