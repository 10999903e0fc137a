"""The trace of one cell of a matrix: what is on its way, and what counts as a return to a folder."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.bench.matrix_trace import Function, returns


def functions(*paths: str) -> list[Function]:
    return [Function(path, "f") for path in paths]


def test_a_folder_is_returned_to_when_another_was_in_between() -> None:
    assert returns(functions("a/x.py", "a/y.py", "b/x.py", "c/x.py")) == []
    walked = functions("a/x.py", "b/x.py", "a/y.py", "a/x.py", "b/x.py")
    assert returns(walked) == [walked[2], walked[4]]


def test_the_way_leads_from_the_command_to_the_generator_and_is_no_longer_than_it_was() -> None:
    """In a process of its own: what other tests have left, such as garbage, would be on the way."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.matrix_trace"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    way = re.findall(r"^  (\S+)", printed.partition("called from it:")[0], re.MULTILINE)
    again = re.search(r"^(\d+) returns to a folder", printed, re.MULTILINE)
    assert way[0].endswith("netplugin_zeroloss/cli/main.py")
    assert way[-1].endswith("netplugin_zeroloss/generators/sim.py")
    assert len(way) <= 9
    assert again is not None and int(again[1]) <= 32
