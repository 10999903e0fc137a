"""A run as it is kept and shown: JSON, goals, tables, the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench import names
from tests.bench.goals import goals
from tests.bench.picture import draw
from tests.bench.recorder import Recorder
from tests.bench.tables import goal_table, markdown
from tests.bench.values import Run, Unreadable, read, write
from tests.unit.bench.runs import run_of


def measured(factor: float = 1.0) -> Run:
    """A run with every figure that a goal or a table asks for: goals are met with a factor of 1."""
    record, times = Recorder(), 100
    for ports in (0, 100, 1000):
        record.add(names.ONE_PORT, "plug", *[7.0 * factor] * times, ports=ports, addresses=1)
        record.add(names.ONE_PORT, "own share", *[0.9 * factor] * times, ports=ports, addresses=1)
        record.add(names.ONE_PORT, "plug", *[10.0] * times, way="os-vif", ports=ports)
        record.add(names.ONE_PORT, "plug", *[20.0] * times, way="usual-tools", ports=ports)
    record.add(names.DEFAULT_LOG, "plug", *[7.0 * factor] * times, ports=0, addresses=1)
    record.add(names.DEFAULT_LOG, "plug", *[17.0] * times, way="ovs-vsctl add-port", ports=0)
    record.add(names.TOGETHER, "at once", 100.0 * factor, ports=0, addresses=1)
    record.add(names.TOGETHER, "in turn", 900.0, way="os-vif", ports=0)
    record.add(names.START, "to ready", 0.4 * factor, ports=1000, unit="s")
    record.add(names.START, "drift", factor - 1, ports=1000, unit="")
    record.add(names.START, "writes", 0.0, ports=1000, unit="")
    record.add(names.FROM_NOTHING, "plug of all", 3.0 * factor, ports=1000, addresses=1, unit="s")
    record.add(names.FROM_NOTHING, "longest stall", 200.0 * factor, way="ovs-vswitchd", ports=1000)
    record.add(names.LINUXBRIDGE, "plug", *[20.0 * factor] * times, ports=0, addresses=1)
    record.add(names.RESOURCES, "RSS", 70.0 * factor, ports=1000, unit="MB")
    record.add(names.OPEN_LOOP, "plug, plugs", *[100.0 * factor] * times, ports=500, addresses=1, rate=50)
    record.add(names.OPEN_LOOP, "refused, plugs", factor - 1, ports=500, addresses=1, rate=50, unit="")
    return run_of(record)


def test_each_goal_is_found_and_may_be_missed() -> None:
    good, bad = measured(), measured(10)
    for goal in goals():
        reached, missed = goal.find(good), goal.find(bad)
        assert reached is not None and goal.met(reached), goal
        assert missed is not None and not goal.met(missed), goal
        assert goal.find(run_of(Recorder())) is None, goal


def test_a_miss_is_seen_in_the_table() -> None:
    table = goal_table(measured(10))
    assert table.count("**no**") == len(goals())
    assert "**no**" not in goal_table(measured())
    assert goal_table(run_of(Recorder())).count("not measured") == len(goals())


def test_the_worst_number_of_ports_counts() -> None:
    record = Recorder()
    for ports, ms in ((0, 5.0), (100, 15.0), (1000, 5.0)):
        record.add(names.ONE_PORT, "plug", ms, ms, ports=ports, addresses=1)
        record.add(names.ONE_PORT, "plug", 10.0, 10.0, way="os-vif", ports=ports)
    relative_to_os_vif, *_ = goals()
    assert relative_to_os_vif.find(run_of(record)) == 1.5


def test_a_run_is_kept_and_read(tmp_path: Path) -> None:
    run, path = measured(), tmp_path / "kept" / "run.json"
    write(run, path)
    assert read(path) == run


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": 1}', "[1, 2"])
def test_what_is_no_run_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(Unreadable, match=r"run\.json is no run of schema"):
        read(path)
    assert bench.main(["--show", str(path)]) == 2


def test_two_units_of_one_figure_are_a_mistake() -> None:
    record = Recorder()
    record.add(names.START, "to ready", 1.0, unit="s")
    with pytest.raises(ValueError, match="is measured in s and ms"):
        record.add(names.START, "to ready", 1000.0, unit="ms")


def test_a_run_is_shown_next_to_the_last_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(measured(), tmp_path / "2026-01-01T000000-full.json")
    write(measured(2), tmp_path / "2026-01-02T000000-full.json")
    write(measured(), tmp_path / "2026-01-03T000000-quick.json")
    shown = ["--show", str(tmp_path / "2026-01-02T000000-full.json"), "--folder", str(tmp_path)]
    assert bench.main([*shown, "--compare"]) == 0
    printed = capsys.readouterr().out
    assert (
        "| start: to ready, agent, 1000 ports [s] | 0.4 | 0.8 | 2.00 (2.00 to 2.00) | too few rounds |"
        in printed
    )
    assert "MORE" in printed
    assert bench.main([*shown, "--folder", str(tmp_path / "none"), "--compare"]) == 2


def test_the_tables_are_put_into_the_page_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bench.BEGIN}\nold\n{bench.END}\nafter\n")
    bench.write_docs(page, "new")
    assert page.read_text() == f"before\n{bench.BEGIN}\n\nnew\n{bench.END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(Unreadable):
        bench.write_docs(page, "new")
    assert bench.PAGE.read_text().count(bench.BEGIN) == 1


def test_every_figure_of_a_run_is_in_its_tables() -> None:
    text = markdown(measured())
    for words in ("filter of 1 address", "- own share", "os-vif", "ovs-vsctl", "to ready", "longest stall"):
        assert words in text
    assert all(line.count("|") == 1 + head.count("|") - 1 for head, line in _lines_of_tables(text))


def _lines_of_tables(text: str) -> list[tuple[str, str]]:
    found = []
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines and lines[0].startswith("|"):
            found += [(lines[0], line) for line in lines[1:]]
    return found


def test_a_picture_has_a_line_for_each_way(tmp_path: Path) -> None:
    draw(measured(), tmp_path / "run.svg")
    picture = (tmp_path / "run.svg").read_text()
    for words in ("os-vif", "agent, 1 in the filter", "p99", "Open loop with 500 ports"):
        assert words in picture
