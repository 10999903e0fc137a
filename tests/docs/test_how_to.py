"""The dry runs of docs/how-to, as they are listed, on the data of the published host; they need no root."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, SESSIONS, blocks
from tests.docs.test_docs import table
from tests.functional.docs.shell import carry_out

PAGES = sorted((ROOT / "docs/how-to").glob("*.md"))
DRY_RUNS = ("vhost-user-dry", "real-time-dry", "channels-dry", "tcp-dry", "compare-backends")


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run(name: str, tmp_path: Path) -> None:
    carry_out(name, tmp_path / "log", cwd=ROOT, scratch=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_has_a_dry_run_and_marks_what_needs_hardware(page: Path) -> None:
    assert (page,) in [SESSIONS[name] for name in DRY_RUNS]
    section, marked = "", False
    for line in page.read_text().splitlines():
        if line.startswith("## "):
            section, marked = line, False
        marked = marked or line.startswith("**Needs hardware")
        if line.startswith("```bash not-run="):
            assert marked, f"{page.name}: {section}"
    assert [block for block in blocks(page) if "not-run" in block.words]


def test_the_published_table_is_that_of_the_report() -> None:
    cores = ("", "2", "4", "6", "8")
    columns = ("backend", "no PMD", *(f"{count} PMD cores" for count in cores[1:]))
    shown = {
        (backend, count): rate
        for backend, *rates in table("docs/published-figures.md", *columns)
        for count, rate in zip(cores, rates, strict=True)
        if rate != "-"
    }
    data = ROOT / "tools/trex/netplugin_zeroloss/report/data/zstack-4.4.csv"
    with data.open(encoding="utf-8") as file:
        rows = {(r["scheme"], r["pmd_cores"]): r["zero_loss_mpps"] for r in csv.DictReader(file)}
    assert shown == rows
