"""Output of commands: values as text, lists that fit the terminal, findings."""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import cliff.command
import cliff.show
from cliff.columns import FormattableColumn
from cliff.formatters.base import ListFormatter, SingleFormatter
from cliff.formatters.table import TableFormatter
from cliff.lister import Lister
from pydantic import BaseModel

from netplugin.api.errors import InvalidRequest, reason
from netplugin.api.models import Finding
from netplugin.calls import as_commands
from netplugin.cli.tables import FittedTable
from netplugin.spelling import Parser, did_you_mean

if TYPE_CHECKING:
    from netplugin.api.client import Client

# -- Commands: with a client of the agent, and the parser that knows a misspelled option. -----------


def add_override(parser: ArgumentParser) -> None:
    """For a command that changes what the fleet may have made."""
    parser.add_argument(
        "--override", action="store_true", help="also if it is the fleet's, until its next change there"
    )


class Base(cliff.command.Command):
    """What all commands have."""

    #: The exit status, which the action may set.
    status = 0

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        self.add_options(parser)
        return parser

    def add_options(self, parser: ArgumentParser) -> None:
        """Add the arguments of this command, after those of its output."""

    def run(self, parsed_args: Namespace) -> int:
        self._override = getattr(parsed_args, "override", False)
        with ExitStack() as self._opened:
            return super().run(parsed_args) or self.status

    @cached_property
    def agent(self) -> Client:
        """A client of the agent until the command ends."""
        from netplugin.api.client import Client  # the commands that ask no agent start faster without it

        client = self._opened.enter_context(Client.from_environment())
        client.override = self._override
        return client

    def say(self, text: str) -> None:
        """Print a line on standard error, at once."""
        self.app.stderr.write(f"{text}\n")
        self.app.stderr.flush()


class _Spelled(cliff.command.Command):
    """The parser, to which cliff's classes add the options of their output: the last of the bases."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        return Parser(prog=prog_name, description=self.get_description())


class Command(Base, _Spelled):
    """The base of commands that print neither an object nor a list."""


def add_form(parser: ArgumentParser, *more: str, words: str = "%(choices)s; default: text") -> None:
    """Add ``--format`` of a command that prints no table: text, or one of ``more``."""
    parser.add_argument("-f", "--format", choices=("text", *more), default="text", help=words)


def whole(text: str) -> int:
    """The value of an option that is a whole number. Raises: ArgumentTypeError."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no whole number") from None


def seconds(text: str) -> float:
    """The value of an option that is a number of seconds. Raises: ArgumentTypeError."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number of seconds") from None


def option_of(field: str) -> str:
    """The option that is named like a field."""
    return "--" + field.replace("_", "-")


def add_fields(
    parser: ArgumentParser,
    model: type[BaseModel],
    special: Mapping[str, Mapping[str, Any]],
    option: Callable[[str], str] = option_of,
    flag: Any = "store_true",
) -> None:
    """Add an option for each field of a model. ``special``: how some differ; ``flag``: how flags act."""
    for name, field in model.model_fields.items():
        kind = {"action": flag} if "bool" in str(field.annotation) else {"metavar": "N"}
        words = {"dest": name, "default": None, "help": field.description, **kind, **special.get(name, {})}
        parser.add_argument(option(name), **words)


def given(parsed_args: Namespace, model: type[BaseModel]) -> dict[str, Any]:
    """The options that have a value, of those that are named like fields of a model."""
    values = ((name, getattr(parsed_args, name, None)) for name in model.model_fields)
    return {name: value for name, value in values if value is not None}


# -- Output formats of values: short text for humans, the API's values for ``-f json|yaml``. -------


Row = tuple[Any, ...]
#: What commands return: the names of columns, and the values of one object or of each.
Shown = tuple[Sequence[str], Row]
Listed = tuple[Sequence[str], Iterable[Row]]
#: The formats that have values as the API does.
_WHOLE = ("json", "yaml")


class Structure(FormattableColumn[Any]):
    """Nested values: a ``name: value`` line per leaf."""

    def human_readable(self) -> str:
        return "\n".join(_lines(self._value, ""))


class Text(FormattableColumn[Any]):
    """Values that people and scripts read as the same text."""


class Lines(Text):
    """Sentences, each on a line."""

    def human_readable(self) -> str:
        return "\n".join(self._value)


class NetworkColumn(Text):
    """A network as ``vlan physnet1 100``."""

    def human_readable(self) -> str:
        names = ("type", "physical_network", "vlan_id", "network_id")
        parts = (self._value.get(name) for name in names)
        return " ".join(str(part) for part in parts if part is not None)


class Error(Text):
    """An error as ``code: detail``, and the fix if there is one."""

    def human_readable(self) -> str:
        fix = f"\nFix: {self._value['fix']}" if self._value.get("fix") else ""
        return f"{self._value['code']}: {self._value['detail']}{fix}"


Columns = Mapping[str, type[FormattableColumn[Any]]]
#: How people see nested values, by the name of the column; others are a ``Structure``.
_COLUMNS: Columns = {"error": Error, "network": NetworkColumn}


def word(value: Any) -> str:
    """A value as text: nothing for None, and truth as in JSON."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def on_one_line(cell: Any) -> str:
    """A cell for csv, value and shell: a list with commas, other structures as JSON."""
    if isinstance(cell, Text):
        return ". ".join(cell.human_readable().splitlines())
    if not isinstance(cell, FormattableColumn):
        return word(cell)
    value = cell.machine_readable()
    if isinstance(value, list) and not any(isinstance(inner, dict | list) for inner in value):
        return ",".join(map(word, value))
    return json.dumps(value) if isinstance(value, dict | list) else word(value)


class InWords(ListFormatter, SingleFormatter):
    """Gives a formatter texts in place of structures, with commands in place of calls; numbers stay."""

    def __init__(self, formatter: Any) -> None:
        self._formatter = formatter
        self._text = _for_people if isinstance(formatter, TableFormatter) else on_one_line

    def add_argument_group(self, parser: ArgumentParser) -> None:
        """The formatter has added its own."""

    def emit_list(
        self,
        column_names: Sequence[str],
        data: Iterable[Sequence[Any]],
        stdout: TextIO,
        parsed_args: Namespace,
    ) -> None:
        rows = [[self._cell(value) for value in row] for row in data]
        self._formatter.emit_list(column_names, rows, stdout, parsed_args)

    def emit_one(
        self, column_names: Sequence[str], data: Sequence[Any], stdout: TextIO, parsed_args: Namespace
    ) -> None:
        self._formatter.emit_one(column_names, [self._cell(value) for value in data], stdout, parsed_args)

    def _cell(self, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number else as_commands(self._text(value))


def _for_people(cell: Any) -> str:
    return str(cell.human_readable()) if isinstance(cell, FormattableColumn) else word(cell)


def check_columns(asked: Sequence[str], names: Sequence[str]) -> None:
    """Raises: InvalidRequest for a column of ``--column`` that there is not."""
    for column in asked:
        if column.lower().strip().replace(" ", "_") not in names:
            raise InvalidRequest(
                f"there is no column {column}{did_you_mean(column, names)}",
                step="print",
                fix=f"choose from {', '.join(names)}",
            )


class ShowOne(Base, cliff.show.ShowOne, _Spelled):
    """A command that shows one object."""

    def produce_output(self, parsed_args: Namespace, column_names: Sequence[str], data: Sequence[Any]) -> int:
        check_columns(parsed_args.columns, column_names)
        if parsed_args.formatter not in _WHOLE:
            self.formatter = InWords(self.formatter)
        return super().produce_output(parsed_args, column_names, data)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned text columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def fields(model: BaseModel, columns: Columns = _COLUMNS) -> Shown:
    """All fields of a model as the columns of one object."""
    names = tuple(type(model).model_fields)
    return names, row(model, names, columns)


def row(model: BaseModel, names: Sequence[str], columns: Columns = _COLUMNS) -> Row:
    """These values of a model or, where it has none of the name, of its spec."""
    values = model.model_dump(mode="json")
    values = {**values.get("spec", {}), **values}
    return tuple(_column(values[name], columns.get(name, Structure)) for name in names)


def rows(models: Iterable[BaseModel], names: Sequence[str]) -> Listed:
    """A row for each of the models."""
    return names, [row(model, names) for model in models]


def read_text(name: str) -> str:
    """The text of a file, or of standard input for ``-``. Raises: InvalidRequest."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as wrong:
        raise InvalidRequest(
            f"{name} cannot be read: {reason(wrong)}",
            step="read",
            fix="name a text file, or - for standard input",
        ) from None


def _column(value: Any, kind: type[FormattableColumn[Any]]) -> Any:
    return kind(value) if isinstance(value, dict | list) else value


def _lines(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lines(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for number, inner in enumerate(value):
            yield from _lines(inner, f"{name}.{number}" if name else str(number))
    elif isinstance(value, list):
        if value:
            yield (f"{name}: " if name else "") + ", ".join(map(word, value))
    elif value is not None:
        yield f"{name}: {word(value)}" if name else word(value)


# -- Base classes of commands that print a list. ---------------------------------------------------


class TableLister(Base, Lister, _Spelled):
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
        check_columns(parsed_args.columns, column_names)
        rows = list(data)
        if parsed_args.formatter in _WHOLE:
            return super().produce_output(parsed_args, column_names, rows)
        is_table = isinstance(self.formatter, TableFormatter)
        self.formatter = InWords(FittedTable(self.head, self.cuts, self.note) if is_table else self.formatter)
        status = super().produce_output(parsed_args, column_names, rows)
        if not is_table:
            return status
        for text in [*([] if rows else [self.empty]), *self._notes]:
            self.say(f"netplugin: {text}")
        return status


class FindingLister(TableLister):
    """A command that lists findings; the exit status is 1 if a check fails."""

    empty = "no findings: the checks found nothing to fix"
    head = ("status", "id")
    cuts = False  # a fix is of use only as a whole

    @abstractmethod
    def find(self, parsed_args: Namespace) -> Iterable[Finding]: ...

    def take_action(self, parsed_args: Namespace) -> Listed:
        findings = list(self.find(parsed_args))
        self.status = 1 if any(finding.status == "fail" for finding in findings) else 0
        return rows(findings, tuple(Finding.model_fields))
