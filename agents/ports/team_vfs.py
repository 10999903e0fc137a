"""Which VMs have the VFs of their teams, as it was seen last: the standby leaves frames to a VF in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agents.store.store import Store
from netplugin.backend import ObservedPort, TeamVf


class TeamVfs:
    """Shared by the backends: that of the VF reports, that of the standby asks. Any thread may use it."""

    def __init__(self) -> None:
        self._in_use: dict[str, bool] = {}
        #: Called with the ID of a team's port after its VM has taken its VF or given it back.
        self.moved: Callable[[str], None] = lambda port_id: None

    def of(self, port_id: str) -> TeamVf:
        """The VF of this port, for the intent of its standby."""
        in_use = self._in_use.get(port_id)
        return TeamVf.UNKNOWN if in_use is None else TeamVf.IN_USE if in_use else TeamVf.FREE

    def see(self, store: Store, observed: Mapping[str, ObservedPort]) -> None:
        """Use what the host has of these ports of one backend."""
        for port_id, seen in observed.items():
            if seen.guest is None or seen.guest is self._in_use.get(port_id):
                continue
            record = store.get(port_id)
            if record is not None and record.spec.vf.teaming:
                self._in_use[port_id] = seen.guest
                self.moved(port_id)
        for port_id in list(self._in_use):  # a copy at once: other backends add to it
            if store.get(port_id) is None:
                self._in_use.pop(port_id, None)
