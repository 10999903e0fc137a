"""What the backends of one agent share of their host, made when the first of them asks for it."""

from __future__ import annotations

import threading
from typing import Any

from netplugin.host.ovs import OvsHost, OvsSettings
from netplugin.host.supervisor import Supervisor


class Host:
    """The one connection to each daemon of this host."""

    def __init__(self, conf: Any) -> None:
        self.conf = conf
        #: Runs every thread that watches the host.
        self.supervisor = Supervisor()
        self._lock = threading.Lock()
        self._ovs: OvsHost | None = None

    @property
    def ovs(self) -> OvsHost:
        with self._lock:
            if self._ovs is None:
                self._ovs = OvsHost(OvsSettings.read(self.conf), self.supervisor)
            return self._ovs

    @property
    def used_ovs(self) -> OvsHost | None:
        """OVS if some backend has asked for it."""
        with self._lock:
            return self._ovs

    def close(self) -> None:
        with self._lock:
            if self._ovs is not None:
                self._ovs.close()
                self._ovs = None


def supervisor_of(host: Host | None) -> Supervisor:
    """The host's; one of its own for a driver without a host (a model of one)."""
    return host.supervisor if host is not None else Supervisor()
