"""Plugs that come at a given rate, whatever the agent does: latency from when each was to be made."""

from __future__ import annotations

from functools import partial

from tests.bench.arrivals import outcome
from tests.bench.lab import OvsLab
from tests.bench.names import OPEN_LOOP
from tests.bench.open_loop_caller import called
from tests.bench.recorder import Recorder
from tests.bench.sizes import Sizes
from tests.bench.stalls import Stalls


def measure(lab: OvsLab, record: Recorder, sizes: Sizes) -> None:
    ports = sizes.open_loop_ports
    lab.fill(ports)
    for rate, seconds in sizes.open_loop_s.items():
        with Stalls(lab.ovs) as stalls:
            found = outcome(called(lab.agent.port, rate, seconds, lab.backend))
        note = partial(record.add, OPEN_LOOP, ports=ports, rate=rate)
        note("plug", *found.latencies_ms, addresses=1)
        note("unplug", *found.removals_ms)
        note("refused", sum(found.refused.values()), addresses=1, unit="")
        note("latest call", found.latest_ms, way="caller")
        note("longest stall", stalls.longest_ms, way="ovs-vswitchd")
        for code, count in found.refused.items():
            record.note(f"{OPEN_LOOP}: {count} of {round(rate * seconds)} calls at {rate:g}/s: {code}")
