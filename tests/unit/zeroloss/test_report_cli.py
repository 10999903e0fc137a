"""The command ``report``: what it writes, what it says, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.journal import Cell

from tests.unit.zeroloss.report_runs import device, hostile_run, record, result, run_of, write_run

NAMES = [
    "report.html",
    "scaling.png",
    "scaling.svg",
    "table.csv",
    "table.json",
    "table.md",
]
ROOT = Path(__file__).resolve().parents[3]


def test_the_files_and_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of([record(Cell("linuxbridge"), result(device()))], Cell("sriov"))
    folder = write_run(run, tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in (folder / "report").iterdir()) == NAMES
    assert all(str(folder / "report" / name) in printed for name in NAMES)
    assert "Incomplete: 1 of 2 cells was not measured." in printed
    assert "published" not in (folder / "report" / "table.md").read_text()
    other = tmp_path / "a" / "b"
    assert main(["report", str(folder), "--output", str(other), "--published"]) == 0
    assert sorted(path.name for path in other.iterdir()) == NAMES
    assert "published, other hardware" in (other / "table.md").read_text()
    # Nothing of it is in the way of the run itself.
    assert main(["report", str(folder)]) == 0


def test_what_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "no run was begun in it" in capsys.readouterr().err
    folder = write_run(run_of([record(Cell("a"), result(device()))]), tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert main(["report", str(folder), "--output", str(tmp_path / "file")]) == 2
    assert f"--output: {tmp_path / 'file'}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_a_missing_library_is_reported_with_what_brings_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = write_run(run_of([record(Cell("a"), result(device()))]), tmp_path / "run")
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"{name}: not installed" in error and "./tools/trex" in error
    assert not (folder / "report").exists()


def test_the_locale_does_not_matter(tmp_path: Path) -> None:
    name = "Zür\u03bc\u202e: \u4e2d"
    folder = write_run(run_of([record(Cell(name), result(device()))], name=name), tmp_path / "r\u03bcn")
    asked = [sys.executable, ROOT / "tools/trex/zeroloss.py", "report", folder]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": os.environ["PATH"]}
    done = subprocess.run(asked, env=ascii_only, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"") and b"Complete: 1 cell." in done.stdout
    assert main(["report", str(folder), "--output", str(tmp_path / "utf-8")]) == 0
    for file in NAMES:
        made = (folder / "report" / file).read_bytes()
        assert made == (tmp_path / "utf-8" / file).read_bytes() and made
    assert name in (folder / "report" / "table.md").read_text(encoding="utf-8")


def test_a_name_may_have_bytes_that_are_no_text(tmp_path: Path) -> None:
    folder = write_run(hostile_run(), tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert "alert(1)" in (folder / "report" / "table.md").read_text(encoding="utf-8")


def test_what_draws_is_imported_only_to_draw() -> None:
    code = (
        "import sys; from netplugin_zeroloss.cli import main as cli;"
        "from netplugin_zeroloss.report import table;"
        "cli.parser(); found = {'matplotlib', 'jinja2', 'numpy', 'ruamel.yaml'} & set(sys.modules);"
        "sys.exit(repr(found) if found else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
