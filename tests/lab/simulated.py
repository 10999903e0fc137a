"""Backends in the agent's own memory, loaded by their entry points as those of other packages are.

They are for what a host cannot have so many of. An agent that starts again finds a host without their
ports, as after a reboot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.fakes import FakeBackend, FakeHost, Write, WriteNetwork

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("simulated0", "simulated1", "simulated2", "simulated3")
#: For an agent that is to find them: where a distribution is that registers them, and this module.
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'tests/data/simulated'}:{ROOT}"}


class _Forgotten(list[Write | WriteNetwork]):
    """What was written is not kept: it would grow for as long as the agent runs."""

    def append(self, _: Write | WriteNetwork) -> None:
        pass


class _Simulated(FakeBackend):
    def __init__(self, _conf: Any, _host: Any) -> None:
        super().__init__(type(self).__name__.lower(), FakeHost(written=_Forgotten()))


class Simulated0(_Simulated):
    pass


class Simulated1(_Simulated):
    pass


class Simulated2(_Simulated):
    pass


class Simulated3(_Simulated):
    pass
