"""Lists on a terminal: a table that fits its width, or a block of lines per row."""

from __future__ import annotations

import shutil
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from cliff.formatters.table import TableFormatter

#: The shortest length that values are cut to: MAC and PCI addresses remain whole.
_SHORTEST = 20
_ELLIPSIS = "..."  # not the single character, which not every terminal can show
_CUT_NOTE = f"values that end in {_ELLIPSIS} are cut; -f json prints them whole"


def cut_to_fit(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[str]] | None:
    """Cut the longest values so that the table fits; never the first column, which identifies a row.

    None if values would become shorter than ``_SHORTEST``.
    """
    first, *others = _widths(names, rows)
    room = width - (3 * len(names) + 1) - first  # a column has a border and two blanks
    if sum(others) <= room:
        return [list(row) for row in rows]
    for limit in range(max(others, default=0), _SHORTEST - 1, -1):
        if sum(min(other, limit) for other in others) <= room:
            return [[row[0], *(_shorten(text, limit) for text in row[1:])] for row in rows]
    return None


def blocks(names: Sequence[str], rows: Sequence[Sequence[str]], head: Sequence[str], width: int) -> str:
    """Format each row as a line with the columns of ``head``, and the others indented below it.

    Without ``head`` the heading is the first column. Text is wrapped to the width between words
    only, so that a long path can be copied.
    """
    heading = [name for name in head if name in names] or names[:1]
    below = [name for name in names if name not in heading]
    label = max(map(len, below), default=0)
    lines: list[str] = []
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        lines += _wrapped("", "  ".join(cells[name] for name in heading), width)
        for name in below:
            lines += _wrapped(f"    {name.ljust(label)}  ", cells[name], width)
    return "\n".join(lines)


def _widths(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    columns = zip(names, *rows, strict=True)
    return [max(len(line) for text in column for line in text.split("\n")) for column in columns]


def _shorten(text: str, limit: int) -> str:
    return "\n".join(
        line if len(line) <= limit else line[: limit - len(_ELLIPSIS)] + _ELLIPSIS
        for line in text.split("\n")
    )


def _wrapped(before: str, text: str, width: int) -> Iterator[str]:
    """The lines of the text behind ``before``, which is blank from the second line on."""
    room = max(_SHORTEST, width - len(before))
    for line in text.splitlines():
        for part in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False):
            yield before + part
            before = " " * len(before)


class FittedTable(TableFormatter):
    """cliff's table; on a terminal without ``--max-width`` and ``--fit-width`` it fits the width.

    cliff itself wraps cells there, down to 8 characters, which breaks names and sentences.
    """

    def __init__(self, head: Sequence[str], cuts: bool, note: Callable[[str], None]) -> None:
        self._head = head
        self._cuts = cuts
        self._note = note

    def emit_list(
        self,
        column_names: Sequence[str],
        data: Iterable[Sequence[Any]],
        stdout: TextIO,
        parsed_args: Namespace,
    ) -> None:
        rows = list(data)
        if parsed_args.max_width > 0 or parsed_args.fit_width or not stdout.isatty():
            super().emit_list(column_names, rows, stdout, parsed_args)
        elif rows or parsed_args.print_empty:
            self._fit(column_names, rows, stdout, parsed_args)

    def _fit(
        self, names: Sequence[str], rows: Sequence[Sequence[Any]], stdout: TextIO, parsed_args: Namespace
    ) -> None:
        width = shutil.get_terminal_size().columns
        texts = [[str(value) for value in row] for row in rows]
        fitted = cut_to_fit(names, texts, width)
        if fitted is None or (fitted != texts and not self._cuts):
            stdout.write(blocks(names, texts, self._head, width) + "\n")
            return
        if fitted != texts:
            self._note(_CUT_NOTE)
            rows = fitted
        # The width that was fitted to; cliff would determine its own.
        arguments = Namespace(**{**vars(parsed_args), "max_width": width})
        super().emit_list(names, rows, stdout, arguments)
