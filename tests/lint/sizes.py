"""``python -m tests.lint.sizes``: print the lines of source by part, and fail where a part has too many.

sizes.toml has the limit and the goal of each part; ``--lower`` lowers the limits to what there is now. All
lines of Python are counted. The median leaves out ``__init__.py``.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("sizes.toml")
SOURCE = ("netplugin", "agents", "drivers", "tools")
#: The part that stands for all of them.
ALL = "all source"
LINES_STEP, FILES_STEP = 50, 10


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that a part may have, and what it is to have."""

    limit: int
    goal: int


@dataclass(frozen=True, slots=True)
class Table:
    """What sizes.toml says: lines by part, the number of files, the lines of one file, and its exceptions."""

    parts: Mapping[str, Bound]
    files: Bound
    longest: int
    longer: Mapping[str, int]


def read_table(text: str) -> Table:
    """Raises: KeyError, TypeError or tomllib.TOMLDecodeError if the text is no such table."""
    found = tomllib.loads(text)
    return Table(
        {part: Bound(**bound) for part, bound in found["parts"].items()},
        Bound(**found["files"]["number"]),
        found["files"]["longest"],
        found["longer"],
    )


def source_sizes() -> dict[str, int]:
    """Return the lines of each Python file of the source, by its path; new files are among them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *SOURCE]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = sorted({Path(name) for name in listed if name.endswith(".py")})
    return {str(path): path.read_bytes().count(b"\n") for path in paths if path.exists()}


def sizes_of(part: str, sizes: Mapping[str, int]) -> list[int]:
    """Return the lines of each file of a part."""
    return [lines for path, lines in sizes.items() if part == ALL or path.startswith(f"{part}/")]


def report(table: Table, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield one line for each part, one for the number of files, and one for their sizes."""
    yield f"{'':18}{'lines':>8}{'limit':>8}{'goal':>8}{'files':>8}"
    for part, bound in table.parts.items():
        own = sizes_of(part, sizes)
        yield f"{part:18}{sum(own):8,}{bound.limit:8,}{bound.goal:8,}{len(own):8,}"
    yield f"{'files':18}{len(sizes):8,}{table.files.limit:8,}{table.files.goal:8,}"
    median = statistics.median(lines for path, lines in sizes.items() if not path.endswith("__init__.py"))
    above = sum(lines > table.longest for lines in sizes.values())
    yield f"a file has {median:.0f} lines (median); {above} have more than {table.longest}"


def exceeded(table: Table, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each limit that is exceeded."""
    for part, bound in table.parts.items():
        if (lines := sum(sizes_of(part, sizes))) > bound.limit:
            yield f"{part} has {lines:,} lines, {lines - bound.limit:,} more than its limit"
    if len(sizes) > table.files.limit:
        yield f"there are {len(sizes)} files, {len(sizes) - table.files.limit} more than the limit"
    for path, lines in sizes.items():
        if lines > (limit := table.longer.get(path, table.longest)):
            yield f"{path} has {lines} lines, {lines - limit} more than its limit"


def lowered(text: str, sizes: Mapping[str, int]) -> str:
    """Return the text of a table with each limit lowered to what there is now; none is raised.

    A file that is not longer than all may be loses its line.
    """
    table = read_table(text)
    for part, bound in table.parts.items():
        own = sum(sizes_of(part, sizes))
        text = _with_limit(text, rf'"{part}" = ', min(bound.limit, _up(own, LINES_STEP)))
    text = _with_limit(text, "number = ", min(table.files.limit, _up(len(sizes), FILES_STEP)))
    for path, limit in table.longer.items():
        lines = sizes.get(path, 0)
        line = f'"{path}" = {min(lines, limit)}\n' if lines > table.longest else ""
        text = re.sub(rf'^"{re.escape(path)}" = .*\n', line, text, flags=re.MULTILINE)
    return text


def _with_limit(text: str, start: str, limit: int) -> str:
    return re.sub(rf"^({start}{{ limit = )[\d_]+", rf"\g<1>{limit:_}", text, flags=re.MULTILINE)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lint.sizes", description=__doc__)
    parser.add_argument("--lower", action="store_true", help="lower the limits to what there is now")
    lower = parser.parse_args(arguments).lower
    sizes = source_sizes()
    if lower:
        TABLE.write_text(lowered(TABLE.read_text(), sizes))
    table = read_table(TABLE.read_text())
    print("\n".join(report(table, sizes)))
    found = list(exceeded(table, sizes))
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
