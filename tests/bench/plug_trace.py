"""The way of one plug on OVS-DPDK, from the PUT to the OVSDB transaction: its files, and the port's forms.

    python -m tests.lab.sandbox --hugepages 200 -- python -m tests.bench.plug_trace

The way is the files on the call stack whenever the port is handed on: to the queue of the backend's
worker, to a change when it is created, to the database, and when a change writes itself there. Functions
that already ran before the PUT (threads, event loop) are not part of it. The other files are those of
which the way calls a function that returns; what other tasks and threads do meanwhile is left out. A form
is a class of ours of which an instance is passed to a function called meanwhile and has a field with the
port's id, its MAC or its spec. Left out: what pydantic and dataclasses call by themselves, and constants
that are only read.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from netplugin.backend import Change
from tests.bench.call_frames import file_of, stack
from tests.functional.conftest import make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

PARTS = ("netplugin", "agents", "drivers")
GUARD, WORKER, OVSDB = "agents/api/guard.py", "agents/worker.py", "netplugin/host/ovsdb.py"
PORT, TRACED = "traced", "trace.json"
DEADLINE_S = 60.0


class Trace:
    """Notes calls from the first PUT of a port until its transaction is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._on = False
        self._before: set[FrameType] = set()
        self._call: FrameType | None = None
        self._way: dict[str, list[str]] = {}
        self._called: dict[str, list[str]] = {}
        self._forms: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self._on and (event, code.co_name, _file_of(frame)) == ("return", "_composed", OVSDB):
            self._end()
        if event != "call":
            return
        if not self._on:
            if (code.co_name, _file_of(frame)) == ("__call__", GUARD):
                self._on = frame.f_locals["scope"].get("method") == "PUT"
                self._before = {each for each in _running() if each is not frame}
                self._call = frame
            return
        if not any(each is self._call or self._is_turn(each) for each in stack(frame)):
            return
        if _hands_on(frame):
            for each in reversed(list(stack(frame))):
                if each not in self._before:
                    _note(self._way, each)
        if _note(self._called, frame):
            for value in list(frame.f_locals.values()):
                if _is_form(value):
                    kind = type(value)
                    self._forms.setdefault(f"{kind.__module__}.{kind.__name__}")

    def _is_turn(self, frame: FrameType) -> bool:
        """Whether the worker does the work that is due, which it was not at before."""
        own = (frame.f_code.co_name, _file_of(frame)) == ("turn", WORKER)
        return own and frame not in self._before

    def _end(self) -> None:
        self._on = False
        sys.setprofile(None)
        found = {"way": self._way, "called": self._called, "forms": list(self._forms)}
        self._path.with_suffix(".new").write_text(json.dumps(found))
        self._path.with_suffix(".new").rename(self._path)


def _hands_on(frame: FrameType) -> bool:
    """Whether the port is handed on by this call."""
    name, file = frame.f_code.co_name, _file_of(frame)
    if name == "__init__" and frame.f_code.co_filename == "<string>":  # of a dataclass
        return isinstance(frame.f_locals["self"], Change)
    if name == "write" and isinstance(frame.f_locals.get("self"), Change):
        return True
    return (name, file) in {("submit", WORKER), ("commit", OVSDB)}


def _note(files: dict[str, list[str]], frame: FrameType) -> bool:
    """Add a function of ours to its file. Returns whether it is ours."""
    file, name = _file_of(frame), frame.f_code.co_name
    if file is None:
        return False
    names = files.setdefault(file, [])
    if name not in names:
        names.append(name)
    return True


def _file_of(frame: FrameType) -> str | None:
    """The file of a function of ours, in the source tree; None for others."""
    return file_of(frame, PARTS)


def _running() -> Iterator[FrameType]:
    """The functions that run now, in all threads."""
    for top in sys._current_frames().values():
        yield from stack(top)


def _is_form(value: Any) -> bool:
    if type(value).__module__.split(".")[0] not in PARTS or isinstance(value, type):
        return False
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
    else:
        fields = list(getattr(type(value), "model_fields", ()))
    held = [getattr(value, name, None) for name in fields]
    return any(
        each in (PORT, make_spec()["mac"]) if isinstance(each, str) else _is_spec(each) for each in held
    )


def _is_spec(value: Any) -> bool:
    return type(value).__name__ == "PortSpec"


def run_agent(arguments: list[str]) -> int:
    """The agent in this process, traced; the trace goes next to its configuration."""
    trace = Trace(Path(arguments[arguments.index("--config-file") + 1]).with_name(TRACED))
    threading.setprofile(trace)
    from agents.main import main

    sys.setprofile(trace)
    return main(arguments)


def main() -> int:
    if sys.argv[1:2] == ["--agent"]:
        return run_agent(sys.argv[2:])
    with tempfile.TemporaryDirectory() as name, PrivateOvs(Path(name) / "ovs") as ovs:
        private = PrivateAgent(Path(name) / "agent", ovs, as_installed=True)
        own = ("tests.bench.plug_trace", "--agent")
        private.daemon.args = tuple(
            word for given in private.daemon.args for word in (own if given == "agents.main" else (given,))
        )
        with private as agent:
            status, port = agent.call("PUT", f"/v1/ports/{PORT}", make_spec())
            assert status == 200 and port["state"] == "active", port
            traced = agent.directory / TRACED
            wait_for(traced.exists, DEADLINE_S, "the trace is written")
            found = json.loads(traced.read_text())
    others = {file: names for file, names in found["called"].items() if file not in found["way"]}
    for title, files in (("the way", found["way"]), ("called from it", others)):
        print(f"{title}: {len(files)} files")
        for file, functions in files.items():
            print(f"  {file:42} {', '.join(functions)}")
        print()
    print(f"{len(others) + len(found['way'])} files in all")
    print(f"{len(found['forms'])} forms: {', '.join(found['forms'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
