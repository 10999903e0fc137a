"""The page and the picture: whole, the same each time, needing nothing else, and safe with any text."""

from __future__ import annotations

import html
import re
import shlex
import struct
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from netplugin_zeroloss.generators.sim import FAMILIES
from netplugin_zeroloss.journal import Cell, RunRecord
from netplugin_zeroloss.report import plot
from netplugin_zeroloss.report.compare import compare
from netplugin_zeroloss.report.figures import Report, located, not_located, report_of
from netplugin_zeroloss.report.page import page
from netplugin_zeroloss.report.plot import error_mpps, label, lines_of
from netplugin_zeroloss.report.published import zstack
from netplugin_zeroloss.report.table import conditions, grids

from tests.unit.zeroloss.report_runs import (
    answering,
    device,
    hostile_run,
    mission,
    record,
    result,
    run_of,
)

#: Elements that HTML ends by itself.
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """What a page is made of; complains if its elements do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def run() -> RunRecord:
    return mission(7)


@pytest.fixture(scope="module")
def report(run: RunRecord) -> Report:
    return report_of(run, zstack())


@pytest.fixture(scope="module")
def outline(report: Report) -> Outline:
    return Outline(page(report))


def test_the_same_run_gives_the_same_page(report: Report) -> None:
    assert page(report) == page(report)
    assert plot.png(report) == plot.png(report)
    assert plot.svg(report) == plot.svg(report)


def test_it_refers_to_nothing_outside(outline: Outline) -> None:
    for name, attributes in outline.elements:
        for attribute in ("href", "src", "xlink:href", "action", "data"):
            target = attributes.get(attribute) or "#"
            assert target.startswith("#"), (name, attributes)
    assert {"iframe", "object", "embed", "link", "img", "form"} & {n for n, _ in outline.elements} == set()


def test_no_script_can_run(report: Report, outline: Outline) -> None:
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    assert policy in page(report) and not outline.all("script")


def test_the_command_can_be_pasted(run: RunRecord) -> None:
    command = ["netplugin-zeroloss", "matrix", "my run's.yaml", "--folder", "/tmp/a b", "--name=$x\n<b>"]
    environment = {**run.environment, "command": command, "sessions": [{"command": command[:3]}]}
    text = page(report_of(replace(run, environment=environment)))
    shown = re.findall('<pre class="command">(.*?)</pre>', text, re.DOTALL)
    assert [shlex.split(html.unescape(each)) for each in shown] == [command, command[:3]]


def test_every_number_of_the_table_leads_to_its_cell(outline: Outline, report: Report) -> None:
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = [a["href"] for a in outline.all("a") if "aria-label" in a]
    assert len(links) == len(report.figures)
    assert {str(link)[1:] for link in links} <= set(ids)


def test_tables_have_heads_with_a_scope(outline: Outline) -> None:
    heads = outline.all("th")
    assert heads and all(head.get("scope") in ("row", "col") for head in heads)
    assert len(outline.all("caption")) == len(outline.all("table"))
    assert outline.all("html") == [{"lang": "en"}]
    assert all(svg.get("aria-label") for svg in outline.all("svg"))


def test_all_trials_are_there_with_their_reasons(outline: Outline, run: RunRecord) -> None:
    text = " ".join(" ".join(outline.text).split())
    trials = [
        trial
        for entry in run.records
        if entry.result is not None and entry.cell in run.cells
        for trial in entry.result["trial_log"]
    ]
    assert len(trials) > 200
    for trial in trials:
        assert " ".join(trial["reason"].split()) in text
    assert "rx_ring_full" in text and "no free VF on ens1f0" in text
    assert "0xc" in text and "--forward-mode=mac" in text and "6.1.0" in text


def test_what_is_not_whole_or_not_real_is_reported(outline: Outline) -> None:
    text = " ".join(outline.text)
    assert "Incomplete: 1 of 9 cells was not measured, 1 failed." in text
    assert "Simulated: no frame was sent" in text and "Simulated: not valid for hardware." in text
    assert "published, other hardware" in text


def test_a_complete_run_of_real_devices_says_neither() -> None:
    real = result(device(), environment={"generator": "trex-stl", "host": "h", "started": "now"})
    run = run_of([record(Cell("sriov"), real)])
    text = page(report_of(run))
    assert (
        "Incomplete" not in text
        and "imulated" not in text
        and "Emulated" not in text
        and "Complete: 1 cell." in text
    )


def test_hostile_text_stays_text() -> None:
    run = hostile_run()
    text = page(report_of(run))
    outline = Outline(text)
    assert not outline.all("script") and not outline.all("img")
    assert not any(name.startswith("on") for _, a in outline.elements for name in a)
    assert "{{ 7*7 }}" in text
    assert "<script>alert" not in text and "</script>" not in text
    plot.png(report_of(run))
    ElementTree.fromstring(plot.svg(report_of(run)))


@settings(max_examples=8)
@example("_private")
@given(st.text(max_size=40))
def test_any_name_can_be_drawn(name: str) -> None:
    run = run_of([record(Cell(name, 1), answering([1e6]))], name=name)
    drawn = "".join(ElementTree.fromstring(plot.svg(report_of(run))).itertext())
    assert name != "_private" or name in drawn
    Outline(page(report_of(run)))


# -- loss accounting -------------------------------------------------------------------------------


def test_loss_that_no_place_counted_is_reported() -> None:
    found = answering([1e6])
    [trial] = found["trial_log"]
    before = trial["measured"]
    lost = before["tx_packets"] - before["rx_packets"]
    run = run_of([record(Cell("sriov"), found)])
    trial["measured"] = {**before, "evidence": {"ovs.drop": 100, "generator.rx": 7}}
    assert (located(trial)["ovs.drop"], not_located(trial)) == (100, lost - 100)
    assert report_of(run).figures[0].unexplained == (lost - 100, 0)
    assert f"{lost - 100:,} frames" in " ".join(conditions(report_of(run)))
    assert f"unexplained {lost - 100:,}" in page(report_of(run))
    trial["measured"] = {**before, "rx_errors": 7, "evidence": {"generator.rx": 7}}
    assert not_located(trial) == lost - 7  # those came back
    trial["measured"] = {**before, "evidence": {"ovs.drop": lost + 3, "unexplained": -3}}
    assert located(trial) == {"ovs.drop": lost + 3}
    assert report_of(run).figures[0].unexplained == (0, 3)
    assert "counted 3 frames more than were missing" in " ".join(conditions(report_of(run)))


# -- pictures --------------------------------------------------------------------------------------


def test_the_picture_is_png_and_svg(report: Report) -> None:
    data = plot.png(report)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 500
    root = ElementTree.fromstring(plot.svg(report))
    text = " ".join(root.itertext())
    assert "PMD cores" in text and "Mpps, all directions together" in text
    assert "linuxbridge" in text and "NDR, simulated: 64-byte" in text and "published, other hardware" in text


def test_bars_are_the_interval_or_the_bounds(report: Report) -> None:
    grid = grids(report)[0]
    lines = {line.backend: line for line in lines_of(grid, ["linuxbridge", "dpdkvhostuser", "vdpa", "sriov"])}
    noisy = lines["dpdkvhostuser"].rated[0]
    assert noisy.spread is not None and noisy.rate_pps is not None
    low, high = noisy.spread["interval_pps"]
    expected = ((noisy.rate_pps - low) / 1e6, (high - noisy.rate_pps) / 1e6)
    assert error_mpps(noisy) == pytest.approx(expected)
    limited = lines["vdpa"].rated[0]
    assert limited.bounds_pps is not None and limited.rate_pps is not None
    assert error_mpps(limited) == pytest.approx((0, (limited.bounds_pps[1] - limited.rate_pps) / 1e6))
    assert lines["linuxbridge"].flat and not lines["vdpa"].flat
    assert label(lines["vdpa"]).split() == "vdpa; floor with 2 cores; VNF limit with 4 cores".split()
    assert label(lines["sriov"]) == "sriov; failed"
    assert len({line.colour for line in lines.values()}) == len({line.marker for line in lines.values()}) == 4


def test_a_run_without_any_rate_has_a_picture_that_shows_it() -> None:
    report = report_of(run_of([record(Cell("sriov"), None, error="no NIC")]))
    assert "No cell has an NDR." in plot.svg(report)
    assert plot.png(report)[:4] == b"\x89PNG"


def test_whatever_a_search_can_find_can_be_reported() -> None:
    cells = [Cell(name, 1) for name in FAMILIES]
    run = run_of([record(cell, result(FAMILIES[cell.backend])) for cell in cells])
    report = report_of(run)
    outline = Outline(page(report))
    assert len(outline.all("figure")) == 1 and len(outline.all("table")) == 1 + len(cells)
    assert compare(run, run).status == 0
