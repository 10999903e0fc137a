"""VPP's binary API through vpp-papi, with checks of every reply's ``retval``."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from netplugin.programs.program import ProgramError
from netplugin_zeroloss.loss.contract import (
    AttributionError,
    CounterChanges,
    CounterReading,
    DropCounters,
)
from netplugin_zeroloss.machines.contract import Machine
from netplugin_zeroloss.vnf.contract import VnfError

_ANSWER_S = 10


class Api:
    """One connection. Messages and fields are those of VPP's ``.api`` files. The caller closes it."""

    def __init__(self, socket: Path) -> None:
        """Connect. Raises: VnfError."""
        try:
            from vpp_papi import VPPApiClient
        except ImportError as error:
            raise VnfError(
                "the VNF vpp needs FD.io's client: pip install './tools/trex[vpp]', in a checkout"
            ) from error
        # VPP sends its message definitions: no version-specific files are needed.
        self._client: Any = VPPApiClient(
            bootstrapapi=True, server_address=str(socket), read_timeout=_ANSWER_S
        )
        try:
            self._client.connect("netplugin")
        except Exception as error:  # vpp-papi raises many types, some plain Exception
            raise VnfError(f"VPP's API at {socket} does not answer: {error!r}") from error

    def call(self, message: str, **fields: Any) -> Any:
        """Send a message and return the reply. Raises: VnfError if VPP rejects it or does not answer."""
        reply = self._ask(message, fields)
        if reply is None:
            raise VnfError(f"VPP: no answer to {message}")
        if getattr(reply, "retval", 0):
            raise VnfError(f"VPP refuses {message}({_short(fields)}): retval {reply.retval}")
        return reply

    def dump(self, message: str, **fields: Any) -> list[Any]:
        """Send a dump message and return all details. Raises: VnfError."""
        return list(self._ask(message, fields) or [])

    def close(self) -> None:
        try:
            self._client.disconnect()
        except Exception as error:  # VPP may have ended; nothing to release
            self._gone = error

    def _ask(self, message: str, fields: dict[str, Any]) -> Any:
        function = getattr(self._client.api, message, None)
        if function is None:
            raise VnfError(f"this VPP has no message {message}: is the plug-in that has it loaded?")
        try:
            return function(**fields)
        except Exception as error:  # as above
            raise VnfError(f"VPP: {message}({_short(fields)}): {error!r}") from error


def _short(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.80}" for name, value in fields.items())


# -- Counters of VPP's interfaces and nodes, from the local stats segment or by vpp_get_stats in a VM.


#: Counters of frames lost at an interface. ``tx`` counts before drops, so the difference of sent
#: and received means nothing. A full ring counts in ``drops`` (vhost-user) or ``tx-error`` (DPDK).
LOST = ("drops", "tx-error", "rx-error", "rx-miss", "rx-no-buf")
COUNTED = ("rx", "tx")
_ERRORS = "/err/"
_DUMPED = re.compile(r"^\[(\d{1,20}) @ \d+\]: (\d{1,20}) packets(?:, \d+ bytes)? (\S.*)$")
#: Runs a dump and drops the counters that are 0: hundreds, which take seconds on a serial console.
_NOT_ZERO = 'dump=$("$@") || exit; echo "$dump" | sed "/]: 0 packets/d"'
_RUNTIME = re.compile(r"^(\S+)\s+(?:active|polling|any wait)\s+(\d{1,20})\s+(\d{1,20})\s")
_WORKER, _MAIN = re.compile(r"^Thread \d+ (\w+)"), "vpp_main"
#: The node that every routed frame passes.
_ROUTES = "ip4-lookup"

#: By name, then by interface (0 for errors), summed over threads.
Counts = Mapping[str, Mapping[int, int]]


class VppCounters(ABC):
    """Source of the counters."""

    @abstractmethod
    def read(self) -> Counts:
        """Read all counters. Raises: VnfError."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to release
        """Release all resources."""


class StatsSegment(VppCounters):
    """The stats segment: memory that VPP shares with local processes."""

    def __init__(self, socket: str) -> None:
        """Connect. Raises: VnfError."""
        try:
            from vpp_papi.vpp_stats import VPPStats

            self._stats: Any = VPPStats(socket)
            self._stats.connect()
        except Exception as error:  # vpp_stats raises plain Exception
            raise VnfError(f"VPP's stats segment at {socket}: {error!r}") from error

    def read(self) -> Counts:
        try:
            names = self._stats.ls([f"/if/{name}$" for name in (*COUNTED, *LOST)] + [_ERRORS])
            return {name: summed(self._stats[name]) for name in names}
        except Exception as error:  # as above
            raise VnfError(f"VPP's stats segment: {error!r}") from error

    def close(self) -> None:
        self._stats.disconnect()


class StatsProgram(VppCounters):
    """Runs ``vpp_get_stats`` in the VM, because its shared memory is not accessible from here."""

    def __init__(self, machine: Machine, program: str, socket: str) -> None:
        self._machine, self._command = machine, (program, "socket-name", socket)

    def read(self) -> Counts:
        patterns = [f"/if/{name}" for name in (*COUNTED, *LOST)] + [_ERRORS]
        command = ["sh", "-c", _NOT_ZERO, "sh", *self._command, "dump", *patterns]
        return parse_dump(self._machine.run(command))


def summed(rows: Iterable[Any]) -> dict[int, int]:
    """Sum rows per thread to frames per interface; a value may be a pair of frames and bytes.

    A counter without interfaces, such as an error, has one value per row.
    """
    found: dict[int, int] = defaultdict(int)
    for row in rows:
        for index, entry in enumerate([row] if isinstance(row, int) else row):
            found[index] += int(entry[0]) if isinstance(entry, Sequence) else int(entry)
    return dict(found)


def parse_dump(text: str) -> dict[str, dict[int, int]]:
    """Parse ``vpp_get_stats dump``, which prints one line per interface and thread."""
    found: dict[str, dict[int, int]] = {}
    for line in text.splitlines():
        if row := _DUMPED.match(line):
            index, count, name = int(row[1]), int(row[2]), row[3].strip()
            by_interface = found.setdefault(name, {})
            by_interface[index] = by_interface.get(index, 0) + count
    return found


def parse_runtime(text: str, node: str = _ROUTES) -> dict[str, tuple[int, int]]:
    """Parse ``show runtime``: calls and vectors (frames) of a node by thread; the main one if it routes."""
    found, thread = {}, _MAIN
    for line in text.splitlines():
        if begin := _WORKER.match(line):
            thread = begin[1]
            found[thread] = (0, 0)
        elif (row := _RUNTIME.match(line)) and row[1] == node:
            found[thread] = (int(row[2]), int(row[3]))
    return {name: counts for name, counts in found.items() if name != _MAIN or any(counts)}


class VppPlace(DropCounters):
    """The component ``vnf``: drops by interface. Errors by node are readings: they count the same frames."""

    def __init__(self, counters: VppCounters, interfaces: Sequence[int], runtime: Callable[[], str]) -> None:
        """``interfaces``: VPP's interface index per port; ``runtime``: returns ``show runtime``."""
        self._counters, self._interfaces, self._runtime = counters, tuple(interfaces), runtime

    @property
    def name(self) -> str:
        return "vnf"

    def read(self) -> CounterReading:
        try:
            counts, runtime = self._counters.read(), self._runtime()
        except ProgramError as error:
            raise AttributionError(f"vnf: {error}") from error
        return reading(counts, self._interfaces, runtime)

    def between(self, before: CounterReading, after: CounterReading, elapsed_s: float) -> CounterChanges:
        found = super().between(before, after, elapsed_s)
        readings = {n: value for n, value in found.readings.items() if value or "." in n}
        workers = [name.removesuffix(".calls") for name in readings if name.endswith(".calls")]
        pairs = {f"{n}.": (readings.pop(f"{n}.calls"), readings.pop(f"{n}.vectors")) for n in workers}
        pairs[""] = sum(calls for calls, _ in pairs.values()), sum(vectors for _, vectors in pairs.values())
        for worker, (calls, vectors) in pairs.items():
            if calls or worker:
                readings[f"{worker}vectors_per_call"] = vectors / (calls or 1.0)
        return CounterChanges(found.lost, readings)


def reading(counts: Counts, interfaces: Sequence[int], runtime: str) -> CounterReading:
    """Build a reading from VPP's counters (pure)."""
    lost: dict[str, int] = {}
    counters: dict[str, float] = {}
    for number, index in enumerate(interfaces):
        for name in LOST:
            lost[f"port{number}.{name}"] = counts.get(f"/if/{name}", {}).get(index, 0)
        for name in COUNTED:
            counters[f"port{number}.{name}_packets"] = counts.get(f"/if/{name}", {}).get(index, 0)
    for name, by_thread in counts.items():
        if name.startswith(_ERRORS):
            counters[name.removeprefix(_ERRORS)] = sum(by_thread.values())
    for worker, (calls, vectors) in parse_runtime(runtime).items():
        counters |= {f"{worker}.calls": calls, f"{worker}.vectors": vectors}
    return CounterReading(lost, counters)
