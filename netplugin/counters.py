"""From what hosts count to counters with a beginning (pure).

The host has the counters, so they survive a restart of the agent. A host begins them again when vswitchd
restarts, a device is created again or a filter is replaced, and some wrap. ``follow`` finds both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from netplugin.api.counter_models import Place, Traffic

Key = Place | Traffic
#: Seconds by which a beginning that is computed from an age may differ without being another one.
_ALIKE_S = 2.0


@dataclass(frozen=True, slots=True)
class Source:
    """Counters of the host that begin together, as they were read.

    ``origin``: the object that has them; another one has begun at 0. ``age_s``: for how long it has counted;
    None if the host does not show that. ``bits``: after which they wrap. What is not in ``values`` is 0, or
    not known now. ``derived``: differences of counters that the host reads one after the other.
    """

    values: Mapping[Key, int]
    origin: str = ""
    age_s: float | None = None
    bits: int = 64
    derived: frozenset[Key] = frozenset()


@dataclass(frozen=True, slots=True)
class Reading:
    """The sources of a port or an uplink, by name, and (of a port) the names of its uplinks."""

    sources: Mapping[str, Source]
    uplinks: tuple[str, ...] = ()
    #: Of an uplink: its physical network.
    network: str = ""


@dataclass(frozen=True, slots=True)
class Readings:
    """What a backend has counted: by port id, and by device of an uplink."""

    ports: Mapping[str, Reading] = field(default_factory=dict)
    uplinks: Mapping[str, Reading] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Track:
    """A source as it was last read, with the beginning of its counters and what has wrapped since."""

    source: Source
    since: float
    wrapped: Mapping[Key, int] = field(default_factory=dict)

    def totals(self) -> dict[Key, int]:
        values = self.source.values
        return {key: value + self.wrapped.get(key, 0) for key, value in values.items()}


def follow(before: Track | None, source: Source, now: float) -> Track:
    """The source after what was read ``before``; ``now`` is the time of this reading, in seconds.

    A counter that falls has begun again, and all of its source with it, unless it can have wrapped. One that
    is derived, or not known now, never falls.
    """
    began = None if source.age_s is None else now - source.age_s
    if before is None or before.source.origin != source.origin:
        return Track(source, now if began is None else began)
    if began is not None and began > before.since + _ALIKE_S:
        return Track(source, began)
    old, new, most = before.source.values, source.values, 1 << source.bits
    less = {key for key in old.keys() & new.keys() if new[key] < old[key] and key not in source.derived}
    # One that has wrapped was in the upper half and is in the lower one: it is read more often than that.
    if any(source.bits == 64 or not 2 * old[key] >= most > 2 * new[key] for key in less):
        return Track(source, now)
    wrapped = dict(before.wrapped)
    for key in less:
        wrapped[key] = wrapped.get(key, 0) + most
    kept = {key: value for key, value in old.items() if value > new.get(key, 0) and key not in less}
    return Track(replace(source, values={**new, **kept}), before.since, wrapped)
