"""The agent's resources of a run: ports and the PMD cores; requests, checks and restores them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from netplugin.api.errors import Conflict
from netplugin.api.models import Port, PortSecurity, PortSpec, PortState
from netplugin.api.pmd_models import PmdRequest
from netplugin.programs.polling import polled
from netplugin_zeroloss.journal import Cell
from netplugin_zeroloss.matrix.bench import CellError
from netplugin_zeroloss.matrix.description import End
from netplugin_zeroloss.matrix.host import Hypervisor

#: Polling interval for a port, and for one whose VM side another process still has, in seconds.
_LOOK_S, _HELD_S = 0.1, 0.5


class Ports:
    """Manages the ports of a run. Never touches a port with the same id that belongs to another VM."""

    def __init__(self, host: Hypervisor) -> None:
        self._host, self._client, self._description = host, host.agent, host.description
        self.ends: tuple[End, ...] = host.description.ends or ()
        #: Original PMD cores to restore, from the mask or else the running threads; None: not read
        #: yet, empty: there were neither.
        self.found_cpus: str | None = None
        #: Whether ``found_cpus`` are those of a mask; None: unknown.
        self.found_mask: bool | None = None
        #: CPUs of a mask that stays although OVS had none; None: there is no such mask.
        self._left_mask: str | None = None
        #: Queues of the ports of a cell, where they are not those of the cell.
        self._queues: dict[Cell, int] = {}

    def look_at_pmd(self) -> None:
        """Record the PMD cores: those of the mask, or else the running ones. Raises: NetpluginError."""
        state = self._client.pmd()
        self.found_mask = bool(state.cpus)
        self.found_cpus = state.cpus or ",".join(str(core.cpu) for core in state.cores)

    def plug(self, parts: ExitStack, cell: Cell) -> list[Port]:
        """Plug all ports, set the PMD cores of the cell, and wait until the ports are active.

        Cleanup is registered in ``parts`` before each step.
        Raises: CellError, NetpluginError.
        """
        self.remove_leftovers()
        if cell.backend in self._description.matrix.fewer_queues:
            [info] = self._host.infos([cell.backend])
            self._queues[cell] = min(cell.queues, self._host.most_queues(info))
        for end in self.ends:
            parts.callback(self._delete, end.port_id)
        for end in self.ends:
            self._client.put_port(end.port_id, self._spec(end, cell))
        if (cpus := self._host.pmd_cpus(cell)) is not None:
            parts.callback(self.put_back_pmd)
            self._client.set_pmd(PmdRequest(cpus=cpus))
        return [self._wait(end, cell, is_active, "active") for end in self.ends]

    def connected(self, cell: Cell) -> list[Port]:
        """Wait until all ports are connected to the VM, where the backend reports it.

        Raises: CellError, NetpluginError.
        """
        return [self._wait(end, cell, _is_connected, "connected") for end in self.ends]

    def check(self) -> None:
        """Check that all ports are still active; otherwise the loss of the trial is not the backend's.

        Raises: CellError, NetpluginError.
        """
        for end in self.ends:
            port = self._client.get_port(end.port_id)
            if not is_active(port):
                raise CellError(f"port {end.port_id} became {port.state} in a trial{_fault_text(port)}")

    def remove_leftovers(self) -> bool:
        """Remove ports that this run left when it was killed; returns whether there were any.

        Raises: CellError for a port of another VM; NetpluginError.
        """
        names = {end.port_id for end in self.ends}
        found = [port for port in self._client.list_ports() if port.port_id in names]
        for port in found:
            if port.spec.vm_id != self._host.vm_id:
                raise CellError(taken(port))
            self._delete(port.port_id)
        return bool(found)

    def _delete(self, port_id: str) -> None:
        """Delete a port, and wait while its VM side is held: a VNF of a killed run may still be ending.

        Raises: NetpluginError.
        """

        def held() -> Conflict | None:
            try:
                self._client.delete_port(port_id)
            except Conflict as by_another:
                return by_another
            return None

        seconds = self._description.timeouts.active
        refused = polled(held, lambda found: found is None, seconds, _HELD_S)
        if refused is not None:
            raise refused

    def put_back_pmd(self) -> None:
        """Restore the original PMD cores, as far as the agent can; see ``not_restored``.

        Raises: NetpluginError.
        """
        had_none = self.found_mask is False
        if had_none:
            self._left_mask = self._client.pmd().cpus or None
        # If the agent refused the request of the cell, there is still no mask to change.
        if self.found_cpus and (self._left_mask or not had_none):
            restored = self._client.set_pmd(PmdRequest(cpus=self.found_cpus))
            self._left_mask = restored.cpus if had_none else None

    def not_restored(self) -> list[str]:
        """Return what stays changed on the host, with cause and fix: PUT /v1/pmd cannot remove a mask."""
        if self._left_mask is None:
            return []
        ran = f"ran PMD threads on CPUs {self.found_cpus}" if self.found_cpus else "ran no PMD thread"
        before = f"before the run OVS had no mask and {ran}, and the agent cannot remove a mask"
        fix = "to remove it, run ovs-vsctl remove Open_vSwitch . other_config pmd-cpu-mask"
        return [f"pmd-cpu-mask stays set to CPUs {self._left_mask}: {before}; {fix}"]

    def _spec(self, end: End, cell: Cell) -> PortSpec:
        return PortSpec(
            vm_id=self._host.vm_id,
            mac=end.mac,
            backend=cell.backend,
            queues=self._queues.get(cell, cell.queues),
            network=end.network_of(cell.backend),
            port_security=PortSecurity(enabled=end.port_security),
        )

    def _wait(self, end: End, cell: Cell, ready: Callable[[Port], bool], what: str) -> Port:
        seconds = self._description.timeouts.active
        spec = self._spec(end, cell)
        # PUT makes the agent read the host again; GET returns the last known state.
        port = polled(lambda: self._client.put_port(end.port_id, spec), ready, seconds, _LOOK_S)
        if not ready(port):
            late = f"is {port.state} and not {what} after {seconds:g} s"
            raise CellError(f"port {end.port_id} {late}{_fault_text(port)}")
        return port


def taken(port: Port) -> str:
    """Return the error text for a port of another VM."""
    fix = "give the ends another port_id, or delete it if nobody needs it"
    return f"port {port.port_id} is there already, of VM {port.spec.vm_id}: {fix}"


def is_active(port: Port) -> bool:
    return port.state is PortState.ACTIVE


def _is_connected(port: Port) -> bool:
    """Whether the VM side is connected; True if the backend does not report it."""
    return is_active(port) and (port.observed or {}).get("connected") is not False


def _fault_text(port: Port) -> str:
    return f": {port.error.detail}" if port.error is not None else ""
