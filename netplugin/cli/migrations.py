"""``netplugin port migrate`` and ``migrate-check``: live migration of a port, on one of the two hosts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable

from netplugin.api.field_errors import valid
from netplugin.api.migration_models import MigrateCheck, MigrateRequest
from netplugin.api.models import Finding
from netplugin.cli import show
from netplugin.cli.ports import read_spec
from netplugin.cli.show import FindingLister


class PortMigrate(show.Changes, show.ShowOne):
    """Carry out one step of a port's live migration.

    On the host that the VM leaves or comes to. `prepare` needs --spec. Prints nothing if the port is gone.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("port_id", metavar="ID", help="ID of the port")
        steps = ["prepare", "activate", "commit", "abort", "leave"]
        parser.add_argument("step", choices=steps, metavar="STEP", help="one of %(choices)s")
        parser.add_argument(
            "--spec", metavar="FILE", help="the port on this host as JSON; - reads standard input"
        )
        show.flag(parser, "--auto", "open the port while its guest runs here, else close it")

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        fields = {"phase": parsed_args.step}
        if parsed_args.spec:
            fields["port"] = read_spec(parsed_args.spec)
        if parsed_args.auto:
            fields["activation"] = "auto"
        request = valid(MigrateRequest, fields)
        port = self.agent.migrate_port(parsed_args.port_id, request)
        return show.fields(port) if port else ((), ())


class PortMigrateCheck(show.Asks, FindingLister):
    """Check whether a port can migrate to this host.

    Compares it with the port that this host would have. Exit status 1 if a check fails.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("port_id", metavar="ID", help="ID of the port")
        parser.add_argument("--spec", metavar="FILE", required=True, help="the port on this host as JSON")
        parser.add_argument("--source", metavar="FILE", required=True, help="the port on the source as JSON")
        parser.add_argument(
            "--domain", metavar="FILE", help="the VM's domain on the source, to be placed here"
        )
        show.flag(parser, "--pin", "the VM will be pinned, by this host's CPU plan")
        show.flag(parser, "--postcopy", "the VM's memory follows it (post-copy)")

    def find(self, parsed_args: Namespace) -> Iterable[Finding]:
        fields = {
            "port_id": parsed_args.port_id,
            "port": read_spec(parsed_args.spec),
            "source": read_spec(parsed_args.source),
            "postcopy": parsed_args.postcopy,
        }
        if parsed_args.domain:
            fields["domain"] = {"xml": show.read_text(parsed_args.domain), "policy": {"pin": parsed_args.pin}}
        request = valid(MigrateCheck, fields)
        return self.agent.check_migration(request)
