"""Output of commands: values as text, lists that fit the terminal, findings."""

from __future__ import annotations

import shutil
import sys
import textwrap
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

from cliff.columns import FormattableColumn
from cliff.formatters.table import TableFormatter
from cliff.lister import Lister
from pydantic import BaseModel

from netplugin.api.errors import InvalidRequest
from netplugin.api.models import Finding

# -- Output formats of values: short text for humans, the API's values for ``-f json``. -----------


Row = tuple[Any, ...]


class Structure(FormattableColumn[Any]):
    """Nested values: a ``name: value`` line per leaf."""

    def human_readable(self) -> str:
        return "\n".join(_lines(self._value, ""))


class NetworkColumn(FormattableColumn[dict[str, Any]]):
    """A network as ``vlan physnet1 100``."""

    def human_readable(self) -> str:
        names = ("type", "physical_network", "vlan_id", "network_id")
        parts = (self._value.get(name) for name in names)
        return " ".join(str(part) for part in parts if part is not None)


class Error(FormattableColumn[dict[str, Any] | None]):
    """An error as ``code: detail``, and the fix if there is one."""

    def human_readable(self) -> str:
        if self._value is None:
            return ""
        fix = f"\nFix: {self._value['fix']}" if self._value.get("fix") else ""
        return f"{self._value['code']}: {self._value['detail']}{fix}"


class Optional(FormattableColumn[Any]):
    """A value; None is shown as an empty cell."""

    def human_readable(self) -> str:
        return "" if self._value is None else str(self._value)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned text columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def fields(model: BaseModel) -> tuple[tuple[str, ...], Row]:
    """All fields of a model as the columns of one object."""
    values = model.model_dump(mode="json")
    return tuple(values), tuple(_column(name, value) for name, value in values.items())


def read_text(name: str) -> str:
    """The text of a file, or of standard input for ``-``. Raises: InvalidRequest."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as wrong:
        raise InvalidRequest(
            f"{name} cannot be read: {wrong}", step="read", fix="name a text file, or - for stdin"
        ) from None


def _column(name: str, value: Any) -> Any:
    if name == "error":
        return Error(value)
    return Structure(value) if isinstance(value, dict | list) else Optional(value)


def _lines(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lines(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for number, inner in enumerate(value):
            yield from _lines(inner, f"{name}.{number}" if name else str(number))
    elif isinstance(value, list):
        if value:
            yield (f"{name}: " if name else "") + ", ".join(str(inner) for inner in value)
    elif value is not None:
        yield f"{name}: {value}" if name else str(value)


# -- Lists on a terminal: a table that fits its width, or a block of lines per row. ----------------

#: The shortest length that values are cut to: MAC and PCI addresses remain whole.
_SHORTEST = 20
_ELLIPSIS = "..."  # not the single character, which not every terminal can show
_CUT_NOTE = f"values that end in {_ELLIPSIS} are cut; -f json has the whole"


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


def _text(value: Any) -> str:
    return str(value.human_readable() if isinstance(value, FormattableColumn) else value)


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
        self,
        names: Sequence[str],
        rows: Sequence[Sequence[Any]],
        stdout: TextIO,
        parsed_args: Namespace,
    ) -> None:
        width = shutil.get_terminal_size().columns
        texts = [[_text(value) for value in row] for row in rows]
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


# -- Base classes of commands that print a list. ---------------------------------------------------


class TableLister(Lister):
    """A command that lists rows in a ``FittedTable``, with notes for people on standard error.

    The other formats (``-f json|yaml|csv|value``) are complete and have no notes.
    """

    #: The note if there are no rows: what is missing and what to do next.
    empty: ClassVar[str]
    #: The columns in the heading of a block; default: the first column.
    head: ClassVar[tuple[str, ...]] = ()
    #: Whether long values may be cut; otherwise rows that do not fit are blocks.
    cuts: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        """Print a sentence on standard error after the table."""
        self._notes.append(text)

    def produce_output(
        self, parsed_args: Namespace, column_names: Sequence[str], data: Iterable[Sequence[Any]]
    ) -> int:
        rows = list(data)
        if not isinstance(self.formatter, TableFormatter):
            return super().produce_output(parsed_args, column_names, rows)
        self.formatter = FittedTable(self.head, self.cuts, self.note)
        status = super().produce_output(parsed_args, column_names, rows)
        for text in [*([] if rows else [self.empty]), *self._notes]:
            self.app.stderr.write(f"netplugin: {text}\n")
        return status


class FindingLister(TableLister):
    """A command that lists findings; the exit status is 1 if a check fails."""

    empty = "no findings: the checks found nothing to fix"
    head = ("status", "id")
    cuts = False  # a fix is of use only as a whole

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._status = 0

    @abstractmethod
    def find(self, parsed_args: Namespace) -> Iterable[Finding]: ...

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[Row]]:
        findings = list(self.find(parsed_args))
        self._status = 1 if any(finding.status == "fail" for finding in findings) else 0
        return ("id", "status", "found", "expected", "fix"), [
            (f.id, f.status, f.found, f.expected, Optional(f.fix)) for f in findings
        ]

    def run(self, parsed_args: Namespace) -> int:
        return super().run(parsed_args) or self._status
