"""The commands ``netplugin store backup|check|restore``: they work on the files, without the agent."""

from __future__ import annotations

import sqlite3
from argparse import ArgumentParser, Namespace
from pathlib import Path

from cliff.command import Command

from netplugin import store_file

_STATE_PATH = Path("/var/lib/netplugin")


class _StoreCommand(Command):
    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "--state-path", type=Path, default=_STATE_PATH, metavar="DIR",
            help="[DEFAULT] state_path of the agent (default: %(default)s)",
        )  # fmt: skip
        return parser

    def run(self, parsed_args: Namespace) -> int:
        try:
            return super().run(parsed_args)
        except (OSError, sqlite3.Error, ValueError, store_file.InUse) as wrong:
            self.app.LOG.error("%s", wrong)
            return 1


class StoreBackup(_StoreCommand):
    """Copy the agent's store to a file, also while the agent runs."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("file", type=Path, help="where the copy goes; one that is there goes")
        return parser

    def take_action(self, parsed_args: Namespace) -> None:
        store_file.backup(parsed_args.state_path, parsed_args.file)


class StoreCheck(_StoreCommand):
    """Say what is wrong with the agent's store, or with a copy of it; exit status 1 if something is."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "file", type=Path, nargs="?", help="a copy; without it, the store itself"
        )
        return parser

    def take_action(self, parsed_args: Namespace) -> int:
        path = parsed_args.file or parsed_args.state_path / store_file.DATABASE
        found = store_file.check(path)
        for problem in found or ["ok"]:
            self.app.stdout.write(f"{path}: {problem}\n")
        return 1 if found else 0


class StoreRestore(_StoreCommand):
    """Put a copy in the place of the agent's store; refused while an agent runs on it."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("file", type=Path, help="the copy")
        return parser

    def take_action(self, parsed_args: Namespace) -> None:
        before = store_file.restore(parsed_args.state_path, parsed_args.file)
        if before is not None:
            self.app.stdout.write(f"the store before is now {before}\n")
