"""Applying a plan of virtual functions in the guest, without the command: to import it takes longest here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from netplugin.host.ovs_sockets import OvsSockets
from netplugin.tuning.applying.accessor import WritableRoot
from netplugin.tuning.applying.apply import Result, TunedMachine, apply, undo
from netplugin.tuning.applying.journal import ApplyJournal
from netplugin.tuning.applying.ovs_config import RunningOvs
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Root
from netplugin.tuning.steps import Group


class Host:
    """This machine. ``ports`` has the ports of an agent by the addresses of their VFs."""

    def __init__(self, journal: Path, ports: Mapping[str, str] | None = None) -> None:
        self.journal = journal
        ovs = RunningOvs(
            OvsSockets.below(Path("/nowhere"))
        )  # which a plan without PMD cores does not ask for
        self._machine = TunedMachine(WritableRoot(), ovs, lambda: ports or {})

    def apply(self, nic: str, number: int) -> Result | None:
        """None if there was nothing to do; what else the plan has is left to do later."""
        plan = make_plan(read_facts(Root()), HostIntent(pmd_cores=0, vm_cores=0, vfs=(f"{nic}={number}",)))
        with self._held() as journal:
            found = [r for r in apply(plan, self._machine, journal) if r.group is Group.VFS]
        return found[0] if found else None

    def undo(self) -> list[Result]:
        with self._held() as journal:
            return list(undo(self._machine, journal, force=False))

    def _held(self) -> ApplyJournal:
        return ApplyJournal(self.journal, str(Root().text("/proc/sys/kernel/random/boot_id")))
