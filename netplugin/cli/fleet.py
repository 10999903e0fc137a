"""The commands ``netplugin fleet ...``: a fleet's hosts by what etcd has of them, from any machine."""

from __future__ import annotations

import asyncio
import json
import os
from abc import abstractmethod
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from netplugin.api.errors import InvalidRequest, NetpluginError, NotFound, Unsupported
from netplugin.api.models import Finding
from netplugin.cli import show
from netplugin.fleet import values
from netplugin.fleet.names import PORTS, Credentials, Ref
from netplugin.fleet.reports import Report, Written, findings, refs, standing

if TYPE_CHECKING:
    from netplugin.fleet.writer import Writer

_OF_ETCD = {
    "endpoints": "members of etcd as host:port, with commas between them",
    "ca": "file with the CA of etcd",
    "cert": "file with the client certificate, whose common name is the user of etcd",
    "key": "file with the private key of the certificate",
    "user": "user of etcd that has a password, in place of a certificate",
    "password_file": "file with the password of the user, for its owner alone",
}
_AS_DESIRED = ("verified", "removed")


class _Fleet(show.Base):
    """What all of these have: the options of etcd, and work as the user of these."""

    def add_options(self, parser: ArgumentParser) -> None:
        for name, text in _OF_ETCD.items():
            variable = f"NETPLUGIN_FLEET_{name.upper()}"
            text, default = f"{text} (default: {variable})", os.environ.get(variable)
            parser.add_argument(show.option_of(name), default=default, metavar=name.upper(), help=text)

    @abstractmethod
    async def work(self, writer: Writer, options: Namespace) -> Any:
        """What the command does and prints. Raises: NetpluginError."""

    def take_action(self, parsed_args: Namespace) -> Any:
        try:
            from netplugin.fleet.etcd import Etcd
            from netplugin.fleet.writer import Writer
        except ModuleNotFoundError as missing:
            fix = "pip install 'netplugin[fleet]'"
            raise Unsupported(f"{missing.name} is not installed", step="fleet", fix=fix) from None
        if not parsed_args.endpoints:
            raise InvalidRequest.of_field("endpoints", "is required", fix="set NETPLUGIN_FLEET_ENDPOINTS")

        async def connected() -> Any:
            etcd = Etcd(parsed_args.endpoints.split(","), Credentials.of(vars(parsed_args)))
            try:
                return await self.work(Writer(etcd), parsed_args)
            finally:
                await etcd.close()

        return asyncio.run(connected())


def _add_list(parser: ArgumentParser, name: str, metavar: str, words: str) -> None:
    words = f"{words}; may be given several times"
    parser.add_argument(name, metavar=metavar, action="append", default=[], help=words)


def _add_timeout(parser: ArgumentParser) -> None:
    words = "for each host (default: 300)"
    parser.add_argument("--timeout", metavar="SECONDS", type=show.seconds, default=300.0, help=words)


class FleetStatus(show.FindingLister, _Fleet):
    """List what is wrong in the fleet, each with the next command.

    Exit status 1 if a host or an object fails.
    """

    empty = "all hosts are connected, and each object is as etcd has it"

    def find(self, parsed_args: Namespace) -> Iterable[Finding]:
        found: Iterable[Finding] = _Fleet.take_action(self, parsed_args)
        return found

    async def work(self, writer: Writer, options: Namespace) -> list[Finding]:
        found = await writer.reports()
        desired = await writer.etcd.read(values.root("desired"), keys_only=True)
        newest: dict[str, int] = defaultdict(int)
        for host, _, kv in refs(desired.items):
            newest[host] = max(newest[host], kv.mod_revision)
        alive, hosts = sum(report.is_alive for report in found.values()), len({*found, *newest})
        self.note(f"{alive} of {hosts} hosts are connected, and etcd is at revision {desired.revision}")
        listed, expected = [*findings(found, newest, desired.revision)], "it is finished"
        for kv in (await writer.etcd.read(values.root("roll"), keys_only=True)).items:
            ref = kv.key.removeprefix(values.root("roll"))
            text, fix = f"a roll of {ref} is under way, or was interrupted", f"netplugin fleet roll {ref}"
            listed += [Finding(id=f"roll-{ref}", status="warn", found=text, expected=expected, fix=fix)]
        return listed


class FleetHosts(_Fleet, show.TableLister):
    """List the hosts that have reported."""

    empty = "no host has reported; see `netplugin fleet init`"

    async def work(self, writer: Writer, options: Namespace) -> show.Listed:
        columns = ("host", "connected", "follows", "version", "objects", "open", "not_as_desired", "revision")
        return columns, [_host(report) for report in (await writer.reports()).values()]


def _host(report: Report) -> show.Row:
    summary, follows = report.summary, report.has_carried_out(0)
    if summary is None:
        return report.host, report.is_alive, follows, *[None] * 5
    counts = summary.counts.get("owned", 0), summary.counts.get("open", 0), report.off
    follows = follows and summary.refused is None
    return report.host, report.is_alive, follows, summary.version, *counts, summary.revision


class _Objects(_Fleet, show.TableLister):
    """A row for each object that is desired, or that a host has although it is not."""

    empty = "no ports"
    head = ("host", "object", "state")
    cuts = False

    @abstractmethod
    def chooses(self, options: Namespace, ref: Ref) -> bool: ...

    async def work(self, writer: Writer, options: Namespace) -> show.Listed:
        host, rows = getattr(options, "host", ""), []
        chosen = partial(self.chooses, options)
        found = await writer.reports(host)
        there = {(each.host, each.ref): each for each in await writer.desired(host, chosen)}
        held = {(name, ref) for name, each in found.items() for ref in filter(chosen, each.faults)}
        for name, ref in sorted({*there, *held}):
            desired, report = there.get((name, ref)), found.get(name, Report(name, ""))
            generation = desired.generation if desired else None
            rows.append((name, str(ref), generation, *standing(report, ref, desired)))
        return ("host", "object", "generation", "state", "why", "next"), rows


class FleetPorts(_Objects):
    """List the ports of the fleet, each with its state."""

    def add_options(self, parser: ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--host", metavar="HOST", default="", help="only those of this host")
        parser.add_argument("--off", action="store_true", help="only those that are not as desired")

    def chooses(self, options: Namespace, ref: Ref) -> bool:
        return ref.kind in PORTS

    async def work(self, writer: Writer, options: Namespace) -> show.Listed:
        columns, rows = await super().work(writer, options)
        return columns, [row for row in rows if not (options.off and row[3] in _AS_DESIRED)]


class FleetExplain(_Objects):
    """Say what became of a port or network, and what to do.

    On each host that has it. Exit status 1 if it is not as desired.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("id", metavar="ID", help="ID of a port, or name of a network")

    def chooses(self, options: Namespace, ref: Ref) -> bool:
        return bool(ref.id == options.id)

    async def work(self, writer: Writer, options: Namespace) -> show.Listed:
        columns, rows = await super().work(writer, options)
        if not rows:
            text = f"no host has, or is to have, {options.id}"
            raise NotFound(text, step="fleet", fix="netplugin fleet ports")
        self.status = 1 if any(row[3] not in _AS_DESIRED for row in rows) else 0
        return columns, rows


class FleetDrain(_Fleet, show.TableLister):
    """Remove the ports of a host, and wait until they have gone.

    All of them, or some. No brake stops it. Exit status 1 if one is left.
    """

    empty = "the host has no ports"

    def add_options(self, parser: ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("host", metavar="HOST", help="name of the host")
        _add_list(parser, "--port", "ID", "only this port")
        _add_timeout(parser)

    async def work(self, writer: Writer, options: Namespace) -> show.Listed:
        async def gone(each: Written) -> show.Row:
            try:
                await writer.verified(each, within_s=options.timeout)
            except NetpluginError as error:
                self.status = 1
                return str(each.ref), "left", show.Error(error.problem().model_dump(mode="json"))
            return str(each.ref), "removed", None

        rows = await asyncio.gather(*map(gone, await writer.drain(options.host, options.port)))
        return ("object", "state", "error"), rows


class FleetRoll(_Fleet, show.ShowOne):
    """Change a network on all hosts, a few at a time.

    A physical network, or one of VXLAN. Each host is verified before another one begins. Run again it goes on
    where it was, from any machine. Exit status 1 if a host failed or is left.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("object", metavar="OBJECT", help="such as physical-network/physnet1")
        words = "fields to change, null for the default; default: go on with an unfinished roll"
        parser.add_argument("--change", metavar="JSON", help=words)
        _add_list(parser, "--host", "HOST", "only this host (default: all that have the object)")
        words = "hosts that are changed and not verified, or failed, at once (default: 1)"
        parser.add_argument("--max-unavailable", metavar="N", type=show.whole, default=1, help=words)
        words = "begin with no host after one has failed"
        parser.add_argument("--stop-on-error", action="store_true", help=words)
        words = "forget an unfinished roll; what it has changed stays"
        parser.add_argument("--abandon", action="store_true", help=words)
        _add_timeout(parser)

    async def work(self, writer: Writer, options: Namespace) -> show.Shown:
        from netplugin.fleet.operate import Roller

        ref, left = Ref.of(options.object), 0
        if ref.kind in PORTS:
            raise InvalidRequest.of_field("object", "must be physical-network/NAME or network/ID")
        roller = Roller(writer, ref, options.timeout, self.say)
        if options.abandon:
            await roller.abandon()
        else:
            change = None if options.change is None else _object(options.change)
            most = max(1, options.max_unavailable)
            left = await roller.run(change, options.host, most, options.stop_on_error)
        self.status = 1 if left or roller.failed else 0
        return ("object", "left", "failed"), (str(ref), left, show.Structure(roller.failed))


def _object(text: str) -> dict[str, Any]:
    """Raises: InvalidRequest."""
    try:
        value = json.loads(text)
    except ValueError as wrong:
        raise InvalidRequest.of_field("change", f"is no JSON: {wrong}") from None
    if not isinstance(value, dict):
        raise InvalidRequest.of_field("change", "must be an object with named fields")
    return value


class FleetAccept(_Fleet, show.ShowOne):
    """Let etcd count as it is, for all hosts or for one.

    After a restore, for another cluster, and for removals that wait. Hosts read it within half a minute.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        super().add_options(parser)
        words = "of etcd, as status prints it"
        parser.add_argument("--revision", metavar="N", type=show.whole, required=True, help=words)
        parser.add_argument("--host", metavar="HOST", default="", help="for this host alone")

    async def work(self, writer: Writer, options: Namespace) -> show.Shown:
        from netplugin.fleet.operate import accept

        return show.fields(await accept(writer, options.revision, options.host))


class FleetInit(_Fleet, show.Command):
    """Make the roles and users of the fleet in etcd.

    And print what to put on each host. Run again it makes what is missing. The users that it makes have no
    password, but a certificate with their name as CN; those that are there keep theirs.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        super().add_options(parser)
        _add_list(parser, "--host", "HOST", "a host, by its [fleet] host")
        _add_list(parser, "--reader", "USER", "who may see all of the fleet")
        _add_list(parser, "--writer", "USER", "who may also desire objects, such as a platform")
        _add_list(parser, "--operator", "USER", "who may also accept, and roll")
        _add_list(parser, "--remove", "HOST", "a host whose user is to go")
        words = "leave access control off, so that whoever has a certificate may do anything"
        parser.add_argument("--no-enable", action="store_true", help=words)

    async def work(self, writer: Writer, options: Namespace) -> None:
        from netplugin.fleet.access import ROLE, Access

        users = [(user, role) for name, role in ROLE.items() for user in getattr(options, name)]
        access = Access(writer.etcd)
        for line in await access.init(options.host, users):
            self.say(f"made: {line}")
        for host in options.remove:
            await access.remove(host)
        if not options.no_enable:
            await access.enable()
        for host in options.host:
            self.app.stdout.write(_ON_HOST.format(host=host, endpoints=options.endpoints))


_ON_HOST = """
# On {host}, in /etc/netplugin/netplugin.conf; cert is a client certificate with CN={host}
# (a user that has a password: user and password_file).
[fleet]
endpoints = {endpoints}
host = {host}
ca = /etc/netplugin/fleet-ca.pem
cert = /etc/netplugin/fleet.pem
key = /etc/netplugin/fleet.key
"""
