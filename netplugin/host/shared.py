"""Host resources that all backends of one agent share, created on first use."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from netplugin.host.locks import Locks, NoLocks
from netplugin.host.names import Claimed, Mark, nothing_claimed, unmarked
from netplugin.host.ovs import OvsHost, OvsSettings
from netplugin.host.physical_networks import PhysicalNetworks
from netplugin.host.supervisor import Supervisor


class Host:
    """The connections to the daemons of this host, and the locks of this process."""

    def __init__(
        self, conf: Any, store: str = "", mark: Mark = unmarked, claimed: Claimed = nothing_claimed
    ) -> None:
        """``store`` identifies the agent's store.

        ``mark`` maps the mark found on a shared object to the mark to write when the object is
        changed. ``claimed`` tells what ports have claimed.
        """
        self.conf = conf
        self._claimed = claimed
        self.mark = mark
        self.locks = Locks()
        self.networks = PhysicalNetworks()
        self._who = f"host {socket.gethostname()}, process {os.getpid()}, store {store or 'none'}"
        #: Runs every thread that watches the host.
        self.supervisor = Supervisor()
        self._lock = threading.Lock()
        self._ovs: OvsHost | None = None
        self._lockless_ovs: OvsHost | None = None

    @property
    def ovs(self) -> OvsHost:
        """OVS for backends; it requests the lock of the database."""
        with self._lock:
            if self._ovs is None:
                ours = self._who, self.mark, self.networks, self._claimed
                self._ovs = OvsHost(OvsSettings.read(self.conf), self.supervisor, *ours)
            return self._ovs

    @property
    def ovs_of_others(self) -> OvsHost:
        """OVS for other users: the backends' connection, or one without the lock if there is none."""
        with self._lock:
            if self._ovs is None and self._lockless_ovs is None:
                self._lockless_ovs = OvsHost(OvsSettings.read(self.conf), self.supervisor)
            found = self._ovs or self._lockless_ovs
            assert found is not None
            return found

    @property
    def used_ovs(self) -> OvsHost | None:
        """The OVS connection that exists; None if none was opened."""
        with self._lock:
            return self._ovs or self._lockless_ovs

    def close(self) -> None:
        with self._lock:
            for ovs in (self._ovs, self._lockless_ovs):
                if ovs is not None:
                    ovs.close()
            self._ovs = self._lockless_ovs = None
            self.locks.close()


@dataclass(frozen=True)
class SimulatedHost:
    """What a driver uses in place of ``Host`` if its host is simulated: no other agents, no store."""

    locks: Locks = field(default_factory=NoLocks)
    supervisor: Supervisor = field(default_factory=Supervisor)
    networks: PhysicalNetworks = field(default_factory=PhysicalNetworks)
    mark: Mark = unmarked
