"""What the backends of one agent share of their host, made when the first of them asks for it."""

from __future__ import annotations

import threading
from typing import Any

from netplugin.host.ovs import OvsHost, OvsSettings


class Host:
    """The one connection to each daemon of this host."""

    def __init__(self, conf: Any) -> None:
        self.conf = conf
        self._lock = threading.Lock()
        self._ovs: OvsHost | None = None

    @property
    def ovs(self) -> OvsHost:
        with self._lock:
            if self._ovs is None:
                self._ovs = OvsHost(OvsSettings.read(self.conf))
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
