"""A run description: each mistake is reported with file, line and field; what it means in cells."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.generators.contract import GeneratorInfo
from netplugin_zeroloss.journal import Cell, CellRecord, Part, control_cell
from netplugin_zeroloss.matrix import cells
from netplugin_zeroloss.matrix import host as hypervisor
from netplugin_zeroloss.matrix.cells import Ceilings, CellTask
from netplugin_zeroloss.matrix.description import check_same, read
from netplugin_zeroloss.matrix.nics import Nics
from netplugin_zeroloss.matrix.yaml_model import read_text
from netplugin_zeroloss.values import UnusableInput, line_rate_pps, mean_size
from netplugin_zeroloss.vnf.contract import TestpmdDescription, VppDescription

from tests.unit.zeroloss.matrix_runs import ROOT, described, description, with_agent

_INFO = GeneratorInfo("test", 5e6, can_abort=False, min_trial_s=0.7)
_HEAD = "name: run\ngenerator: {type: sim}\n"
_CELLS = "matrix: {backends: [a]}\n"


def _many(form: str) -> str:
    """Twelve lines, each of which has the one before it ten times."""
    lines = [f"x{n}: &x{n} {form.format(', '.join([f'*x{n - 1}'] * 10))}" for n in range(1, 12)]
    return "\n".join(["x0: &x0 {x: 1}", *lines])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("run.yaml", "mapping")),
        ("- a\n", ("run.yaml", "mapping")),
        ("name: [\n", ("run.yaml, line 2", "no YAML")),
        ("name: !!python/object:os.system x\n", ("run.yaml, line 1", "no YAML")),
        (_HEAD, ("matrix", "required")),
        (_HEAD + "matrix:\n  backend: [a]\n", ("line 4: matrix.backend", "no such field")),
        (_HEAD + _CELLS + "seed: 0x" + "f" * 5000, ("seed", "more than 64 bits")),
        (_HEAD + _CELLS + "search: {line_rate_pps: .inf}", ("line 4: search.line_rate_pps", "finite")),
        (_HEAD + _CELLS + "x: &x [*x]", ("line 4", "nested too deeply")),
        (_HEAD + _CELLS + _many("[{}]"), ("line", ": x", "more than 50000 values")),
        (_HEAD + _CELLS + _many("{{<<: [{}]}}"), ("line", ": x", "more than 50000 values")),
        (_HEAD + "#" * 70_000, ("run.yaml", "longer than")),
        (
            _HEAD + f"matrix: {{backends: [a], flows: {[*range(1, 100)]}, bursts: {[*range(1, 100)]}}}",
            ("line 3: matrix", "9801 combinations"),
        ),
        (_HEAD + "matrix:\n  backends: []\n", ("line 4: matrix.backends", "at least 1")),
        (_HEAD + "matrix:\n  backends: [a]\n  frames: [64, mix]\n", ("line 5: matrix.frames", "imix")),
        (_HEAD + "matrix:\n  backends: [a]\n  frames: [60]\n", ("line 5: matrix.frames[0]", "64")),
        (_HEAD + "matrix:\n  backends: [a, a]\n", ("line 3: matrix", "once")),
        (_HEAD + "matrix:\n  backends: [none]\n", ("line 3: matrix", "controls")),
        (_HEAD + "matrix:\n  backends: [a]\n  pmd_cores: [4, '2-5']\n", ("pmd_cores", "the same cell")),
        (_HEAD + "matrix:\n  backends: [a]\n  pmd_cores: ['x']\n", ("line 5", "2-5,8")),
        (_HEAD + "matrix:\n  backends: [a]\n  pmd_cores: ['']\n", ("line 5", "2-5,8")),
        (_HEAD + "matrix:\n  backends: [a]\n  pmd_cores: [0]\n", ("line 5: matrix.pmd_cores[0]",)),
        (_HEAD + _CELLS + "name: again\n", ("run.yaml, line 4", "name", "twice")),
        (_HEAD + _CELLS + "seed: &a [*a]\n", ("line 4", "seed")),
        (_HEAD + _CELLS + "search: {final_duration: -1}\n", ("line 4: search.final_duration",)),
        (_HEAD + _CELLS + "search: {final_duration: .nan}\n", ("line 4: search.final_duration",)),
        (_HEAD + _CELLS + "search:\n  goals: [ndr]\n", ("line 5: search.goals[0]", "csit-ndr")),
        (
            _HEAD + _CELLS + "search: {preset: tst009, max_loss_ratio: 0, final_duration: 60}\n",
            ("line 4: search", "leave out final_duration and max_loss_ratio, which the preset tst009 has"),
        ),
        (_HEAD + _CELLS + "exclude:\n  - {}\n", ("line 5: exclude[0]", "every cell")),
        (
            "name: run\ngenerator:\n  type: sim\n  dvice: clean\n" + _CELLS,
            ("line 4: generator.dvice", "no such field"),
        ),
        ("name: run\ngenerator: {type: ostinato}\n" + _CELLS, ("line 2: generator", "tcpreplay")),
        (_HEAD + _CELLS + "agent: {}\n", ("ends", "needed with an agent")),
        (_HEAD + _CELLS + "vnf: {type: external}\n", ("vnf", "agent: {}")),
        (_HEAD + _CELLS + "agent: {}\nvnf: {type: vpp, machine: {type: moon}}\n", ("line 5: vnf.machine",)),
    ],
)
def test_a_mistake_is_reported_where_it_is(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UnusableInput) as refused:
        read(text, "run.yaml")
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize("value", ["2026-99-99", "9" * 5000, '{"a":' * 3000])
def test_a_value_that_yaml_cannot_read(value: str) -> None:
    with pytest.raises(UnusableInput, match=r"run\.yaml"):
        read(f"name: {value}\n", "run.yaml")


def test_a_mac_address_needs_no_quotes() -> None:
    """In YAML 1.1 this one is a number of base 60."""
    ends = (
        "agent: {}\nvnf: {type: external}\nends:\n"
        "  - {network: {type: flat, physical_network: a}, mac: 52:54:00:12:34:56}\n"
        "  - {network: {type: flat, physical_network: b}}\n"
    )
    found = read(_HEAD + _CELLS + ends, "run.yaml").ends
    assert found is not None and found[0].mac == "52:54:00:12:34:56"


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(UnusableInput) as refused:
        read("name: ''\nsearch:\n  precision: 2\n" + _CELLS, "run.yaml")
    lines = str(refused.value).splitlines()
    assert [line.rpartition("line ")[2][:1] for line in lines] == ["1", "1", "3"]


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ({"mac": "52:54:00:5a:00:02"}, "two have mac"),
        ({"port_id": "zeroloss-2"}, "two have port_id"),
        ({"mtu": 1400}, "mtu 1400 is too small for frames of 1518 bytes"),
    ],
)
def test_ends_that_do_not_fit(ends: dict[str, Any], words: str) -> None:
    sections = with_agent(matrix={"backends": ["a"], "frames": ["imix"]})
    if "mtu" in ends:
        sections["ends"][1]["network"] |= ends
    else:
        sections["ends"][0] |= ends
    with pytest.raises(UnusableInput, match=words):
        read(yaml.safe_dump(sections), "run.yaml")


def test_a_control_of_the_vnf_names_its_devices() -> None:
    sections = with_agent(controls={"vnf": {"generator": {"type": "sim"}}})
    with pytest.raises(UnusableInput, match=r"controls\.vnf\.ports"):
        read(yaml.safe_dump(sections), "run.yaml")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match="No such file"):
        read_text(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(UnusableInput, match="UTF-8"):
        read_text(tmp_path / "latin.yaml")


# -- what it means -------------------------------------------------------------------------------

_WIDE = {
    "backends": ["linuxbridge", "dpdkvhostuser"],
    "pmd_cores": [1, "4-7"],
    "frames": [64, "imix"],
    "flows": [1, 1000],
    "queues": [1, 2],
}


def test_every_combination_is_a_cell_once() -> None:
    found = cells.cells(description(matrix=_WIDE))
    assert len(found) == len(set(found)) == 8 + 16
    assert {cell.pmd_cores for cell in found if cell.backend == "linuxbridge"} == {None}
    assert {cell.pmd_cores for cell in found if cell.backend == "dpdkvhostuser"} == {1, 4}
    assert found[0] == Cell("linuxbridge", None, "64", 1, 1)


def test_what_is_excluded_is_no_cell() -> None:
    exclude = [{"backend": "linuxbridge", "queues": 2}, {"frame": 64, "pmd_cores": 4}]
    found = cells.cells(description(matrix=_WIDE, exclude=exclude))
    assert len(found) == 4 + 12
    assert not [c for c in found if (c.frame, c.pmd_cores) == ("64", 4)]


def test_backends_without_pmd_threads_can_be_named() -> None:
    matrix = {"backends": ["mine"], "pmd_cores": [1, 2], "without_pmd": ["mine"]}
    assert len(cells.cells(description(matrix=matrix))) == 1


def test_pmd_cores_are_a_number_or_these_very_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hypervisor, "planned_cpus", lambda count, facts, nics: f"{count} of the plan")
    agent: Any = SimpleNamespace(list_physical_networks=list, backends=list)
    nics = Nics(tmp_path, dict)
    host = hypervisor.Hypervisor(agent, description(matrix=_WIDE), "vm", nics, tmp_path)
    assert host.pmd_cpus(Cell("dpdkvhostuser", 1)) == "1 of the plan"
    assert host.pmd_cpus(Cell("dpdkvhostuser", 4)) == "4-7"
    assert host.pmd_cpus(Cell("linuxbridge")) is None


_FREE = [
    {"network": {"type": "flat", "physical_network": name}, "port_security": False} for name in ("a", "b")
]


def test_modes_of_the_vnf_are_cells_with_a_vnf_each() -> None:
    axes = {**_WIDE, "queues": [1], "vnf_modes": ["mac", "noisy"]}
    vnf = {"type": "testpmd", "noisy": {"reads": 3}}
    control = {
        "vnf": vnf,
        "generator": {"type": "sim"},
        "ports": [
            {
                "attachment": "netdev",
                "device": n,
                "mac": f"52:54:00:00:00:0{i}",
                "peer_mac": f"52:54:00:00:01:0{i}",
            }
            for i, n in enumerate("ab")
        ],
    }
    sections = with_agent(matrix=axes, vnf=vnf, ends=_FREE, controls={"vnf": control})
    run = description(**sections)
    found = cells.cells(run)
    assert len(found) == len(set(found)) == 2 * (4 + 8)
    for cell in found:
        made = run.vnf_of(cell)
        assert isinstance(made, TestpmdDescription)
        assert (made.forward_mode, made.noisy.reads) == (cell.vnf_mode, 3)
    controls = {task.cell for task in cells.tasks(run) if task.part is Part.VNF}
    assert {cell.vnf_mode for cell in controls} == {"mac", "noisy"} and len(controls) == 8
    match = [{"vnf_mode": "noisy"}]
    assert {c.vnf_mode for c in cells.cells(description(**sections, exclude=match))} == {"mac"}
    assert Cell("a", 1).key == "a,pmd=1,frame=64,flows=1024,queues=1"
    assert Cell("a", 1, vnf_mode="io").key == "a,pmd=1,frame=64,flows=1024,queues=1,vnf=io"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"matrix": {"backends": ["a"], "vnf_modes": ["mac"]}},
            "matrix.vnf_modes: these are modes of testpmd",
        ),
        (
            {"matrix": {"backends": ["a"], "vnf_modes": ["mac", "io"]}, "vnf": {"type": "testpmd"}},
            "ends: the mode io sends from addresses",
        ),
        ({"vnf": {"type": "testpmd", "forward_mode": "macswap"}}, "ends: the mode macswap sends"),
        ({"matrix": {"backends": ["a"], "vnf_modes": ["icmpecho"]}}, "matrix.vnf_modes"),
        ({"matrix": {"backends": ["a"], "vnf_modes": ["io", "io"]}}, "once"),
    ],
)
def test_modes_that_do_not_fit(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableInput, match=words):
        description(**with_agent(**changed))


def test_a_vpp_that_sleeps_has_no_workers() -> None:
    vpp = {"type": "vpp", "poll_sleep_us": 200}
    with pytest.raises(UnusableInput, match=r"vnf\.poll_sleep_us: VPP's workers never sleep"):
        description(**with_agent(vnf=vpp, vnf_cores={"main": 0, "workers": "1"}))
    assert description(**with_agent(vnf=vpp, vnf_cores={"main": 0})).vnf == VppDescription(**vpp)


def test_controls_come_once_and_before_the_cells_they_are_for() -> None:
    sim = {"generator": {"type": "sim"}}
    run = description(matrix=_WIDE, controls={"loopback": sim, "vnf": sim})
    tasks = cells.tasks(run)
    assert len(tasks) == len(set(tasks)) == 24 + 4 + 8
    for place, task in enumerate(tasks):
        if task.part is Part.SEARCH:
            for part in (Part.LOOPBACK, Part.VNF):
                assert CellTask(control_cell(task.cell, part), part) in tasks[:place]
    assert len(cells.tasks(description(matrix=_WIDE))) == 24


def test_the_plan_of_a_cell_and_of_its_control() -> None:
    run = description(
        search={"final_duration": 30, "precision": 0.01, "goals": ["csit-pdr"], "buffer_packets": 9},
        controls={"final_duration": 5},
    )
    cell = Cell("dpdkvhostuser", 1, "imix", 7, 2)
    plan = cells.plan(run, CellTask(cell, Part.SEARCH), _INFO, Ceilings(3e6, 2e6))
    assert [goal.name for goal in plan.goals] == ["zero-loss", "csit-pdr"]
    assert (plan.headline.final_trial_s, plan.headline.relative_width) == (30, 0.01)
    assert plan.line_rate_pps == line_rate_pps(10e9, mean_size("imix"))
    assert (plan.mix, plan.frame_size, plan.flows) == ("imix", round(mean_size("imix")), 7)
    assert (plan.generator_max_pps, plan.can_abort, plan.min_trial_s) == (5e6, False, 0.7)
    assert (plan.buffer_packets, plan.warm_up_s) == (9, 5)
    assert (plan.generator_ceiling_pps, plan.vnf_ceiling_pps) == (3e6, 2e6)
    control = cells.plan(run, CellTask(control_cell(cell, Part.VNF), Part.VNF), _INFO, Ceilings())
    assert [goal.name for goal in control.goals] == ["zero-loss"]
    assert control.headline.final_trial_s == 5


def test_the_first_override_that_fits_counts() -> None:
    run = description(
        overrides=[
            {"cells": {"pmd_cores": 2}, "generator": {"type": "sim", "device": "noisy"}},
            {
                "cells": {"backend": "dpdkvhostuser"},
                "generator": {"type": "sim", "device": "drift"},
            },
        ]
    )

    def device(cell: Cell) -> str:
        chosen = run.generator_of(cell)
        assert isinstance(chosen, generators.Sim)
        return chosen.device

    assert device(Cell("dpdkvhostuser", 2)) == "noisy"
    assert device(Cell("dpdkvhostuser", 1)) == "drift"
    assert device(Cell("vdpa", 1)) == "clean"


def _control(part: Part, verdict: str, lower: float) -> CellRecord:
    result = {
        "verdict": verdict,
        "bounds_pps": [lower, 2 * lower],
        "zero_loss_pps": None,
        "goal": {"relative_width": 0.005},
        "plan": {"line_rate_pps": 10e6},
    }
    return CellRecord(Cell("none"), part, "", "", result)


@pytest.mark.parametrize(
    ("part", "verdict", "lower", "ceiling"),
    [
        (Part.LOOPBACK, "ndr", 4e6, 4e6),
        (Part.LOOPBACK, "generator_limited", 4e6, 4e6),
        # At the line it is no limit, at the generator's end that of the VNF is not known.
        (Part.LOOPBACK, "ndr", 9.99e6, None),
        (Part.LOOPBACK, "floor", 0.0, None),
        (Part.VNF, "ndr", 4e6, 4e6),
        (Part.VNF, "generator_limited", 4e6, None),
        (Part.VNF, "failed", 4e6, None),
    ],
)
def test_what_a_control_says_of_the_ceiling(
    part: Part, verdict: str, lower: float, ceiling: float | None
) -> None:
    control = _control(part, verdict, lower)
    if part is Part.LOOPBACK:
        assert cells.ceilings(control, None) == Ceilings(generator_pps=ceiling)
    else:
        assert cells.ceilings(None, control) == Ceilings(vnf_pps=ceiling)


def test_a_control_that_failed_has_no_ceiling() -> None:
    failed = CellRecord(Cell("none"), Part.VNF, "", "", error="no")
    assert cells.ceilings(None, failed) == Ceilings()


# -- the same, or not ----------------------------------------------------------------------------


def test_comments_and_order_are_no_difference() -> None:
    one = "# first\nname: run\nseed: 1\ngenerator: {type: sim}\n" + _CELLS
    other = _CELLS + _HEAD
    check_same(read(one, "a"), read(other, "b"), "folder")


def test_a_difference_is_reported_by_field() -> None:
    one = description(search={"precision": 0.005})
    other = description(search={"precision": 0.01}, matrix={"backends": ["a", "b"]})
    with pytest.raises(UnusableInput) as refused:
        check_same(one, other, "folder")
    error_text = str(refused.value)
    assert "search.precision: 0.005 before, 0.01 now" in error_text
    assert "matrix.backends" in error_text and "seed" not in error_text


@pytest.mark.parametrize("path", sorted((ROOT / "tools/trex").glob("matrix*.yaml")))
def test_the_templates_can_be_used(path: Path) -> None:
    run = read(path.read_text(encoding="utf-8"), path.name)
    assert cells.cells(run) and described()["name"] != run.name
