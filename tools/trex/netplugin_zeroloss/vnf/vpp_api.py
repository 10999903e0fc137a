"""VPP's binary API through vpp-papi, with checks of every reply's ``retval``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from netplugin.programs.program import ProgramError
from netplugin_zeroloss.loss.contract import AttributionError, CounterChanges, CounterReading, DropCounters
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
        with suppress(Exception):  # VPP may have ended; nothing to release
            self._client.disconnect()

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


# -- Counters of VPP's interfaces and nodes, as it prints them over its API. -----------------------


#: Counters of frames lost at an interface. ``tx`` counts before drops, so the difference of sent
#: and received means nothing. A full ring counts in ``drops`` (vhost-user) or ``tx-error`` (DPDK).
LOST = ("drops", "tx-error", "rx-error", "rx-miss", "rx-no-buf")
COUNTED = ("rx packets", "tx packets")
#: Start of an interface in ``show interface``: its index after its name; then state and MTU.
_INTERFACE = re.compile(r"\S+\s+(\d{1,10})\s+[a-z]\S*\s+\d+(?:/\d+)*(?=\s|$)")
_COUNTER = re.compile(r"\s*([a-z][a-z0-9 -]*?)\s+(\d{1,20})\s*")
#: A line of ``show errors``: count, node, reason, severity. Columns that are too narrow touch.
_ERROR = re.compile(r"\s*(\d{1,20})\s*([^\d\s]\S*)\s+(\S.*?)\s+(?:error|warn|info|unknown)\s*")
_RUNTIME = re.compile(r"^(\S+)\s+(?:active|polling|any wait)\s+(\d{1,20})\s+(\d{1,20})\s")
_WORKER, _MAIN = re.compile(r"^Thread \d+ (\w+)"), "vpp_main"
#: The node that every routed frame passes.
_ROUTES = "ip4-lookup"


def parse_interfaces(text: str) -> dict[int, dict[str, int]]:
    """Parse ``show interface``: the counters by interface index. One that is 0 is not printed."""
    found: dict[int, dict[str, int]] = {}
    here: dict[str, int] = {}
    for line in text.splitlines():
        if head := _INTERFACE.match(line):
            here = found.setdefault(int(head[1]), {})
            line = line[head.end() :]
        if counter := _COUNTER.fullmatch(line):
            here[counter[1]] = int(counter[2])
    return found


def parse_errors(text: str) -> dict[str, int]:
    """Parse ``show errors``: frames by node and reason over all threads."""
    found: Counter[str] = Counter()
    for row in filter(None, map(_ERROR.fullmatch, text.splitlines())):
        found[f"{row[2]}/{row[3]}"] += int(row[1])
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

    name = "vnf"

    def __init__(self, printed: Callable[[str], str], interfaces: Sequence[int]) -> None:
        """``printed`` returns what VPP prints to a command; ``interfaces``: its index of each port."""
        self._printed, self._interfaces = printed, tuple(interfaces)

    def read(self) -> CounterReading:
        try:
            texts = [self._printed(f"show {what}") for what in ("interface", "errors", "runtime")]
            return reading(self._interfaces, *texts)
        except ProgramError as error:
            raise AttributionError(f"vnf: {error}") from error

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


def reading(ports: Sequence[int], interfaces: str, errors: str, runtime: str) -> CounterReading:
    """Build a reading from what VPP prints (pure); ``ports``: the index of each.

    Raises: VnfError if one is not among the interfaces.
    """
    counts = parse_interfaces(interfaces)
    lost: dict[str, int] = {}
    counters: dict[str, float] = {**parse_errors(errors)}
    for number, index in enumerate(ports):
        if index not in counts:
            raise VnfError(f"VPP prints no interface {index} to `show interface`: {interfaces[:200]!r}")
        lost |= {f"port{number}.{name}": counts[index].get(name, 0) for name in LOST}
        for name in COUNTED:
            counters[f"port{number}.{name.replace(' ', '_')}"] = counts[index].get(name, 0)
    for worker, (calls, vectors) in parse_runtime(runtime).items():
        counters |= {f"{worker}.calls": calls, f"{worker}.vectors": vectors}
    return CounterReading(lost, counters)
