"""The commands ``netplugin backend list|check`` and ``reconcile``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable

from netplugin.api.models import BackendInfo, Finding, ReconcileRequest
from netplugin.cli import show
from netplugin.cli.show import FindingLister


class BackendList(show.TableLister):
    """List the backends with their usability and features."""

    empty = "no backend: name some in [agent] enabled_backends of the agent's configuration"

    def take_action(self, parsed_args: Namespace) -> show.Listed:
        return show.rows(self.agent.backends(), tuple(BackendInfo.model_fields))


class BackendCheck(FindingLister):
    """List the findings of the agent about the host.

    Exit status 1 if a check fails.
    """

    def find(self, parsed_args: Namespace) -> Iterable[Finding]:
        return self.agent.checks()


class Reconcile(show.ShowOne):
    """Reconcile the host with the stored intents, or show the plan.

    Exit status 1 if something could not be repaired.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="print the plan without applying it")
        parser.add_argument(
            "--remove-orphans",
            action="store_true",
            help="also remove marked ports without an intent, after the agent's store was lost",
        )

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        request = ReconcileRequest(dry_run=parsed_args.dry_run, remove_orphans=parsed_args.remove_orphans)
        report = self.agent.reconcile(request)
        self.status = 1 if report.errors else 0
        return show.fields(report)
