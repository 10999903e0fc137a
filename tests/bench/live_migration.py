"""What live migrations between two hypervisors on one machine lose, for each backend.

    python -m tests.lab.sandbox --guests --hugepages 200 -- python -m tests.bench.live_migration [RUNS]

A guest exchanges 1,000 numbered datagrams a second each way with a peer behind a switch that learns, and
has a TCP stream with it. libvirt migrates the guest to the other hypervisor and back, RUNS times in all. The
table has the lowest and the highest of each figure.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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

    @classmethod
    def of(cls, moved: Moved, exchange: Exchange) -> Figures:
        return cls(
            moved.downtime_ms,
            exchange.lost_to_guest,
            exchange.lost_from_guest,
            # By the clock of the peer, as that of the guest stands still with it.
            exchange.guest.unheard_ms,
            exchange.peer.silence_ms,
            exchange.stream_survived(),
        )

    @property
    def lost_beyond_downtime(self) -> int:
        """What was lost to the guest and would not have been if it had been reached at once."""
        return max(0, self.lost_to_guest - round(RATE * self.downtime_ms / 1000))

    def cells(self) -> list[str]:
        counts = (self.downtime_ms, self.lost_to_guest, self.lost_beyond_downtime, self.lost_from_guest)
        gaps = [f"{gap:.0f}" for gap in (self.gap_to_guest_ms, self.gap_from_guest_ms)]
        return [*map(str, counts), *gaps, "goes on" if self.stream_survived else "broken"]


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
        with traveller.traffic(Path(directory)) as peer:
            moved = traveller.move(way, peer)
            return Figures.of(moved, peer.settle(traveller.guest))


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(runs: int) -> None:
    print(row(HEAD))
    print(row(["---"] * len(HEAD)), flush=True)
    with two_hosts(BACKENDS) as hosts:
        for backend, traveller in booted(hosts).items():
            for way in Way:
                found = [moved_under_traffic(traveller, way) for _ in range(runs)]
                print(row([backend, way.value, *summary(found)]), flush=True)
                for each in found:
                    print(each, file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
