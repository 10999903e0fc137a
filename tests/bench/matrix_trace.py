"""One cell of ``zeroloss matrix``, from the command to its first trial: files, and returns to folders.

    python -m tests.bench.matrix_trace

The cell has a simulated device, so it needs neither root nor an agent. The way is the files on the call stack
when the search asks for the first trial and when the generator runs it. The others are those of which a
function is called until then. A reader who follows all these functions in the order of their first calls
returns to a folder whenever the next one is in a folder that an earlier one was in and the last one was not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path, PurePath
from types import CodeType, FrameType
from typing import Any

from netplugin_zeroloss.cli import main as command
from netplugin_zeroloss.generators.sim import SimGenerator
from netplugin_zeroloss.values import TrialRequest

from tests.bench.call_frames import file_of, is_body, stack

PARTS = ("tools/trex", "netplugin")
GOAL_FILES, GOAL_RETURNS = 12, 10
MATRIX = """\
name: one-cell
seed: 1
generator: {type: sim, device: clean, capacity_pps: 4.2e6}
matrix: {backends: [linuxbridge], pmd_cores: [1], frames: [64]}
"""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that was called, in its file of the source tree."""

    file: str
    name: str


class Trace:
    """Notes the functions that are called from the command until the generator runs a trial."""

    def __init__(self) -> None:
        self._called: dict[CodeType, Function | None] = {}
        self._way: set[CodeType] = set()
        self._ended = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self._ended:
            return
        code = frame.f_code
        if code not in self._called:
            # Neither comprehensions nor lambdas: some versions of Python call the former, and others do not.
            left_out = code.co_name.startswith("<") or _in_import(frame)
            file = None if left_out else file_of(frame, PARTS)
            self._called[code] = Function(file, code.co_qualname) if file else None
        if code in (TrialRequest.__init__.__code__, SimGenerator.run.__code__):
            self._way.update(each.f_code for each in stack(frame))
            self._ended = code is SimGenerator.run.__code__

    @property
    def called(self) -> list[Function]:
        """The functions that were called, in the order of their first calls."""
        return [function for function in self._called.values() if function]

    @property
    def way(self) -> list[Function]:
        """Those on the way."""
        return [function for code, function in self._called.items() if function and code in self._way]


def _in_import(frame: FrameType) -> bool:
    """Whether the call is made by the body of a module that is imported, below the command."""
    for each in stack(frame):
        if each.f_code is command.main.__code__:
            return False
        if is_body(each):
            return True
    return False


def files(functions: Iterable[Function]) -> dict[str, list[str]]:
    """Return the functions of each file, in order."""
    found: dict[str, list[str]] = {}
    for function in functions:
        found.setdefault(function.file, []).append(function.name)
    return found


def returns(functions: Iterable[Function]) -> list[Function]:
    """Return those that are in a folder that an earlier one was in, but not the last one."""
    found: list[Function] = []
    been: set[PurePath] = set()
    last = None
    for function in functions:
        folder = PurePath(function.file).parent
        if folder != last and folder in been:
            found.append(function)
        been.add(folder)
        last = folder
    return found


def trace_cell() -> Trace:
    """Run a matrix of one cell.

    Raises: RuntimeError if the command fails.
    """
    trace = Trace()
    with tempfile.TemporaryDirectory() as name, redirect_stdout(StringIO()) as out, redirect_stderr(out):
        matrix = Path(name) / "matrix.yaml"
        matrix.write_text(MATRIX)
        before = sys.getprofile()
        sys.setprofile(trace)
        try:
            status = command.main(["matrix", str(matrix), "--folder", f"{name}/run"])
        finally:
            sys.setprofile(before)
    if status:
        raise RuntimeError(f"zeroloss matrix ended with {status}: {out.getvalue()}")
    return trace


def main() -> int:
    trace = trace_cell()
    way, called = files(trace.way), files(trace.called)
    others = {file: names for file, names in called.items() if file not in way}
    for title, found in (("the way", way), ("called from it", others)):
        print(f"{title}: {len(found)} files")
        for file, names in found.items():
            print(f"  {file:58} {', '.join(names)}")
        print()
    again = returns(trace.called)
    print("returns to a folder, for:")
    for function in again:
        print(f"  {function.file:58} {function.name}")
    print()
    print(f"{len(way)} files on the way (goal {GOAL_FILES}), {len(called)} in all")
    print(f"{len(again)} returns to a folder (goal {GOAL_RETURNS})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
