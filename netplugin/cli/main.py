"""The entry point of ``netplugin``: runs a command and prints errors in one line."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

from cliff.app import App
from cliff.command import Command
from cliff.commandmanager import CommandManager

from netplugin.calls import as_commands
from netplugin.cli import commands
from netplugin.spelling import did_you_mean

_DESCRIPTION = (
    "Command-line client of the netplugin agent at NETPLUGIN_URL (default "
    "unix:/run/netplugin/agent.sock; or "
    "https://host:port). Credentials for TCP: NETPLUGIN_TOKEN_FILE (bearer token), NETPLUGIN_CA, "
    "NETPLUGIN_CERT and NETPLUGIN_KEY (TLS)."
)
#: Bits of a mode with which others could write to files that are made here.
_WRITABLE = 0o022
#: The exit status that a shell has for a program that SIGPIPE ended.
_SIGPIPE_EXIT = 141
#: Files are in UTF-8 in any locale; what a terminal of another one cannot show is escaped.
_STREAMS = {
    "stdin": {"encoding": "utf-8"},
    "stdout": {"errors": "backslashreplace"},
    "stderr": {"errors": "backslashreplace"},
}

#: Control characters but newline and tab, and those that reverse the direction of text: as escapes
#: that are also JSON's.
_ESCAPES = {
    code: f"\\u{code:04x}"
    for code in (*range(32), *range(127, 160), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
}


class Visible:
    """A stream on which names and texts of others do not control the reader's terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text.translate(_ESCAPES))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Commands(CommandManager):
    """The commands by name, imported when one is run: cliff imports them all, at each start.

    Those of other distributions are looked for if a command is none of our own, and for the help.
    """

    def load_commands(self, namespace: str) -> None:
        self.group_list.append(namespace)
        self.commands.update(commands.own())

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for entry in importlib.metadata.entry_points(group=commands.GROUP):
            self.commands.setdefault(entry.name.replace("_", " "), entry)
        return super().__iter__()

    def find_command(self, argv: list[str]) -> tuple[type[Command], str, list[str]]:
        """As cliff's. Raises: ValueError, which says what was meant."""
        try:
            return super().find_command(argv)
        except ValueError:
            iter(self)
        try:
            return super().find_command(argv)
        except ValueError:
            words = list(takewhile(lambda word: not word.startswith("-"), argv))[:2]
            raise ValueError(self._unknown(words, argv[0])) from None

    def _unknown(self, words: list[str], first: str) -> str:
        if not words:
            return f"there is no option {first} before the command; see netplugin --help"
        actions = [name.removeprefix(first) for name in self.commands if name.startswith(f"{first} ")]
        if actions and len(words) == 1:
            return f"{first} is not a whole command: it needs one of{','.join(sorted(actions))}"
        name = " ".join(words)
        meant = did_you_mean(name, self.commands) or "; netplugin --help lists the commands"
        return f"there is no command {name}{meant}"


class _Version(argparse.Action):
    """Reads the version only for who wants to see it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(parser.prog, importlib.metadata.version("netplugin"))
        parser.exit()


class _Console(logging.Formatter):
    """Messages in the words of this command line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return as_commands(super().formatMessage(record))


class Netplugin(App):
    """Exit status: 0 success, 1 failure with an error on standard error, 2 wrong command line."""

    NAME = "netplugin"
    LOG = logging.getLogger("netplugin")
    CONSOLE_MESSAGE_FORMAT = "netplugin: %(message)s"
    DEFAULT_VERBOSE_LEVEL = 0  # results on standard output, errors only on standard error

    def __init__(self) -> None:
        # Deferred, so that `netplugin port put --help` is the help of that command.
        super().__init__(_DESCRIPTION, None, Commands("netplugin.cli"), deferred_help=True)
        self.stdout, self.stderr = Visible(self.stdout), Visible(self.stderr)
        root = logging.getLogger()
        self._before = list(root.handlers), root.level

    def build_option_parser(
        self, description: str | None, version: str | None, argparse_kwargs: dict[str, Any] | None = None
    ) -> argparse.ArgumentParser:
        # With abbreviations, an application option would match command options with the same
        # prefix.
        options = {"allow_abbrev": False, "prog": self.NAME, "conflict_handler": "resolve"}
        parser = super().build_option_parser(description, version, options)
        # cliff's own has the name of the file that was started.
        parser.add_argument("--version", action=_Version, nargs=0, help="Show the version and exit.")
        return parser

    def get_fuzzy_matches(self, cmd: str) -> list[str]:
        return []  # ``Commands.find_command`` names what was meant

    def configure_logging(self) -> None:
        super().configure_logging()
        logging.getLogger().handlers[-1].setFormatter(_Console(self.CONSOLE_MESSAGE_FORMAT))

    def initialize_app(self, argv: list[str]) -> None:
        if not argv:  # no interactive mode: a script without a command must not hang
            self.options.deferred_help = True

    def close(self) -> None:
        """Restore the logging configuration, for a process that continues after this."""
        root = logging.getLogger()
        handlers, level = self._before
        root.setLevel(level)
        for handler in [h for h in root.handlers if h not in handlers]:
            root.removeHandler(handler)
            handler.close()


def main(argv: Sequence[str] | None = None) -> int:
    os.umask(os.umask(_WRITABLE) | _WRITABLE)  # whatever umask it was started with
    for stream, how in _STREAMS.items():
        if reconfigure := getattr(getattr(sys, stream), "reconfigure", None):
            reconfigure(**how)
    app = Netplugin()
    try:
        status = app.run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python would flush it once more at its end, and report that.
        with Path("/dev/null").open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return _SIGPIPE_EXIT
    finally:
        app.close()


if __name__ == "__main__":
    sys.exit(main())
