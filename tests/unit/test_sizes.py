"""The limits of the source's size: what is counted, what is reported, and how limits are lowered."""

from __future__ import annotations

from tests.lint.sizes import TABLE, Bound, exceeded, lowered, read_table, report, source_sizes

TEXT = """# Kept.
[parts]
"agents" = { limit = 1_200, goal = 900 }
"all source" = { limit = 2_000, goal = 1_500 }

[files]
number = { limit = 4, goal = 2 }
longest = 500

[longer]
"agents/b.py" = 620
"""
SIZES = {"agents/a.py": 400, "agents/b.py": 620, "drivers/__init__.py": 1, "drivers/c.py": 300}


def test_the_table_has_lines_limit_goal_and_files_of_each_part() -> None:
    lines = [line.split() for line in report(read_table(TEXT), SIZES)]
    assert ["agents", "1,020", "1,200", "900", "2"] in lines
    assert ["all", "source", "1,321", "2,000", "1,500", "4"] in lines
    assert ["files", "4", "4", "2"] in lines
    assert lines[-1] == "a file has 400 lines (median); 1 have more than 500".split()


def test_nothing_is_exceeded_at_the_limits() -> None:
    assert list(exceeded(read_table(TEXT), SIZES)) == []


def test_each_limit_that_is_exceeded_is_named() -> None:
    sizes = {**SIZES, "agents/b.py": 621, "agents/d.py": 501, "agents_more/e.py": 5}
    assert list(exceeded(read_table(TEXT), sizes)) == [
        "agents has 1,522 lines, 322 more than its limit",
        "there are 6 files, 2 more than the limit",
        "agents/b.py has 621 lines, 1 more than its limit",
        "agents/d.py has 501 lines, 1 more than its limit",
    ]


def test_limits_are_lowered_and_never_raised() -> None:
    text = lowered(TEXT, {"agents/a.py": 1030, "agents/b.py": 500, "drivers/c.py": 2000})
    table = read_table(text)
    assert table.parts == {"agents": Bound(1_200, 900), "all source": Bound(2_000, 1_500)}
    assert table.files == Bound(4, 2)
    assert table.longer == {}
    table = read_table(lowered(TEXT, {"agents/a.py": 400, "agents/b.py": 601}))
    assert table.parts == {"agents": Bound(1_050, 900), "all source": Bound(1_050, 1_500)}
    assert table.longer == {"agents/b.py": 601}
    assert text.startswith("# Kept.\n")


def test_the_table_of_the_project_names_parts_and_files_that_exist() -> None:
    table, sizes = read_table(TABLE.read_text()), source_sizes()
    assert "netplugin/__init__.py" in sizes
    assert not [path for path in sizes if path.startswith("tests/")]
    for part in table.parts.keys() - {"all source"}:
        assert any(path.startswith(f"{part}/") for path in sizes), part
    assert table.longer.keys() <= sizes.keys()
