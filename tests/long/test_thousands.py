"""4,000 ports of four simulated backends next to 1,000 vhost-user ports of a real OVS-DPDK, in one agent."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from netplugin import store_file
from tests.bench.lab import OvsLab, batch, on_ovs, remove
from tests.bench.process import Taken, taken
from tests.bench.ways.agent import Caller
from tests.functional.conftest import make_spec
from tests.functional.test_plug_ovs import planned
from tests.lab.processes import wait_for
from tests.lab.simulated import ENVIRONMENT, NAMES
from tests.long.soak_load import rows

pytestmark = pytest.mark.long

VHOST, SIMULATED, BATCH = 1000, 4000, 250
ALL = VHOST + SIMULATED
#: Of the agent with all ports, whatever it has done to get there. Seen: less than half of it.
RSS_MB = 300
#: Threads of a pool that come as they are needed: the default of concurrent.futures.
POOL = (os.cpu_count() or 1) + 4
DEADLINE_S = 120
#: Calls of another that have to be served while something else goes on.
SERVED = 3
EVENTS = 1000
OPTIONS = {"agent": {"enabled_backends": ",".join(("dpdkvhostuser", *NAMES)), "max_events": str(EVENTS)}}


def simulated(number: int) -> tuple[str, dict[str, object]]:
    spec = make_spec(10_000 + number, 1 + number % 4094, backend=NAMES[number % len(NAMES)])
    return f"s{number}", {**spec, "mac": f"52:54:03:00:{number >> 8:02x}:{number & 255:02x}"}


def fill_simulated(lab: OvsLab) -> None:
    for first in range(0, SIMULATED, BATCH):
        ports = [simulated(n) for n in range(first, first + BATCH)]
        batch(lab.agent, {"put": [{"port_id": port_id, "spec": spec} for port_id, spec in ports]})


class OneMore(threading.Thread):
    """One who plugs and unplugs one more simulated port all the time, whatever else goes on."""

    def __init__(self, lab: OvsLab) -> None:
        super().__init__()
        self._lab = lab
        self._ended = threading.Event()
        self.answers: Counter[int] = Counter()
        self.slowest_ms = 0.0
        self._calls: list[tuple[float, float]] = []

    def run(self) -> None:
        _, spec = simulated(SIMULATED)
        caller = Caller(self._lab.agent.port)
        while not self._ended.wait(0.05):
            for method, body in (("PUT", spec), ("DELETE", None)):
                start = time.perf_counter()
                status, _ = caller.call(method, "/v1/ports/one-more", body)
                end = time.perf_counter()
                self.slowest_ms = max(self.slowest_ms, (end - start) * 1e3)
                self.answers[status] += 1
                self._calls.append((start, end))
        caller.close()

    def within(self, start: float, end: float) -> int:
        """How many calls were made and answered between these times (``time.perf_counter``)."""
        return sum(start <= begun and ended <= end for begun, ended in tuple(self._calls))

    def end(self) -> None:
        self._ended.set()
        self.join()


@contextmanager
def answered(lab: OvsLab, what: str) -> Iterator[OneMore]:
    """For the time of the block another caller is served: all of its calls, and more than a few."""
    caller = OneMore(lab)
    caller.start()
    start = time.monotonic()
    try:
        yield caller
    finally:
        caller.end()
    took = time.monotonic() - start
    print(f"{what}: {took:.1f} s; meanwhile {dict(caller.answers)}, the slowest {caller.slowest_ms:.0f} ms")
    assert set(caller.answers) == {200, 204}
    assert caller.answers[200] == caller.answers[204] >= SERVED


def test_five_thousand_ports() -> None:
    with on_ovs(OPTIONS, ENVIRONMENT) as lab:
        usable = {each["name"]: each["usable"] for each in lab.agent.get("/v1/backends")[1]}
        assert usable == dict.fromkeys(("dpdkvhostuser", *NAMES), True)
        empty = taken(lab.agent.daemon.pid)
        with answered(lab, f"{SIMULATED} simulated ports plugged"):
            fill_simulated(lab)
        with answered(lab, f"{VHOST} vhost-user ports plugged"):
            lab.fill(VHOST)
        check_all_there(lab, "with all ports")
        with answered(lab, "all looked at") as one_more:
            look_until_served(lab, one_more)
        with answered(lab, "vswitchd killed, and its ports whole again"):
            lab.ovs.kill_vswitchd()
            lab.ovs.start_vswitchd(DEADLINE_S)
            lab.log_queues(False)
            wait_for(lambda: whole(lab), DEADLINE_S, "the ports of OVS are whole again")
        lab.agent.restart_with({})
        # The simulated hosts were in the memory of the agent that has ended.
        wait_for(lambda: planned(lab.agent) == [], DEADLINE_S, "all are there again")
        full = check_all_there(lab, "after a restart of the agent")
        with answered(lab, "all removed"):
            remove(lab.agent, [simulated(n)[0] for n in range(SIMULATED)])
            lab.fill(0)
        check_nothing_there(lab, empty, full)


def look_until_served(lab: OvsLab, one_more: OneMore) -> None:
    """Look at all ports, again and again until calls of another have begun and ended during a look.

    A look may be so short that no call begins in it; one that holds up the others is never enough.
    """
    looks, meanwhile = 0, 0
    until = time.monotonic() + DEADLINE_S
    while meanwhile < SERVED:
        assert time.monotonic() < until, f"{meanwhile} calls were served during {looks} looks"
        start = time.perf_counter()
        status, report = lab.agent.call("POST", "/v1/reconcile", {}, timeout=600)
        meanwhile += one_more.within(start, time.perf_counter())
        looks += 1
        assert (status, report["changes"], report["errors"]) == (200, [], [])
        assert report["ports"] in (ALL, ALL + 1), "the one more may be there"
    print(f"{looks} looks at all ports, with {meanwhile} calls of another meanwhile")


def whole(lab: OvsLab) -> bool:
    status, report = lab.agent.call("POST", "/v1/reconcile", {"dry_run": True}, timeout=600)
    return status == 200 and report["changes"] == [] and report["errors"] == []


def check_all_there(lab: OvsLab, when: str) -> Taken:
    ports = lab.agent.get("/v1/ports")[1]
    assert Counter(port["state"] for port in ports) == {"active": ALL}
    by_backend = Counter(port["spec"]["backend"] for port in ports)
    assert by_backend == {"dpdkvhostuser": VHOST, **dict.fromkeys(NAMES, SIMULATED // len(NAMES))}
    now = taken(lab.agent.daemon.pid)
    print(f"{when}: {now}")
    assert now.rss_mb < RSS_MB
    return now


def check_nothing_there(lab: OvsLab, empty: Taken, full: Taken) -> None:
    assert lab.agent.get("/v1/ports")[1] == []
    assert lab.ovs.vsctl("list-br").split() == ["br-bench"]
    now = taken(lab.agent.daemon.pid)
    print(f"with no port any more: {now}; at first {empty}")
    assert now.threads <= full.threads + POOL and now.descriptors <= full.descriptors + 2
    assert rows(lab.agent.directory / "state" / store_file.DATABASE) <= 2 * EVENTS, "events alone"
