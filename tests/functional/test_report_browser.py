"""The report's page in a real browser: it opens from a file, asks nobody for anything, and can be read."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.journal import Cell, CellRecord

from tests.lab.chromium import Chromium
from tests.unit.zeroloss.report_runs import device, hostile_run, mission, record, result, run_of, write_run

#: Text whose colour is too near to what it stands on: WCAG 2.1, 1.4.3, wants 4.5 to 1.
CONTRAST = """(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (numbers(colour).length < 4 || numbers(colour)[3] > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const bad = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = Array.from(element.childNodes)
      .some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
    if (!own || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const ink = element instanceof SVGElement ? style.fill : style.color;
    const pair = [light(ink), light(behind(element))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) bad.push([element.tagName, element.textContent.trim().slice(0, 30), ratio]);
  }
  return JSON.stringify(bad);
})()"""
#: What sticks out of the window to the right, and is not in a part that scrolls by itself.
OUTSIDE = """(() => JSON.stringify(Array.from(document.body.querySelectorAll("*"))
  .filter((e) => e.getClientRects().length && !e.closest(".scroll, pre, svg")
    && e.getBoundingClientRect().right > innerWidth + 1)
  .map((e) => e.tagName + "." + e.className + " " + e.textContent.slice(0, 30))))()"""
COMMAND = ["netplugin-zeroloss", "matrix", "the lab's run.yaml", "--folder", f"/var/tmp/{'long/' * 20}"]
SIZES = [(1280, 900), (390, 844)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = mission(2)
    run = replace(run, environment={**run.environment, "command": COMMAND})
    folder = write_run(run, tmp_path_factory.mktemp("run"))
    assert main(["report", str(folder), "--published"]) == 0
    return (folder / "report" / "report.html").as_uri()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def opened(chromium: Chromium, page: str) -> Chromium:
    chromium.size(*SIZES[0])
    chromium.dark(False)
    chromium.open(page)
    return chromium


def reported(browser: Chromium, expression: str) -> Any:
    return json.loads(browser.evaluate(expression))


def test_it_asks_nobody_and_complains_of_nothing(opened: Chromium, page: str) -> None:
    assert opened.evaluate("document.title") == "lab: four backends: NDR"
    opened.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert opened.requested == [page]
    assert opened.complaints == []


def test_a_number_leads_to_its_trials(opened: Chromium) -> None:
    row = "document.querySelector('#cell-4 .trials tbody tr')"
    assert opened.evaluate(f"{row}.checkVisibility()") is False
    opened.evaluate("document.querySelector('a[href=\"#cell-4\"]').click()")
    opened.evaluate("new Promise((done) => requestAnimationFrame(done))")
    assert opened.evaluate(f"{row}.checkVisibility()") is True
    where = opened.evaluate("document.getElementById('cell-4').getBoundingClientRect().top")
    assert -1 <= where < SIZES[0][1]
    assert "7.98" in opened.evaluate("document.querySelector('a[href=\"#cell-4\"]').textContent")
    assert "rx_ring_full" in opened.evaluate("document.getElementById('cell-4').innerText")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_fits_its_window(opened: Chromium, width: int, height: int) -> None:
    opened.size(width, height)
    opened.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    assert reported(opened, OUTSIDE) == []
    picture = "document.querySelector('main > figure svg').getBoundingClientRect()"
    assert min(width * 0.9, 500) <= opened.evaluate(f"{picture}.width") <= width
    assert opened.evaluate(f"{picture}.height") > 150
    assert opened.screenshot()[:4] == b"\x89PNG"


def test_on_a_phone_columns_are_stacked_or_marked_as_scrolling(opened: Chromium) -> None:
    opened.size(*SIZES[1])
    opened.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    cells = "Array.from(document.querySelectorAll('.grid')[0].querySelectorAll('td:not(:empty)'))"
    heads = f"JSON.stringify({cells}.map((e) => getComputedStyle(e, '::before').content))"
    assert '"1 PMD core"' in reported(opened, heads)[1].replace(": ", "")
    tops = reported(opened, f"JSON.stringify({cells}.map((e) => e.getBoundingClientRect().top))")
    assert tops == sorted(set(tops)) and len(tops) == 8
    scrolling = """JSON.stringify(Array.from(document.querySelectorAll('.scroll'))
      .filter((e) => e.scrollWidth > e.clientWidth)
      .map((e) => e.querySelector('.hint')?.checkVisibility() ?? e.textContent.slice(0, 50)))"""
    assert reported(opened, scrolling) and set(reported(opened, scrolling)) == {True}


def test_the_text_of_the_picture_can_be_read_on_a_phone(opened: Chromium) -> None:
    opened.size(*SIZES[1])
    texts = """JSON.stringify(Array.from(document.querySelectorAll('main > figure svg text'))
      .map((e) => [e.textContent, e.getBoundingClientRect()]).map(([t, r]) =>
        [t, Math.min(r.width, r.height), r.left, r.right]))"""
    found = reported(opened, texts)
    assert any(text.startswith("vdpa; floor with 2 cores") for text, *_ in found)
    for text, size, left, right in found:
        assert size >= 10 or len(text) == 1, (text, size)
        assert left >= 0 and right <= SIZES[1][0], (text, left, right)


def test_the_command_can_be_selected_and_pasted(opened: Chromium) -> None:
    select = """(() => { getSelection().selectAllChildren(document.querySelector('pre.command'));
      return getSelection().toString(); })()"""
    assert shlex.split(opened.evaluate(select)) == COMMAND


@pytest.mark.parametrize("dark", [False, True])
def test_its_text_can_be_read(opened: Chromium, dark: bool) -> None:
    opened.dark(dark)
    opened.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    ground = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(18, 22, 28)" if dark else "rgb(255, 255, 255)")
    assert reported(opened, CONTRAST) == []


def test_it_can_be_read_without_scripts_and_printed(opened: Chromium, page: str) -> None:
    opened.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        opened.open(page)
        tree = opened.call("Accessibility.getFullAXTree")["nodes"]
        seen = [node.get("name", {}).get("value", "") for node in tree if not node["ignored"]]
        roles = {node["role"]["value"] for node in tree if not node["ignored"]}
        assert "The answer: which backend to choose" in seen and "7.98" in " ".join(seen)
        assert {"heading", "table", "rowheader", "columnheader", "link"} <= roles
        printed = base64.b64decode(opened.call("Page.printToPDF")["data"])
        assert printed[:5] == b"%PDF-"
    finally:
        opened.call("Emulation.setScriptExecutionDisabled", value=False)


def test_hostile_text_does_nothing(chromium: Chromium, tmp_path: Path) -> None:
    folder = write_run(hostile_run(), tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    chromium.open((folder / "report" / "report.html").as_uri())
    chromium.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert len(chromium.requested) == 1 and chromium.complaints == []
    assert not any(name == "Page.javascriptDialogOpening" for name, _ in chromium.events)
    assert chromium.evaluate("document.scripts.length") == 0
    assert "<script>alert(1)" in chromium.evaluate("document.body.innerText")
    chromium.size(*SIZES[1])
    assert reported(chromium, OUTSIDE) == []


FAILED = [record(Cell("sriov"), None, error="no/NIC/" * 60), record(Cell("vdpa", 2), None, error="no agent")]
ONE = [record(Cell("linuxbridge"), result(device("clean", 89_924)))]
MANY = [
    replace(ONE[0], cell=Cell(backend, cores, queues=queues))
    for backend in ("dpdkvhostuser", "vdpa")
    for cores in range(1, 11)
    for queues in range(1, 11)
]


@pytest.mark.parametrize("records", [FAILED, ONE, MANY], ids=["failed", "one", "many"])
def test_few_many_and_failed_cells_fit_and_can_be_read(
    chromium: Chromium, tmp_path: Path, records: list[CellRecord]
) -> None:
    assert main(["report", str(write_run(run_of(records), tmp_path / "run"))]) == 0
    chromium.open((tmp_path / "run" / "report" / "report.html").as_uri())
    for width, height in SIZES:
        chromium.size(width, height)
        assert chromium.evaluate("document.documentElement.scrollWidth") == width
        assert reported(chromium, OUTSIDE) == []
        for dark in (False, True):
            chromium.dark(dark)
            assert reported(chromium, CONTRAST) == []


def test_a_page_that_misbehaves_is_noticed(chromium: Chromium, tmp_path: Path) -> None:
    """What the tests above look for can be seen."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!DOCTYPE html><body style='color:#aaa;background:#fff'><p style='width:3000px'>pale</p>"
        "<img src='missing.png'><script>console.error('x'); no.such.thing</script>"
    )
    chromium.open(page.as_uri())
    assert len(chromium.requested) == 2 and len(chromium.complaints) >= 2
    assert reported(chromium, CONTRAST)[0][1] == "pale"
    assert reported(chromium, OUTSIDE)[0].startswith("P.")
