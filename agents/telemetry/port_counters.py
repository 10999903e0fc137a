"""The counters of one backend's ports and uplinks, as they were last read, for the API and the metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from agents.telemetry.slow_reading import SlowReading
from netplugin.api.counter_models import Counted, Drop, Place, PortCounters, Traffic, UplinkCounters
from netplugin.api.errors import NetpluginError
from netplugin.backend import Intent
from netplugin.counters import Reading, Track, follow
from netplugin.optional import HasCounters

LOG = logging.getLogger(__name__)
#: Seconds for a read. One that fails closes the kept connection to a bridge, so it gets longer than who waits
#: for it.
_READ_S = 15.0


def clock() -> float:
    """Seconds of a clock that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Known:
    """A port or an uplink with its tracks, by source. A port with another ``stamp`` is another one."""

    tracks: Mapping[str, Track]
    network: str = ""
    uplinks: Sequence[str] = ()
    vm_id: str = ""
    stamp: str = ""


@dataclass(frozen=True)
class Snapshot:
    """What was known at ``at`` (``clock``); None: nothing yet."""

    backend: str
    at: float | None = None
    ports: Mapping[str, Known] = field(default_factory=dict)
    uplinks: Mapping[str, Known] = field(default_factory=dict)

    def of(self, port_id: str) -> PortCounters:
        """The counters of a port as the API has them."""
        port = self.ports.get(port_id)
        devices = [(name, self.uplinks[name]) for name in port.uplinks] if port else []
        return PortCounters(
            port_id=port_id,
            backend=self.backend,
            read_at=None if self.at is None else as_datetime(self.at),
            counters=_counted(port) if port else None,
            uplinks=tuple(UplinkCounters(device=name, counters=_counted(up)) for name, up in devices),
        )


class BackendCounters:
    """Reads the counters of a backend, and keeps the last ones: while the host is busy, these are known."""

    def __init__(self, backend: str, counts: HasCounters, intents: Callable[[], Sequence[Intent]]) -> None:
        self._counts = counts
        self._intents = intents
        self._known = Snapshot(backend)
        self._reading = SlowReading(f"counters-{backend}", self._read)

    def begin(self) -> None:
        """Start to read, unless a read is in progress."""
        self._reading.begin()

    def known(self, wait_s: float) -> Snapshot:
        """The counters as they are, or after ``wait_s`` as they were last read."""
        try:
            return self._reading.begin().result(wait_s)
        except TimeoutError:
            LOG.debug("counters of %s: the host does not answer in time", self._known.backend)
        except NetpluginError as away:
            LOG.debug("counters of %s: %s", self._known.backend, away)
        except Exception:
            LOG.exception("counters of %s", self._known.backend)
        return self._known

    def _read(self) -> Snapshot:
        """Runs in one thread at a time."""
        intents = self._intents()
        found = self._counts.port_counters(intents, time.monotonic() + _READ_S)
        before, now = self._known, clock()
        ports = {}
        for intent in intents:
            if (reading := found.ports.get(intent.port_id)) is None or intent.spec is None:
                continue
            last = before.ports.get(intent.port_id)
            tracks = last.tracks if last and last.stamp == intent.stamp else {}
            network = intent.spec.network.network_id or intent.spec.network.physical_network or ""
            ports[intent.port_id] = Known(
                _follow(tracks, reading, now), network, reading.uplinks, intent.spec.vm_id, intent.stamp
            )
        uplinks = {}
        for name, reading in found.uplinks.items():
            there = before.uplinks.get(name)
            uplinks[name] = Known(_follow(there.tracks if there else {}, reading, now), reading.network)
        self._known = Snapshot(before.backend, now, ports, uplinks)
        return self._known


def _follow(tracks: Mapping[str, Track], reading: Reading, now: float) -> dict[str, Track]:
    return {name: follow(tracks.get(name), source, now) for name, source in reading.sources.items()}


def as_datetime(at: float) -> datetime:
    """The time of day of a time of ``clock``, in whole seconds."""
    return datetime.fromtimestamp(round(time.time() - clock() + at), UTC)


def _counted(known: Known) -> Counted:
    """As the API has it; since when of all but drops is that of the source that counts traffic."""
    traffic: dict[str, int] = {}
    drops, since = [], None
    for track in known.tracks.values():
        for key, value in track.totals().items():
            if isinstance(key, Traffic):
                traffic[key.value] = value
                since = track.since if key is not Traffic.RING_RETRIES else since
            elif value:
                drops.append(Drop(place=key, packets=value, since=as_datetime(track.since)))
    drops.sort(key=lambda drop: [*Place].index(drop.place))
    first = min(track.since for track in known.tracks.values())
    return Counted(since=as_datetime(first if since is None else since), drops=tuple(drops), **traffic)
