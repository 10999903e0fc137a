"""The command ``netplugin port counters``: what a port has carried, and where its packets were dropped."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from netplugin.cli import show

if TYPE_CHECKING:
    from netplugin.api.counter_models import Counted
    from netplugin.api.counter_models import PortCounters as Found

#: Seconds between two lines of ``--watch``.
_TURN_S = 1.0
_COLUMNS = ("of", "counter", "value", "since")


class PortCounters(show.Asks, show.TableLister):
    """Show the counters of a port and of its uplinks.

    Packets, bytes, and drops by place; a place without drops is left out.
    """

    empty = "the backend has not counted yet: the port is not on the host, or the host did not answer"

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("port_id", metavar="ID", help="ID of the port")
        show.flag(parser, "--watch", "print what changes, a line a second, until interrupted")
        parser.add_argument(
            "--seconds", type=show.seconds, metavar="S", help="how long to watch (default: no limit)"
        )

    def take_action(self, parsed_args: Namespace) -> show.Listed:
        found = self.agent.port_counters(parsed_args.port_id)
        if parsed_args.watch:
            found = self._watch(found, parsed_args.seconds)
        if found.counters and found.read_at:
            self.note(f"read at {found.read_at:%Y-%m-%d %H:%M:%S} UTC")
        return _COLUMNS, [row for of, counted in _each(found) for row in _rows(of, counted)]

    def _watch(self, found: Found, timeout_s: float | None) -> Found:
        """Print the differences of one reading to the next; returns the last one, also when interrupted."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while end is None or time.monotonic() < end:
                time.sleep(_TURN_S)
                before, found = found, self.agent.port_counters(found.port_id)
                if found.read_at != before.read_at:
                    self.say(_line(before, found))
        except KeyboardInterrupt:
            pass
        return found


def _each(found: Found) -> Iterator[tuple[str, Counted]]:
    if found.counters:
        yield found.port_id, found.counters
    yield from ((uplink.device, uplink.counters) for uplink in found.uplinks)


def _rows(of: str, counted: Counted) -> Iterator[show.Row]:
    since = f"{counted.since:%Y-%m-%d %H:%M:%S}"
    for name, value in _traffic(counted).items():
        yield of, name, value, since
    for drop in counted.drops:
        yield of, f"dropped: {drop.place.value}", drop.packets, f"{drop.since:%Y-%m-%d %H:%M:%S}"


def _traffic(counted: Counted) -> dict[str, int]:
    values = {
        "packets_from_vm": counted.packets_from_vm,
        "packets_to_vm": counted.packets_to_vm,
        "bytes_from_vm": counted.bytes_from_vm,
        "bytes_to_vm": counted.bytes_to_vm,
    }
    return values | ({"ring_retries": counted.ring_retries} if counted.ring_retries else {})


def _line(before: Found, found: Found) -> str:
    """What was counted between two readings, of the port and of its uplinks."""
    old = {of: {name: value for _, name, value, _ in _rows(of, counted)} for of, counted in _each(before)}
    parts = []
    for of, counted in _each(found):
        more = [(name, value - old.get(of, {}).get(name, 0)) for _, name, value, _ in _rows(of, counted)]
        changed = ", ".join(f"{name} {value:+d}" for name, value in more if value)
        parts.append(f"{of}: {changed or 'nothing'}")
    return f"{found.read_at:%H:%M:%S} {'; '.join(parts)}"
