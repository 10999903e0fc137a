"""The way of one plug on OVS-DPDK: the files it crosses before the OVSDB transaction, and the port's forms.

    python -m tests.lab.sandbox --hugepages 200 -- python -m tests.bench.plug_trace

A file counts if one of its functions is called between the start of the PUT and the commit of the
transaction, in any thread of the agent. A form is a class of ours of which an instance is passed to
such a function and has a field with the port's id, its MAC or its spec. Left out: what pydantic and
dataclasses call by themselves, and constants that are only read.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tests.functional.conftest import make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("netplugin", "agents", "drivers")
PORT, TRACED = "traced", "trace.json"
DEADLINE_S = 60.0


class Trace:
    """Notes calls from the first PUT of a port to the commit of its transaction."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._on = False
        self._files: dict[str, list[str]] = {}
        self._forms: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if not self._on:
            if code.co_name == "__call__" and code.co_filename.endswith("agents/api/guard.py"):
                self._on = frame.f_locals["scope"].get("method") == "PUT"
            return
        file = Path(code.co_filename)
        if not file.is_relative_to(ROOT) or file.relative_to(ROOT).parts[0] not in PARTS:
            return
        names = self._files.setdefault(str(file.relative_to(ROOT)), [])
        if code.co_name not in names:
            names.append(code.co_name)
        for value in list(frame.f_locals.values()):
            if _is_form(value):
                kind = type(value)
                self._forms.setdefault(f"{kind.__module__}.{kind.__name__}")
        if code.co_name == "do_commit":
            self._on = False
            sys.setprofile(None)
            found = {"files": self._files, "forms": list(self._forms)}
            self._path.with_suffix(".new").write_text(json.dumps(found))
            self._path.with_suffix(".new").rename(self._path)


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
    """The agent in this process, traced; the trace goes beside its configuration."""
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
            assert (status, port["state"]) == (200, "active"), port
            traced = agent.directory / TRACED
            wait_for(traced.exists, DEADLINE_S, "the trace is written")
            found = json.loads(traced.read_text())
    for file, functions in found["files"].items():
        print(f"{file:44} {', '.join(functions)}")
    print(f"\n{len(found['files'])} files")
    print(f"{len(found['forms'])} forms: {', '.join(found['forms'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
