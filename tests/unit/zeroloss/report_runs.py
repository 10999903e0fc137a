"""Runs to report on and to compare: cells that were really searched, on simulated devices."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.generators.devices import DeviceSpec
from netplugin_zeroloss.generators.sim import FAMILIES, SimFamily, SimGenerator
from netplugin_zeroloss.journal import (
    NO_BACKEND,
    Cell,
    CellRecord,
    Journal,
    Part,
    RunRecord,
    read_run,
)
from netplugin_zeroloss.report.figures import report_of
from netplugin_zeroloss.report.published import PublishedRelation, zstack
from netplugin_zeroloss.report.table import csv_text, json_text, markdown
from netplugin_zeroloss.search.follow_up import FollowUpRun, follow_up
from netplugin_zeroloss.search.result import outcome_of, result_of, spread
from netplugin_zeroloss.search.search import carry_out, run_search
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import OTHER_GOALS, Goal, Measurement, TrialRequest, headline

LINE_PPS = 14.88e6
ENVIRONMENT: Mapping[str, Any] = {
    "generator": "sim:lab",
    "started": "2026-01-02T03:04:05+00:00",
    "netplugin": "0.1.0",
    "python": "3.11.2",
    "host": "lab-1",
    "kernel": "6.1.0",
    "machine": "x86_64",
    "cpus": 8,
}
SETUP: Mapping[str, Any] = {
    "pmd_cpus": [2, 3],
    "other_config": {"pmd-cpu-mask": "0xc", "dpdk-init": "true"},
    "vnf": {
        "name": "testpmd",
        "version": "22.11",
        "configuration": {"arguments": "--forward-mode=mac"},
    },
}


class Reading(Generator):
    """A generator whose trials also have readings of the host."""

    def __init__(self, inner: Generator, readings: Mapping[str, float]) -> None:
        self._inner, self._readings = inner, readings

    @property
    def info(self) -> Any:
        return self._inner.info

    def run(self, request: TrialRequest) -> Measurement:
        return replace(self._inner.run(request), readings=self._readings)


def device(name: str = "clean", capacity_pps: float = 4.2e6, slower: float = 0.0) -> SimFamily:
    """A simulated family with another capacity; ``slower``: by this part its limit is lower.

    Where stalls make the limit it is the ring that matters, so both are scaled.
    """
    family, part = FAMILIES[name], 1 - slower
    specs: tuple[DeviceSpec, ...] = tuple(
        replace(
            spec,
            capacity_pps=capacity_pps * part,
            ring_packets=spec.ring_packets * part,
        )
        for spec in family.devices
    )
    return replace(family, devices=specs)


def result(
    family: SimFamily,
    *,
    repeats: int = 1,
    seed: object = 1,
    goals: Sequence[Goal] = (headline(),),
    readings: Mapping[str, float] | None = None,
    environment: Mapping[str, Any] = ENVIRONMENT,
    **plan: Any,
) -> dict[str, Any]:
    """What ``search --json`` writes of this device; of real time it says nothing."""
    whole = SearchPlan(tuple(goals), LINE_PPS, **plan)
    generator: Generator = SimGenerator(family, random.Random(f"{seed}/{family.name}"))
    if readings is not None:
        generator = Reading(generator, readings)
    runs = [replace(run_search(whole, generator), wall_s=1.0) for _ in range(repeats)]
    rate = outcome_of(runs).answer_pps
    return result_of(whole, runs, environment, FollowUpRun(carry_out(follow_up(whole, rate), generator)))


def record(
    cell: Cell,
    found: dict[str, Any] | None,
    *,
    part: Part = Part.SEARCH,
    error: str | None = None,
) -> CellRecord:
    started, ended = "2026-01-02T03:04:05+00:00", "2026-01-02T03:05:05+00:00"
    return CellRecord(cell, part, started, ended, found, error, SETUP)


def run_of(records: Sequence[CellRecord], *more: Cell, name: str = "lab", **fields: Any) -> RunRecord:
    """A run with these records, and cells that it has not come to."""
    cells = tuple(dict.fromkeys([*(r.cell for r in records if r.part is Part.SEARCH), *more]))
    environment = fields.pop("environment", ENVIRONMENT)
    return RunRecord(
        name,
        fields.pop("description", "name: lab\n"),
        environment,
        cells,
        tuple(records),
    )


def mission(repeats: int = 1) -> RunRecord:
    """The table of all that can happen to a cell: each verdict, a failure, a cell not come to."""
    ovs = {
        "host.softirq_cpus": 0.02,
        "host.system_cpus": 0.05,
        "ovs.pmd_busy_share": 0.97,
        "ovs.pmd_cycles_per_packet": 231.0,
    }
    kernel = {
        "host.softirq_cpus": 0.93,
        "host.system_cpus": 0.12,
        "host.softirq_busiest_share": 0.91,
    }
    records = [
        record(
            Cell("linuxbridge"),
            result(device("noisy", 0.9e6), repeats=repeats, readings=kernel),
        ),
        record(Cell(NO_BACKEND), result(device("wire-speed", 2e7)), part=Part.LOOPBACK),
    ]
    for cores, capacity in ((1, 2.3e6), (2, 4.4e6), (4, 8.0e6)):
        found = result(
            device("noisy" if cores == 1 else "clean", capacity),
            repeats=repeats,
            readings=ovs,
            goals=(headline(), OTHER_GOALS["csit-pdr"](0.005)),
        )
        records.append(record(Cell("dpdkvhostuser", cores), found))
    records += [
        record(Cell("vdpa", 1), result(device("short-generator"), readings=ovs)),
        record(Cell("vdpa", 2), result(device("glitch"), readings=ovs)),
        record(Cell("vdpa", 4), result(device("clean", 4e6), vnf_ceiling_pps=4.05e6)),
        record(
            Cell("sriov"),
            None,
            error="the port could not be plugged: no free VF on ens1f0",
        ),
    ]
    return run_of(records, Cell("sriov", frame="imix"), name="lab: four backends")


def write_run(run: RunRecord, folder: Path) -> Path:
    """The folder that a run would have left."""
    with closing(Journal(folder)) as journal:
        journal.run(run)
        for entry in run.records:
            journal.end(entry)
    return folder


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result with these single ones as its repeats, as ``result_of`` would have made it."""
    verdicts = Counter(found["verdict"] for found in results)
    verdict = verdicts.most_common(1)[0][0]
    chosen = [n for n, found in enumerate(results) if found["verdict"] == verdict]
    chosen.sort(key=lambda n: results[n]["bounds_pps"][0])
    shown = chosen[(len(chosen) - 1) // 2]
    answers = [found["zero_loss_pps"] for found in results]
    spread_found = spread([rate for rate in answers if rate is not None])
    trials = [{**trial, "repeat": n} for n, found in enumerate(results) for trial in found["trial_log"]]
    return {
        **results[shown],
        "repeats": {
            "count": len(results),
            "shown": shown,
            "verdicts": dict(verdicts),
            "answers_pps": answers,
            "spread": asdict(spread_found) if spread_found else None,
        },
        "trial_log": trials,
        "trials": len(trials),
    }


def answering(rates: Sequence[float | None], *, late: bool = True) -> dict[str, Any]:
    """A result with these answers (None: a floor); ``late``: loss was a matter of chance."""
    template = result(device())
    trial = dict(template["trial_log"][0])
    trial["measured"] = {**trial["measured"], "elapsed_s": 20.0 if late else 0.1}
    singles = [
        {
            **template,
            "verdict": "floor" if rate is None else "ndr",
            "zero_loss_pps": rate,
            "bounds_pps": [rate or 0.0, 1.005 * rate if rate else 1e5],
            "trial_log": [trial],
        }
        for rate in rates
    ]
    return merged(singles)


#: For every string of a run.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' & {{ 7*7 }} \x00 \ud800 $\\foo$"


def hostile(value: Any) -> Any:
    """The same with every string spoilt, but those that programs read."""
    if isinstance(value, dict):
        return {
            name if name in _NAMES_READ else name + HOSTILE: (
                inner if name in _VALUES_READ else hostile(inner)
            )
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [hostile(inner) for inner in value]
    return HOSTILE if isinstance(value, str) else value


_FLOOR = result(device("glitch"), readings={"host.softirq_cpus": 1.0})
_NAMES_READ = {
    *_FLOOR,
    *_FLOOR["goals"][0],
    *_FLOOR["goals"][0]["rfc9971"],
    *_FLOOR["rfc9971"],
    *_FLOOR["goal"],
    *_FLOOR["trial_log"][0],
    *_FLOOR["trial_log"][0]["measured"],
    *_FLOOR["evidence"],
    *_FLOOR["repeats"],
    *_FLOOR["plan"],
    *_FLOOR["evidence"]["floor"],
}
_VALUES_READ = {"verdict", "verdicts", "repeats", "plan"}


def hostile_run() -> RunRecord:
    """A run whose strings are all hostile."""
    cell = Cell(HOSTILE, 2, HOSTILE)
    setup = {HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]}
    entry = replace(record(cell, hostile(_FLOOR)), setup=setup)
    failed = record(Cell(HOSTILE, 1, HOSTILE), None, error=HOSTILE)
    return run_of(
        [entry, failed, record(Cell("plain", 2, HOSTILE), result(device()))],
        name=HOSTILE,
        description=HOSTILE,
        environment={HOSTILE: HOSTILE, "host": HOSTILE},
    )


def _keep(folder: Path) -> None:
    """Make the run that tests keep, and its tables."""
    shutil.rmtree(folder, ignore_errors=True)
    whole = mission()
    records = [r for r in whole.records if r.cell.backend not in ("linuxbridge", "none")]
    few = [r for r in records if r.cell.pmd_cores != 1]
    run = read_run(write_run(replace(whole, cells=whole.cells[1:], records=tuple(few)), folder))
    report = report_of(run, zstack(), PublishedRelation.OTHER)
    for name, make in (("md", markdown), ("csv", csv_text), ("json", json_text)):
        (folder / f"table.{name}").write_text(make(report), encoding="utf-8")


if __name__ == "__main__":
    _keep(Path("tests/data/zeroloss-run"))
