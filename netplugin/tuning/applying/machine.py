"""Reads and writes targets on a host through the accessor for each kind of target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from netplugin.tuning.applying.accessor import Raw, Run, SettingAccessor, WritableRoot, run_program
from netplugin.tuning.applying.kernel import (
    KernelFiles,
    KernelThreads,
    SetScheduler,
    Swaps,
    set_scheduler,
)
from netplugin.tuning.applying.ovs_config import OvsConfig, OvsOtherConfig
from netplugin.tuning.applying.services import IrqbalanceFile, TunedProfiles, TunedVariables
from netplugin.tuning.applying.vfs import Ports, VfCounts
from netplugin.tuning.steps import (
    BannedCpus,
    File,
    OtherConfig,
    Swap,
    Sysctl,
    Target,
    ThreadPriority,
    TunedProfile,
    TunedVariable,
    VfCount,
)


@dataclass(frozen=True)
class TunedMachine:
    """Access to a host: files below ``root``, OVS, programs, the scheduler, and the agent's VF allocation."""

    root: WritableRoot
    ovs: OvsOtherConfig
    ports: Ports
    run: Run = run_program
    set_scheduler: SetScheduler = set_scheduler

    def read(self, target: Target) -> Raw:
        """Read the raw value. Raises, like the other methods: NetpluginError, ``Kept``."""
        return self._place(target).read(target)

    def value(self, target: Target, raw: Raw) -> str | None:
        return self._place(target).value(target, raw)

    def write(self, target: Target, wanted: str | None) -> None:
        self._place(target).write(target, wanted)

    def restore(self, target: Target, raw: Raw) -> None:
        self._place(target).restore(target, raw)

    def _place(self, target: Target) -> SettingAccessor[Any]:
        places: Mapping[type, SettingAccessor[Any]] = {
            File: KernelFiles(self.root),
            Sysctl: KernelFiles(self.root),
            OtherConfig: OvsConfig(self.ovs),
            TunedVariable: TunedVariables(self.root),
            TunedProfile: TunedProfiles(self.root, self.run),
            ThreadPriority: KernelThreads(self.root, self.set_scheduler),
            Swap: Swaps(self.root, self.run),
            BannedCpus: IrqbalanceFile(self.root, self.run),
            VfCount: VfCounts(self.root, self.ports),
        }
        return places[type(target)]
