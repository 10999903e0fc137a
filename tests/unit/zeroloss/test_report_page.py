"""The page and the picture: whole, the same each time, needing nothing else, and safe with any text."""

from __future__ import annotations

import hashlib
import re
import struct
from base64 import b64encode
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from netplugin_zeroloss.generators.sim import FAMILIES
from netplugin_zeroloss.journal import Cell, RunRecord
from netplugin_zeroloss.report import plot
from netplugin_zeroloss.report.compare import compare
from netplugin_zeroloss.report.figures import Report, located, not_located, report_of, unexplained
from netplugin_zeroloss.report.page import answer, not_known, page
from netplugin_zeroloss.report.plot import HEIGHT, WIDTH, error_mpps, label, lines_of, trial_plot
from netplugin_zeroloss.report.published import PublishedRelation, zstack
from netplugin_zeroloss.report.table import grids

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
    return report_of(run, zstack(), PublishedRelation.OTHER)


@pytest.fixture(scope="module")
def outline(run: RunRecord, report: Report) -> Outline:
    return Outline(page(run, report))


def test_the_same_run_gives_the_same_page(run: RunRecord, report: Report) -> None:
    assert page(run, report) == page(run, report)
    assert plot.png(report) == plot.png(report)
    assert plot.svg(report) == plot.svg(report)


def test_it_refers_to_nothing_outside(outline: Outline) -> None:
    for name, attributes in outline.elements:
        for attribute in ("href", "src", "xlink:href", "action", "data"):
            target = attributes.get(attribute) or "#"
            assert target.startswith("#"), (name, attributes)
    assert {"iframe", "object", "embed", "link", "img", "form"} & {n for n, _ in outline.elements} == set()


def test_no_script_runs_but_its_own(run: RunRecord, report: Report) -> None:
    text = page(run, report)
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    expected = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{expected}'" in text


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
    assert "This run is incomplete" in text and "sriov,pmd=-,frame=imix" in text
    assert "Simulated: no frame was sent" in text
    assert "published, other hardware" in text


def test_a_complete_run_of_real_devices_says_neither() -> None:
    real = result(device(), environment={"generator": "trex-stl", "host": "h", "started": "now"})
    run = run_of([record(Cell("sriov"), real)])
    text = page(run, report_of(run))
    assert "incomplete" not in text and "Simulated" not in text and "Complete: 1 cell." in text


def test_hostile_text_stays_text() -> None:
    run = hostile_run()
    text = page(run, report_of(run))
    outline = Outline(text)
    assert len(outline.all("script")) == 1 and not outline.all("img")
    assert not any(name.startswith("on") for _, a in outline.elements for name in a)
    assert "{{ 7*7 }}" in text
    assert "<script>alert" not in text and text.count("</script>") == 1
    plot.png(report_of(run))
    ElementTree.fromstring(plot.svg(report_of(run)))


@settings(max_examples=8)
@given(st.text(max_size=40))
def test_any_name_can_be_drawn(name: str) -> None:
    run = run_of([record(Cell(name, 1), answering([1e6]))], name=name)
    ElementTree.fromstring(plot.svg(report_of(run)))
    Outline(page(run, report_of(run)))


# -- sentences -------------------------------------------------------------------------------------


def test_the_answer_begins_with_the_fastest(report: Report) -> None:
    sentences = answer(grids(report)[0])
    assert sentences[0].startswith("dpdkvhostuser with 4 PMD cores forwards 7.98 Mpps without loss")
    assert "each core does" in sentences[0] and "It takes 4.1 CPUs of the host" in sentences[0]
    assert len(sentences) == 6  # three backends with rates, three cells without
    assert any("has no NDR: it loses" in text for text in sentences)
    assert any("forwards at least 2.99 Mpps" in text for text in sentences)
    assert any("the VNF does by itself" in text for text in sentences)


def test_what_is_not_known_is_reported(run: RunRecord, report: Report) -> None:
    text = " ".join(not_known(run, report))
    assert "simulated" in text and "incomplete" in text and "VNF without backend" in text
    assert "generator by itself" not in text  # there is such a control
    assert "No place counted them" not in text  # the simulation finds every frame


def test_loss_that_no_place_counted_is_reported() -> None:
    found = answering([1e6])
    [trial] = found["trial_log"]
    before = trial["measured"]
    lost = before["tx_packets"] - before["rx_packets"]
    run = run_of([record(Cell("sriov"), found)])
    trial["measured"] = {**before, "evidence": {"ovs.drop": 100, "generator.rx": 7}}
    assert (located(trial)["ovs.drop"], not_located(trial)) == (100, lost - 100)
    assert unexplained(run, Cell("sriov")) == (lost - 100, 0)
    assert f"{lost - 100:,} frames" in " ".join(not_known(run, report_of(run)))
    assert f"unexplained {lost - 100:,}" in page(run, report_of(run))
    trial["measured"] = {**before, "rx_errors": 7, "evidence": {"generator.rx": 7}}
    assert not_located(trial) == lost - 7  # those came back
    trial["measured"] = {**before, "evidence": {"ovs.drop": lost + 3, "unexplained": -3}}
    assert located(trial) == {"ovs.drop": lost + 3}
    assert unexplained(run, Cell("sriov")) == (0, 3)
    assert "counted 3 frames more than were missing" in " ".join(not_known(run, report_of(run)))


# -- pictures --------------------------------------------------------------------------------------


def test_the_picture_is_png_and_svg(report: Report) -> None:
    data = plot.png(report)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 500
    root = ElementTree.fromstring(plot.svg(report))
    text = " ".join(root.itertext())
    assert "PMD cores" in text and "Mpps, all directions together" in text
    assert "linuxbridge" in text and "(simulated)" in text and "published, other hardware" in text


def test_bars_are_the_interval_or_the_bounds(report: Report) -> None:
    grid = grids(report)[0]
    lines = {line.backend: line for line in lines_of(grid, ["linuxbridge", "dpdkvhostuser", "vdpa", "sriov"])}
    noisy = lines["dpdkvhostuser"].rated[0]
    assert noisy.interval is not None and noisy.rate_pps is not None
    low, high = error_mpps(noisy)
    assert low == pytest.approx((noisy.rate_pps - noisy.interval.low_pps) / 1e6)
    assert high == pytest.approx((noisy.interval.high_pps - noisy.rate_pps) / 1e6)
    limited = lines["vdpa"].rated[0]
    assert limited.bounds_pps is not None and limited.rate_pps is not None
    assert error_mpps(limited) == pytest.approx((0, (limited.bounds_pps[1] - limited.rate_pps) / 1e6))
    assert lines["linuxbridge"].flat and not lines["vdpa"].flat
    assert label(lines["vdpa"]).splitlines() == [
        "vdpa",
        "  floor with 2 cores",
        "  VNF limit with 4 cores",
    ]
    assert len({line.colour for line in lines.values()}) == len({line.marker for line in lines.values()}) == 4


def test_a_run_without_any_rate_has_a_picture_that_shows_it() -> None:
    report = report_of(run_of([record(Cell("sriov"), None, error="no NIC")]))
    assert "No cell has an NDR." in plot.svg(report)
    assert plot.png(report)[:4] == b"\x89PNG"


def test_every_trial_has_its_dot_within_the_drawing() -> None:
    found = result(device("noisy"))
    drawn = trial_plot(found["trial_log"], found["zero_loss_pps"])
    assert drawn is not None and len(drawn.dots) == found["trials"]
    assert all(0 < dot.x < WIDTH and 0 < dot.y < HEIGHT for dot in drawn.dots)
    assert [dot.verdict for dot in drawn.dots] == [t["verdict"] for t in found["trial_log"]]
    by_rate = sorted(
        zip([t["rate_pps"] for t in found["trial_log"]], drawn.dots, strict=True), key=lambda pair: pair[0]
    )
    heights = [dot.y for _, dot in by_rate]
    assert heights == sorted(heights, reverse=True)
    assert trial_plot([], None) is None


def test_whatever_a_search_can_find_can_be_reported() -> None:
    cells = [Cell(name, 1) for name in FAMILIES]
    run = run_of([record(cell, result(FAMILIES[cell.backend])) for cell in cells])
    report = report_of(run)
    outline = Outline(page(run, report))
    assert len(outline.all("figure")) == 1 + len(cells)
    assert compare(run, run).status == 0
