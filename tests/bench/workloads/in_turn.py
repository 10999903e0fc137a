"""How long one port takes: ways in turn, port by port, so that all meet the same host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.bench.recorder import Recorder
from tests.bench.ways import Way

#: Ports of the first turns, which load what is loaded late; they are not counted.
WARM_UP = 2
#: All who watch the host read what has changed on it, and none of them tells when it has.
SETTLE_S = 0.005


@dataclass(frozen=True)
class Turns:
    """``cpu`` are clocks of CPU time in milliseconds, read before and after each plug, by their figure."""

    workload: str
    record: Recorder
    ports: int
    cpu: Mapping[str, Callable[[], float]]

    def run(self, ways: Sequence[Way], turns: int) -> None:
        """Each port is removed before the next is made: the number of ports stays."""
        for number in range(-WARM_UP, turns):
            for way in ways:
                found = self._turn(way, number + 2000)
                for figure, ms in found.items() if number >= 0 else ():
                    self.record.add(
                        self.workload, figure, ms, way=way.name, ports=self.ports, addresses=way.addresses
                    )

    def _turn(self, way: Way, number: int) -> dict[str, float]:
        time.sleep(SETTLE_S)
        before = {name: clock() for name, clock in self.cpu.items()}
        plugged = way.plug(number)
        spent = {name: clock() - before[name] for name, clock in self.cpu.items()}
        time.sleep(SETTLE_S)
        unplugged = way.unplug(number)
        found = {"plug": plugged.ms, **plugged.parts, **spent}
        return found if unplugged is None else {**found, "unplug": unplugged}
