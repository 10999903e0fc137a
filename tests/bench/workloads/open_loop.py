"""Plugs that come at a given rate, whatever the agent does: latency from when each was to be made."""

from __future__ import annotations

from functools import partial

from tests.bench.arrivals import outcome
from tests.bench.lab import OvsLab, remove
from tests.bench.names import KINDS, OPEN_LOOP, PLUGS
from tests.bench.open_loop_caller import called, port_of
from tests.bench.recorder import Recorder
from tests.bench.sizes import Sizes
from tests.bench.stalls import Stalls


def measure(lab: OvsLab, record: Recorder, sizes: Sizes) -> None:
    ports = sizes.open_loop_ports
    lab.fill(ports)
    for rate, seconds in sizes.open_loop_s.items():
        for kind in KINDS:
            with Stalls(lab.ovs) as stalls:
                calls = called(lab.agent.port, rate, seconds, lab.backend, kind)
            if kind == PLUGS:
                remove(lab.agent, [port_of(number) for number in range(len(calls))])
            found = outcome(calls)
            note = partial(record.add, OPEN_LOOP, ports=ports, rate=rate)
            note(f"plug, {kind}", *found.latencies_ms, addresses=1)
            note(f"unplug, {kind}", *found.removals_ms)
            note(f"refused, {kind}", sum(found.refused.values()), addresses=1, unit="")
            note(f"latest call, {kind}", found.latest_ms, way="caller")
            note(f"longest stall, {kind}", stalls.longest_ms, way="ovs-vswitchd")
            for code, count in found.refused.items():
                record.note(
                    f"{OPEN_LOOP}, {kind}: {count} of {round(rate * seconds)} calls at {rate:g}/s: {code}"
                )
