"""Callers that plug, change and unplug ports all the time, and a look at the agent every few seconds."""

from __future__ import annotations

import http.client
import itertools
import sqlite3
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.store.store import _FORGOTTEN as REMEMBERED
from netplugin import store_file
from tests.bench.process import taken
from tests.bench.ways.agent import Caller, spec_of
from tests.lab.agent import PrivateAgent
from tests.lab.memory_watch import InUse
from tests.long.soak_record import LATENCY

#: Callers, and the seconds from one port of a caller to its next.
CALLERS, EVERY_S = 4, 1.0
#: The first port's number. Each has its own id, VM and addresses: what is kept of one that is gone grows.
_FIRST = 1500
#: What the agent answers while vswitchd is away, or has just come.
AWAY = {"backend_unavailable", "timeout", "no answer"}

_TABLES = ("ports", "claims", "events", "event_states", "tasks", "quarantine", "set_aside")


@dataclass
class Load:
    """While the context is open, callers call. ``wrong`` are answers that nobody should get."""

    agent: PrivateAgent
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _latencies_ms: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._call, args=(n,)) for n in range(CALLERS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def latency_ms(self) -> float | None:
        """The median of the plugs since it was asked last; None if there was none."""
        with self._lock:
            found, self._latencies_ms = self._latencies_ms, []
        return statistics.median(found) if found else None

    def _call(self, caller: int) -> None:
        numbers = itertools.count(_FIRST + caller, CALLERS)
        while not self._ended.wait(EVERY_S):
            number = next(numbers)
            self._port(f"soak{number}", number)

    def _port(self, port_id: str, number: int) -> None:
        """One port's life. What was refused is removed too: it may be there nevertheless."""
        start = time.perf_counter()
        if self._ask("plug", "PUT", port_id, spec_of(number, 2)):
            with self._lock:
                self._latencies_ms.append((time.perf_counter() - start) * 1e3)
            changed = spec_of(number, 3)
            changed["network"]["vlan_id"] = 4000
            changed["qos"] = {"ingress_kbps": 1_000_000}
            self._ask("change", "PUT", port_id, changed)
        # The agent removes later what it could not remove now; a port that stays would be the next one's.
        while not self._ask("unplug", "DELETE", port_id, None):
            if self._ended.wait(0.2):
                return

    def _ask(self, what: str, method: str, port_id: str, body: Any) -> bool:
        code = self._answer(method, port_id, body)
        with self._lock:
            if not code:
                self.done[what] += 1
            elif code in AWAY:
                self.refused[code] += 1
            else:
                self.wrong.append(f"{what}: {code}")
        return not code

    def _answer(self, method: str, port_id: str, body: Any) -> str:
        """The code of the problem, empty if there is none. Each call has a connection of its own."""
        caller = Caller(self.agent.port)
        with closing(caller):
            try:
                status, answer = caller.call(method, f"/v1/ports/{port_id}", body)
            except (OSError, http.client.HTTPException):
                return "no answer"
        return "" if status in (200, 204) else str((answer or {}).get("code", status))


@dataclass
class Sampler:
    """Samples of one agent, in seconds from its own start. Used by one thread."""

    agent: PrivateAgent
    load: Load
    #: Where the agent writes what it has in use.
    memory: Path
    clock: Callable[[], float] = time.monotonic
    times_s: list[float] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    _start: float = 0.0

    def __post_init__(self) -> None:
        self._start = self.clock()

    def look(self) -> None:
        """Take one sample of all; none if no port was plugged since the last one."""
        latency_ms = self.load.latency_ms()
        if latency_ms is None:
            return
        now = taken(self.agent.daemon.pid)
        in_use = InUse.read(self.memory)
        database = self.agent.directory / "state" / store_file.DATABASE
        found = {
            "RSS, MB": now.rss_mb,
            "in use, MB": in_use.malloc_mb,
            "descriptors": float(now.descriptors),
            "threads": float(now.threads),
            "rows": float(rows(database)),
            "store, KB": sum(path.stat().st_size for path in database.parent.glob(f"{database.name}*"))
            / 1024,
            LATENCY: latency_ms,
        }
        self.times_s.append(self.clock() - self._start)
        for name, value in found.items():
            self.samples.setdefault(name, []).append(round(value, 3))


def rows(database: Path) -> int:
    """The rows of all tables that calls write to, but for the ports that were: see ``make_old``."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as sql:
        return sum(sql.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in _TABLES)


def make_old(database: Path) -> None:
    """Make the store of an agent that has ended that of one which has removed many ports already.

    It remembers as many as it ever does; a soak alone would fill that table for longer than an hour.
    """
    with closing(sqlite3.connect(database)) as sql, sql:
        removed = ((f"removed{number}", number) for number in range(REMEMBERED))
        sql.executemany("INSERT INTO forgotten VALUES (?, ?)", removed)
