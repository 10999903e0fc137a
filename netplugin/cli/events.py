"""The command ``netplugin events``: follows what happens on the host, across restarts of the agent."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace

from netplugin.api.client import Client
from netplugin.api.errors import BackendUnavailable, OperationTimeout
from netplugin.api.event_models import Event, EventFilter, EventKind
from netplugin.api.field_errors import valid
from netplugin.cli.show import READ_S, Command, add_form, flag, number, seconds

#: Seconds between attempts to reach an agent that has ended.
_AGAIN_S = 1.0


class Events(Command):
    """Follow the events of the host.

    States of ports, connections of VMs, drift, backends, findings, networks.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        number(parser, "--after", "N", "begin after this event (default: now; with --no-follow the oldest)")
        parser.add_argument(
            "--kind",
            choices=[kind.value for kind in EventKind],
            metavar="KIND",
            help="only events of this kind: %(choices)s",
        )
        parser.add_argument("--port", metavar="ID", help="only events of this port")
        parser.add_argument("--backend", metavar="NAME", help="only events of this backend")
        flag(parser, "--no-follow", "end with the last stored event (default: follow)")
        parser.add_argument(
            "--until", metavar="STATE", help="end with the first event that has this state, as connected"
        )
        parser.add_argument(
            "--timeout",
            type=seconds,
            metavar="S",
            help="seconds to follow; with --until, exit status 1 if it did not come (default: no limit)",
        )
        add_form(parser, "json", words="json: an event a line")

    def take_action(self, parsed_args: Namespace) -> int:
        """Exit status 0; 1 with ``--until`` if the state did not come."""
        fields = {"port_id": parsed_args.port, "follow": not parsed_args.no_follow}
        fields |= {name: getattr(parsed_args, name) for name in ("after", "kind", "backend")}
        event_filter = valid(EventFilter, fields)
        deadline = None if parsed_args.timeout is None else time.monotonic() + parsed_args.timeout
        while True:
            if deadline is not None:
                left = max(0.001, deadline - time.monotonic())
                event_filter = event_filter.model_copy(update={"seconds": left})
            with Client.from_environment(timeout_s=READ_S) as client:
                events = client.events(event_filter)
                try:
                    for event in events:
                        self.app.stdout.write(f"{_line(event, parsed_args.format)}\n")
                        self.app.stdout.flush()
                        if event.state == parsed_args.until:
                            return 0
                except (BackendUnavailable, OperationTimeout) as failed:
                    if events.last is None:
                        raise  # the agent was never there
                    self.app.LOG.warning("%s; continuing after event %d", failed.detail, events.last)
            event_filter = event_filter.model_copy(update={"after": events.last})
            if not event_filter.follow or (deadline is not None and time.monotonic() >= deadline):
                return 1 if parsed_args.until else 0
            time.sleep(_AGAIN_S)


def _line(event: Event, form: str) -> str:
    if form == "json":
        return event.model_dump_json()
    about = (event.kind.value, event.backend, event.port_id, event.subject, event.state)
    line = f"{event.at:%Y-%m-%d %H:%M:%S} {event.id} {' '.join(filter(None, about))}"
    return f"{line}: {event.detail}" if event.detail else line
