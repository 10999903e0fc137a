"""64 ports at once, and one after the other: on an OVS with no other port."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.bench.lab import PEERS, OvsLab, remove
from tests.bench.names import TOGETHER
from tests.bench.recorder import Recorder
from tests.bench.sizes import Sizes
from tests.bench.stalls import Stalls
from tests.bench.ways.agent import Caller, spec_of
from tests.bench.ways.peer import Peer

COUNT = 64


def measure(lab: OvsLab, record: Recorder, sizes: Sizes, paths: Sequence[Path]) -> None:
    """``paths`` have os-vif; without any it is left out."""
    lab.fill(0)
    callers = [Caller(lab.agent.port) for _ in range(COUNT)]
    with ExitStack() as stack:
        peer = stack.enter_context(Peer("os-vif", lab.ovs.connection, PEERS, paths)) if paths else None
        if peer:  # loads what is loaded late
            peer.plug(9999)
            peer.unplug(9999)
        stalls = stack.enter_context(Stalls(lab.ovs))
        for _ in range(sizes.together):
            record.add(TOGETHER, "at once", _ms(lambda: _at_once(callers)), ports=0, addresses=1)
            _remove(lab)
            record.add(TOGETHER, "in turn", _ms(lambda: _in_turn(callers[0])), ports=0, addresses=1)
            _remove(lab)
            if peer:
                taken = sum(peer.plug(number).ms for number in range(COUNT))
                record.add(TOGETHER, "in turn", taken, way="os-vif", ports=0)
                for number in range(COUNT):
                    peer.unplug(number)
    for caller in callers:
        caller.close()
    record.add(TOGETHER, "longest stall", stalls.longest_ms, way="ovs-vswitchd", ports=0)


def _at_once(callers: Sequence[Caller]) -> None:
    """Every call is sent, each on its own connection, before the first answer is read."""
    for number, caller in enumerate(callers):
        caller.send("PUT", f"/v1/ports/many{number}", spec_of(number))
    for caller in callers:
        _check(*caller.receive())


def _in_turn(caller: Caller) -> None:
    for number in range(COUNT):
        _check(*caller.call("PUT", f"/v1/ports/many{number}", spec_of(number)))


def _check(status: int, body: object) -> None:
    if status != 200:
        raise RuntimeError(f"PUT: {status} {body}")


def _remove(lab: OvsLab) -> None:
    remove(lab.agent, [f"many{number}" for number in range(COUNT)])


def _ms(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
