"""The commands ``netplugin backend list|check`` and ``reconcile``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence

from netplugin.api.client import Client
from netplugin.api.models import Finding, ReconcileRequest
from netplugin.cli import show
from netplugin.cli.show import FindingLister

Columns = tuple[Sequence[str], show.Row]


class BackendList(show.TableLister):
    """List the backends with their usability and features."""

    empty = "no backend: name some in [agent] enabled_backends of the agent's configuration"

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        with Client.from_environment() as client:
            backends = client.backends()
        columns = ("name", "usable", "reason", "fix", "features", "facts")
        rows = (backend.model_dump(mode="json") for backend in backends)
        return columns, [
            (
                row["name"],
                row["usable"],
                row["reason"],
                row["fix"],
                show.Structure(row["features"]),
                show.Structure(row["facts"]),
            )
            for row in rows
        ]


class BackendCheck(FindingLister):
    """List the findings of the agent about the host.

    Exit status 1 if a check fails.
    """

    def find(self, parsed_args: Namespace) -> Iterable[Finding]:
        with Client.from_environment() as client:
            return client.checks()


class Reconcile(show.ShowOne):
    """Reconcile the host with the stored intents, or show the plan.

    Exit status 1 if something could not be repaired.
    """

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("--dry-run", action="store_true", help="print the plan without applying it")
        parser.add_argument(
            "--remove-orphans",
            action="store_true",
            help="also remove marked ports without an intent, after the agent's store was lost",
        )
        return parser

    def take_action(self, parsed_args: Namespace) -> Columns:
        request = ReconcileRequest(dry_run=parsed_args.dry_run, remove_orphans=parsed_args.remove_orphans)
        with Client.from_environment() as client:
            report = client.reconcile(request)
        self.status = 1 if report.errors else 0
        return show.fields(report)
