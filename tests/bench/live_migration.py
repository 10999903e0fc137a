"""What live migrations between two hypervisors on one machine lose, for each backend.

    python -m tests.lab.sandbox --guests --hugepages 200 -- python -m tests.bench.live_migration 4

A guest exchanges 1,000 numbered datagrams a second each way with a peer behind a switch that learns, and
has a TCP stream with it. libvirt migrates the guest to the other hypervisor and back, so many times in all.
The table has the lowest and the highest of each figure. *No rings*: neither OVS had the rings of the guest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.ring_gap import RingGap
from tests.lab.hypervisor import BRIDGE_BACKEND, OVS_BACKEND
from tests.lab.sequenced import RATE, Exchange
from tests.lab.traveller import Moved, Traveller, Way, nic_of
from tests.lab.two_hosts import TwoHosts, two_hosts

BACKENDS = (BRIDGE_BACKEND, OVS_BACKEND)
HEAD = (
    "backend",
    "ports by",
    "downtime, ms",
    "lost to the VM",
    "of these beyond the downtime",
    "no rings, ms",
    "lost beyond that",
    "lost from the VM",
    "nothing to the VM for, ms",
    "nothing from the VM for, ms",
    "TCP stream",
)


@dataclass(frozen=True)
class Figures:
    """One migration, or the worst of each figure of several."""

    downtime_ms: int
    lost_to_guest: int
    lost_from_guest: int
    gap_to_guest_ms: float
    gap_from_guest_ms: float
    stream_survived: bool
    rings_ms: float | None = None
    """For how long no OVS had the guest's rings; None on Linux bridges."""

    @classmethod
    def of(cls, moved: Moved, exchange: Exchange, gap: RingGap | None = None) -> Figures:
        return cls(
            moved.downtime_ms,
            exchange.lost_to_guest,
            exchange.lost_from_guest,
            # By the clock of the peer, as that of the guest stands still with it.
            exchange.guest.unheard_ms,
            exchange.peer.silence_ms,
            exchange.stream_survived(),
            None if gap is None else gap.milliseconds(),
        )

    @property
    def lost_beyond_downtime(self) -> int:
        """What was lost to the guest and would not have been if it had been reached at once."""
        return self._lost_beyond(self.downtime_ms)

    def _lost_beyond(self, ms: float) -> int:
        return max(0, self.lost_to_guest - round(RATE * ms / 1000))

    def cells(self) -> list[str]:
        counts = (self.downtime_ms, self.lost_to_guest, self.lost_beyond_downtime)
        rings: tuple[object, object] = ("", "")
        if self.rings_ms is not None:
            rings = (round(self.rings_ms), self._lost_beyond(self.rings_ms))
        gaps = [f"{gap:.0f}" for gap in (self.gap_to_guest_ms, self.gap_from_guest_ms)]
        stream = "goes on" if self.stream_survived else "broken"
        return [*map(str, (*counts, *rings, self.lost_from_guest)), *gaps, stream]


def summary(found: Sequence[Figures]) -> list[str]:
    """The cells with the range of each figure."""
    columns = zip(*(each.cells() for each in found), strict=True)
    return [_range(column) for column in columns]


def _range(column: Sequence[str]) -> str:
    if not all(cell.isdecimal() for cell in column):
        return ", ".join(sorted(set(column)))
    low, high = min(map(int, column)), max(map(int, column))
    return str(low) if low == high else f"{low} to {high}"


def booted(hosts: TwoHosts, backends: Sequence[str] = BACKENDS) -> dict[str, Traveller]:
    """A VM on each backend."""
    made = {backend: Traveller(hosts, nic_of(backend, n)) for n, backend in enumerate(backends, start=1)}
    for each in made.values():
        each.boot()
    for each in made.values():
        each.configure()
    return made


def moved_under_traffic(traveller: Traveller, way: Way) -> Figures:
    """Migrate once while guest and peer talk."""
    with tempfile.TemporaryDirectory(dir="/run") as directory:
        gap = _ring_gap(traveller) if traveller.nic.backend == OVS_BACKEND else None
        with traveller.traffic(Path(directory)) as peer:
            moved = traveller.move(way, peer)
            return Figures.of(moved, peer.settle(traveller.guest), gap)


def _ring_gap(traveller: Traveller) -> RingGap:
    port = traveller.home.call("GET", f"/v1/ports/{traveller.nic.port_id}")
    return RingGap(
        traveller.home.ovs.vswitchd.log, traveller.away.ovs.vswitchd.log, port["binding"]["device"]
    )


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.live_migration", description=__doc__)
    parser.add_argument("runs", type=int, nargs="?", default=4)
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--way", choices=[way.name.lower() for way in Way], action="append")
    asked = parser.parse_args()
    backends: Sequence[str] = asked.backend or BACKENDS
    ways = [way for way in Way if not asked.way or way.name.lower() in asked.way]
    print(row(HEAD))
    print(row(["---"] * len(HEAD)), flush=True)
    with two_hosts(backends) as hosts:
        for backend, traveller in booted(hosts, backends).items():
            for way in ways:
                found = [moved_under_traffic(traveller, way) for _ in range(asked.runs)]
                print(row([backend, way.value, *summary(found)]), flush=True)
                for each in found:
                    print(each, file=sys.stderr)


if __name__ == "__main__":
    main()
