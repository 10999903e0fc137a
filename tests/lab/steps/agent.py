"""A private agent that is followed from step to step."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from netplugin.data_path import installed
from tests.lab import preloaded
from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import entered
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import Daemon, Process
from tests.lab.steps.watch import StepWatch


@functools.cache
def _program(launched: str) -> preloaded.Program:
    drivers = (driver.module for driver in installed())
    return preloaded.Program(launched, *preloaded.WITH_AGENT, *drivers)


class SteppedAgent(PrivateAgent):
    """``watch`` knows its steps, from each start on."""

    def __init__(
        self,
        directory: Path,
        ovs: PrivateOvs | None = None,
        options: Mapping[str, Mapping[str, str]] | None = None,
        netns: str | None = None,
        launched: str = "tests.lab.steps.launched",
    ) -> None:
        """``launched`` is the module whose ``main`` it is."""
        super().__init__(directory, ovs, options, netns=netns)
        self.watch = StepWatch(self.port, netns)
        self.daemon = _Stepped(self.config, self.log, netns, self.watch, launched)


class _Stepped(Daemon):
    def __init__(self, config: Path, log: Path, netns: str | None, watch: StepWatch, launched: str) -> None:
        super().__init__("netplugin-agent", ["--config-file", config], log)
        self._netns, self._watch, self._launched = netns, watch, launched

    def _spawned(self, log: int, env: Mapping[str, str]) -> Process:
        with entered(self._netns):
            run = _program(self._launched).start(self.args, env, log, self._netns is not None)
        self._watch.attach(run.pid)
        return run
