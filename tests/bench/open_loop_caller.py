"""Calls an agent in an open loop, from a process of its own: nothing else that is measured delays it.

    python -m tests.bench.open_loop_caller PORT RATE SECONDS BACKEND KIND

Each call is a PUT of a port that does not exist. Of KIND ``turnover`` the port is removed again after its
answer, beside the calls, which do not wait for it; of KIND ``plugs`` it stays. It prints the calls as JSON.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from tests.bench.arrivals import Call, poisson
from tests.bench.names import TURNOVER
from tests.bench.ways.agent import Caller, spec_of

#: Plugs in flight, and removals; each has a connection. More wait, which counts as latency.
CONNECTIONS = 200
#: Seconds after the last intended call until which answers are waited for.
DRAIN_S = 30.0
SEED = 1
_FIRST = 3000


def called(port: int, rate: float, seconds: float, backend: str, kind: str) -> list[Call]:
    """Run the calls in a process of their own."""
    words = ["-m", __name__, str(port), str(rate), str(seconds), backend, kind]
    done = subprocess.run(
        ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, *words],
        check=True,
        stdout=subprocess.PIPE,
        timeout=seconds + 4 * DRAIN_S,
    )
    return [Call(**fields) for fields in json.loads(done.stdout)]


def port_of(number: int) -> str:
    """Return the id of the port that a call makes."""
    return f"open{number}"


class OpenLoop:
    """One run; ``calls`` grows as answers come."""

    def __init__(self, port: int, backend: str, kind: str, until: float) -> None:
        self._port, self._backend, self._until = port, backend, until
        self._removes = kind == TURNOVER
        self._own = threading.local()
        self.calls: list[Call] = []

    def run(self, times: Sequence[float]) -> None:
        start = time.perf_counter()
        # Plugs end first, and with the last of them come the last removals.
        with ThreadPoolExecutor(CONNECTIONS) as removals, ThreadPoolExecutor(CONNECTIONS) as plugs:
            for number, intended in enumerate(times):
                time.sleep(max(0.0, start + intended - time.perf_counter()))
                plugs.submit(self._one, number, intended, start, removals)

    def _one(self, number: int, intended: float, start: float, removals: ThreadPoolExecutor) -> None:
        made = time.perf_counter() - start
        if made > self._until:
            self.calls.append(Call(intended, None, None, "no answer"))
            return
        port_id = port_of(number)
        status, answered = self._call("PUT", port_id, spec_of(_FIRST + number, 1, self._backend), start)
        call = Call(intended, made, answered, status)
        if self._removes and status in ("ok", "no answer"):
            removals.submit(self._remove, call, port_id, start)
        else:
            self.calls.append(call)

    def _remove(self, call: Call, port_id: str, start: float) -> None:
        """Remove a port; the time counts from the answer to its plug."""
        begun = time.perf_counter() - start if call.answered is None else call.answered
        _, gone = self._call("DELETE", port_id, None, start)
        self.calls.append(replace(call, removed_ms=None if gone is None else (gone - begun) * 1e3))

    def _call(self, method: str, port_id: str, body: object, start: float) -> tuple[str, float | None]:
        try:
            status, answer = self._caller().call(method, f"/v1/ports/{port_id}", body)
        except (OSError, http.client.HTTPException):
            del self._own.caller
            return "no answer", None
        answered = time.perf_counter() - start
        return "ok" if status in (200, 204) else str((answer or {}).get("code", status)), answered

    def _caller(self) -> Caller:
        if not hasattr(self._own, "caller"):
            self._own.caller = Caller(self._port, timeout=DRAIN_S)
        caller: Caller = self._own.caller
        return caller


def main(arguments: Sequence[str]) -> int:
    port, rate, seconds, backend, kind = arguments
    loop = OpenLoop(int(port), backend, kind, float(seconds) + DRAIN_S)
    loop.run(poisson(float(rate), float(seconds), SEED))
    print(json.dumps([asdict(call) for call in loop.calls]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
