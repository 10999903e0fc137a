"""The commands ``netplugin store backup|check|restore``; they work on the files, without the agent."""

from __future__ import annotations

import sqlite3
from argparse import ArgumentParser, Namespace
from pathlib import Path

from netplugin import store_file
from netplugin.cli.show import Command, progress

_STATE_PATH = Path("/var/lib/netplugin")


class _StoreCommand(Command):
    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--state-path",
            type=Path,
            default=_STATE_PATH,
            metavar="DIR",
            help="[DEFAULT] state_path of the agent (default: %(default)s)",
        )

    def run(self, parsed_args: Namespace) -> int:
        try:
            with progress("reading and writing the store"):
                return super().run(parsed_args)
        except (OSError, sqlite3.Error, ValueError, store_file.InUse) as wrong:
            self.app.LOG.error("%s", wrong)
            return 1


class StoreBackup(_StoreCommand):
    """Back up the agent's store to a file; the agent may be running."""

    def add_options(self, parser: ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("file", type=Path, help="the backup file; an existing file is replaced")

    def take_action(self, parsed_args: Namespace) -> None:
        store_file.backup(parsed_args.state_path, parsed_args.file)


class StoreCheck(_StoreCommand):
    """Check the agent's store or a backup of it.

    Exit status 1 if it is damaged.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("file", type=Path, nargs="?", help="a backup; default: the store itself")

    def take_action(self, parsed_args: Namespace) -> int:
        path = parsed_args.file or parsed_args.state_path / store_file.DATABASE
        found = store_file.check(path)
        for problem in found or ["ok"]:
            self.app.stdout.write(f"{path}: {problem}\n")
        return 1 if found else 0


class StoreRestore(_StoreCommand):
    """Replace the agent's store by a backup.

    Refused while an agent is running on it.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("file", type=Path, help="the backup file")

    def take_action(self, parsed_args: Namespace) -> None:
        before = store_file.restore(parsed_args.state_path, parsed_args.file)
        if before is not None:
            self.app.stdout.write(f"the previous store is now {before}\n")
