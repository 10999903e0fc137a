"""Apply the changes of a plan in order, one attempt each, and report the ports that failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from drivers.linuxbridge.commands import BridgeChange, BridgeKernel
from drivers.linuxbridge.filter_commands import FilterChange, RemoveTable, SetStoreMark
from netplugin.api.errors import HostError, NetpluginError, OperationTimeout
from netplugin.backend import Applied
from netplugin.host.nfnetlink import TransactionRefused
from netplugin.host.processes import remaining

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Writer:
    kernel: BridgeKernel
    deadline: float
    #: The mark of the store to write with the rules; empty: leave the existing mark.
    store_mark: str = ""
    failed: dict[str, NetpluginError] = field(default_factory=dict)
    #: The ports for which a change failed that others are made after.
    blocked: set[str] = field(default_factory=set)
    #: The errors of changes that are for no port, by physical network.
    of_networks: dict[str, NetpluginError] = field(default_factory=dict)

    def write(self, changes: Sequence[BridgeChange]) -> Applied:
        timings = {"netlink": 0.0, "nftables": 0.0}
        for (part, together), group in groupby(changes, lambda ch: (ch.part, isinstance(ch, FilterChange))):
            start = time.monotonic()
            if together:
                self._commit([change for change in group if isinstance(change, FilterChange)])
            else:
                for change in group:
                    self._attempt(change)
            timings[part] += (time.monotonic() - start) * 1e3
        return Applied(self.failed, timings, of_networks=self.of_networks)

    def _attempt(self, change: BridgeChange) -> None:
        if self._hopeless(change):
            return
        try:
            if not remaining(self.deadline):
                raise OperationTimeout("the time for the operation is over", step=change.part)
            change.apply(self.kernel, self.deadline)
        except NetpluginError as error:
            self._fail(change, error)

    def _commit(self, changes: list[FilterChange]) -> None:
        """Commit the changes in one transaction, and again without those that the kernel refuses."""
        while changes := [change for change in changes if not self._hopeless(change)]:
            removes = any(isinstance(change, RemoveTable) for change in changes)
            mark = [SetStoreMark((), self.store_mark)] if self.store_mark and not removes else []
            each = [(change, command) for change in (*changes, *mark) for command in change.commands()]
            try:
                self.kernel.nft.commit([command for _, command in each], self.deadline)
                return
            except TransactionRefused as error:
                refused = [each[at][0] for at in error.refused]
                changes = self._without(changes, refused, error)
            except NetpluginError as error:
                for change in changes:
                    self._fail(change, error)
                return

    def _without(
        self, changes: list[FilterChange], refused: Sequence[FilterChange], error: TransactionRefused
    ) -> list[FilterChange]:
        """Report the changes that the kernel refused, and return the others.

        If it did not say which these are, each gets a transaction of its own.
        """
        bad = [change for change in changes if change in refused]
        if not bad and len(changes) > 1:
            for change in changes:
                self._commit([change])
            return []
        for change in bad or changes:
            failure = HostError(f"{error.detail}: {change.describe()}", step=error.step, fix=error.fix)
            self._fail(change, failure)
        return [change for change in changes if bad and change not in bad]

    def _hopeless(self, change: BridgeChange) -> bool:
        """Whether a change that this one is made after has failed for every port that it is for."""
        return bool(change.ports) and not change.closes and self.blocked.issuperset(change.ports)

    def _fail(self, change: BridgeChange, error: NetpluginError) -> None:
        if not change.ports:
            LOG.warning("linuxbridge: could not %s: %s", change.describe(), error)
            self.of_networks.setdefault(change.physical_network, error)
        if change.blocks:
            self.blocked.update(change.ports)
        for port in change.ports:
            self.failed.setdefault(port, error.for_port(port))
