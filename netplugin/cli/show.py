"""Output of commands: values as text, lists that fit the terminal, findings."""

from __future__ import annotations

import json
import sys
import threading
import time
from abc import abstractmethod
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ActionsContainer
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, TypeVar

import cliff.command
import cliff.show
from cliff.columns import FormattableColumn
from cliff.formatters.base import ListFormatter, SingleFormatter
from cliff.formatters.commaseparated import CSVLister
from cliff.formatters.json_format import JSONFormatter
from cliff.formatters.shell import ShellFormatter
from cliff.formatters.table import TableFormatter
from cliff.formatters.value import ValueFormatter
from cliff.formatters.yaml_format import YAMLFormatter
from cliff.lister import Lister
from stevedore.extension import ExtensionManager

from netplugin.api.connection import Answer, Connection
from netplugin.api.errors import BackendUnavailable, InvalidRequest, OperationTimeout, reason
from netplugin.calls import as_commands
from netplugin.cli.tables import FittedTable
from netplugin.spelling import Parser, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

    from netplugin.api.client import Client
    from netplugin.api.models import Finding

C = TypeVar("C", bound=Connection)
_LONGEST_S = 86_400

# -- Commands: with a client of the agent, and the parser that knows a misspelled option. -----------

#: How long an agent may take to answer a command that reads, and one that changes something: the agent gives
#: up itself before that ([agent] operation_timeout is 30 s).
READ_S, CHANGE_S = 10.0, 60.0


def flag(parser: _ActionsContainer, name: str, words: str) -> None:
    parser.add_argument(name, action="store_true", help=words)


def number(parser: _ActionsContainer, name: str, metavar: str, words: str) -> None:
    parser.add_argument(name, type=whole, metavar=metavar, help=words)


def several(parser: _ActionsContainer, name: str, metavar: str, words: str) -> None:
    words += "; may be given several times"
    parser.add_argument(name, action="append", default=[], metavar=metavar, help=words)


def add_override(parser: ArgumentParser) -> None:
    """For a command that changes what the fleet may have made."""
    flag(parser, "--override", "also if it is the fleet's, until its next change there")


class Base(cliff.command.Command):
    """What all commands have."""

    #: The exit status, which the action may set.
    status = 0

    def _load_hooks(self) -> None:
        self._hooks = []  # cliff looks for them in the metadata of all that is installed

    def _load_formatter_plugins(self) -> Any:
        """Those of cliff that the command can have; cliff would look for them in the same place."""
        kinds: dict[str, Any] = {"json": JSONFormatter, "value": ValueFormatter, "yaml": YAMLFormatter}
        kinds |= {"csv": CSVLister} if isinstance(self, Lister) else {"shell": ShellFormatter}
        kinds |= {"table": TableFormatter}
        made: list[Any] = [SimpleNamespace(name=name, obj=kind()) for name, kind in kinds.items()]
        return ExtensionManager.make_test_instance(made)

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        self.add_options(parser)
        return parser

    def add_options(self, parser: ArgumentParser) -> None:
        """Add the arguments of this command, after those of its output."""

    def run(self, parsed_args: Namespace) -> int:
        return super().run(parsed_args) or self.status

    def say(self, text: str) -> None:
        """Print a line on standard error, at once."""
        self.app.stderr.write(f"{text}\n")
        self.app.stderr.flush()


class Asks(Base):
    """A command that asks the agent, which it waits for as long as ``--timeout`` says."""

    patience_s: ClassVar[float] = READ_S
    _asked: Connection

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        words = "how long the agent may take (default: %(default)g)"
        parser.add_argument(
            "--timeout", type=patience, default=self.patience_s, metavar="SECONDS", help=words
        )
        return parser

    def run(self, parsed_args: Namespace) -> int:
        self._override = getattr(parsed_args, "override", False)
        self._timeout_s = parsed_args.timeout
        with ExitStack() as self._opened:
            try:
                return self.carry_out(parsed_args)
            except (BackendUnavailable, OperationTimeout) as failed:
                if failed.__cause__ is not None:  # it did not come from the agent
                    from netplugin.cli.silence import known_of

                    failed.detail += known_of(self._asked, failed.__cause__)
                raise

    def carry_out(self, parsed_args: Namespace) -> int:
        return super().run(parsed_args)

    @cached_property
    def agent(self) -> Client:
        """A client of the agent until the command ends, with models."""
        from netplugin.api.client import Client  # commands that only read start faster without it

        return self._opening(Client)

    def read(self, path: str, more_s: float = 0.0, **parameters: Any) -> Answer:
        """What the agent answers to GET."""
        return self.connection.call("GET", path, parameters=parameters, more_s=more_s)

    @cached_property
    def connection(self) -> Connection:
        return self._opening(Connection)

    def _opening(self, kind: type[C]) -> C:
        self._asked = made = kind.from_environment(timeout_s=self._timeout_s)
        made.override, made.waiting = self._override, lambda: progress("waiting for the agent")
        self._opened.callback(made.close)
        return made


class Changes(Asks):
    """A command that changes something: what it has begun is carried out, whether or not it waits."""

    patience_s = CHANGE_S


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on a terminal what is waited for, and for how long, if it takes longer than 2 s."""
    if not sys.stderr.isatty():
        yield
        return
    done, began = threading.Event(), time.monotonic()

    def tell() -> None:
        pause, end = 2.0, ""
        while not done.wait(pause):
            sys.stderr.write(f"\rnetplugin: {what}: {time.monotonic() - began:.0f} s")
            sys.stderr.flush()
            pause, end = 1.0, "\r\x1b[K"
        sys.stderr.write(end)
        sys.stderr.flush()

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


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


def patience(text: str) -> float:
    """The value of ``--timeout``. Raises: ArgumentTypeError."""
    value = seconds(text)
    if not 0 < value <= _LONGEST_S:
        raise ArgumentTypeError(f"{text!r} is not above 0 and at most {_LONGEST_S}")
    return value


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
#: An object of an answer.
Values = Mapping[str, Any]
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
        self, column_names: Sequence[str], data: Iterable[Any], stdout: TextIO, parsed_args: Namespace
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
            what = f"there is no column {column}{did_you_mean(column, names)}"
            raise InvalidRequest(what, step="print", fix=f"choose from {', '.join(names)}")


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


def fields(of: Values | BaseModel, columns: Columns = _COLUMNS) -> Shown:
    """All fields of a model, or of an answer, as the columns of one object."""
    values = of if isinstance(of, Mapping) else of.model_dump(mode="json")
    return tuple(values), row(values, tuple(values), columns)


def row(of: Values | BaseModel, names: Sequence[str], columns: Columns = _COLUMNS) -> Row:
    """These values of it or, where it has none of the name, of its spec."""
    values = of if isinstance(of, Mapping) else of.model_dump(mode="json")
    values = {**(values.get("spec") or {}), **values}
    return tuple(_column(values.get(name), columns.get(name, Structure)) for name in names)


def rows(of: Iterable[Values | BaseModel], names: Sequence[str]) -> Listed:
    """A row for each."""
    return names, [row(each, names) for each in of]


def read_text(name: str) -> str:
    """The text of a file, or of standard input for ``-``, in UTF-8. Raises: InvalidRequest."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as wrong:
        fix = "name a text file, or - for standard input"
        raise InvalidRequest(f"{name} cannot be read: {reason(wrong)}", step="read", fix=fix) from None


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
        self._notes.clear()  # a list that is watched is printed again
        return status


#: The columns of findings, and of VXLAN networks.
NETWORK = ("network_id", "vni", "udp_port", "mtu", "peers", "local_vlan", "ports")
FINDING = ("id", "status", "found", "expected", "fix")


class FindingLister(TableLister):
    """A command that lists findings; the exit status is 1 if a check fails."""

    empty = "no findings: the checks found nothing to fix"
    head = ("status", "id")
    cuts = False  # a fix is of use only as a whole

    @abstractmethod
    def find(self, parsed_args: Namespace) -> Iterable[Finding | Values]: ...

    def take_action(self, parsed_args: Namespace) -> Listed:
        found = rows(self.find(parsed_args), FINDING)
        self.status = 1 if any(status == "fail" for _, status, *_ in found[1]) else 0
        return found
