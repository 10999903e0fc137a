"""A library that makes ports, in a process of its own: its threads and imports disturb nobody else's.

    python -m tests.bench.ways.peer {os-vif|ovsdbapp|usual-tools|os-vif-bridge} ADDRESS BRIDGE

It reads lines ``plug NUMBER`` and ``unplug NUMBER``, and answers each with the milliseconds that it took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, Self

from tests.bench.ways import Plugged, Way


class Maker(Protocol):
    def plug(self, number: int) -> None: ...
    def unplug(self, number: int) -> None: ...


#: The module of each library, and what the tables call it.
MODULES = {
    "os-vif": "tests.bench.ways.osvif",
    "ovsdbapp": "tests.bench.ways.ovsdbapp_alone",
    "usual-tools": "tests.bench.ways.usual_tools",
    "os-vif-bridge": "tests.bench.ways.osvif_bridge",
}


class Peer(Way):
    """A library in its process. ``paths`` are searched for modules after those of this environment."""

    def __init__(self, name: str, address: str, bridge: str, paths: Sequence[Path] = ()) -> None:
        self.name = name
        self._started = [sys.executable, "-W", "ignore", "-m", __name__, name, address, bridge]
        self._paths = [str(path.resolve()) for path in paths]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *self._started, *self._paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask("ready")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate(timeout=30)

    def plug(self, number: int) -> Plugged:
        return Plugged(self._ask(f"plug {number}"))

    def unplug(self, number: int) -> float:
        return self._ask(f"unplug {number}")

    def _ask(self, line: str) -> float:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} has ended ({process.wait(10)}) at `{line}`")
        return float(json.loads(answer))


def main(arguments: Sequence[str]) -> int:
    name, address, bridge, *paths = arguments
    sys.path.extend(paths)
    # What a library prints is not an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    maker: Maker = import_module(MODULES[name]).make(address, bridge)
    calls = {"plug": maker.plug, "unplug": maker.unplug, "ready": lambda _: None}
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        start = time.perf_counter()
        calls[word](int(number or 0))
        answers.write(f"{(time.perf_counter() - start) * 1e3}\n")
    # Connections that are open do not keep it.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
