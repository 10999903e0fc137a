"""Live migration as a call: a step for one port, in the worker of its backend."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from agents.calls.migration_check import compared
from agents.ports.call import Call, migrate_call
from agents.ports.migration import outcome
from agents.ports.teams import Teams
from agents.store.port_table import Record
from netplugin.api.errors import Conflict, NetpluginError
from netplugin.api.migration_models import MigrateCheck, MigrateRequest
from netplugin.api.models import BackendInfo, Finding, Port, PortSpec, RenderRequest, VfInfo


class Migrations:
    """``backend_with`` names the backend of a port, None without one; ``check_put`` refuses what a PUT
    would refuse before it is queued."""

    def __init__(
        self,
        timeout_s: float,
        teams: Teams,
        vfs: Callable[[], Awaitable[list[VfInfo]]],
        check_put: Callable[[str, PortSpec | None], object],
        backend_with: Callable[[str], str | None],
        submit: Callable[[Call], Awaitable[Record | None]],
        describe: Callable[[Record], Port],
        backends: Callable[[], Awaitable[list[BackendInfo]]],
        validate: Callable[[PortSpec], Awaitable[None]],
        would_place: Callable[[str, RenderRequest], Awaitable[None]],
    ) -> None:
        self._timeout_s = timeout_s
        self._teams = teams
        self._vfs = vfs
        self._check_put = check_put
        self._backend_with = backend_with
        self._submit = submit
        self._describe = describe
        self._backends = backends
        self._validate = validate
        self._would_place = would_place

    async def check(self, wanted: MigrateCheck) -> list[Finding]:
        """What does not fit between the port on the source and the one that this host would have."""
        infos = {info.name: info for info in await self._backends()}
        refused: str | None = None
        try:
            self._check_put(wanted.port_id, wanted.port)
            await self._validate(wanted.port)
        except NetpluginError as error:
            refused = error.detail
        unplaced: NetpluginError | None = None
        if wanted.domain is not None:
            try:
                await self._would_place(wanted.port.vm_id, wanted.domain)
            except NetpluginError as error:
                unplaced = error
        moves = infos.get(self._teams.backend) if wanted.port.vf.teaming else None
        here = infos.get(wanted.port.backend)
        return compared(wanted, here, refused, moves=moves, unplaced=unplaced)

    async def step(self, port_id: str, request: MigrateRequest) -> Port | None:
        """Carry out a step. Returns the port; None if it was removed, or there is none to remove.

        Raises: Conflict if the step does not follow the phase of the port, NotFound, Unsupported, and
        what a PUT raises.
        """
        self._check_put(port_id, request.port)
        if self._teams.concerns(port_id, request.port):
            if request.phase == "leave":
                await self._require_detached(port_id)
            both = await self._teams.migrate(port_id, request, self._submitted)
            return None if both is None else self._describe(both)
        if request.port is None and self._backend_with(port_id) is None:
            outcome(request.phase, request.activation, None, None, datetime.now(UTC))
            return None
        record = await self._submitted(port_id, request)
        return None if record is None else self._describe(record)

    async def _submitted(
        self, port_id: str, request: MigrateRequest, standby_of: str | None = None
    ) -> Record | None:
        deadline = time.monotonic() + self._timeout_s
        step = migrate_call(port_id, request.phase, request.activation, deadline, request.port, standby_of)
        return await self._submit(step)

    async def _require_detached(self, port_id: str) -> None:
        """Raises: Conflict if a VM has the VF of this port, with which it cannot be migrated."""
        for vf in await self._vfs():
            if vf.port_id == port_id and vf.state == "allocated":
                raise Conflict(
                    f"VF {vf.pci_address} is in use: the VM cannot be migrated with it",
                    step="migrate",
                    port_id=port_id,
                    fix="detach the VF from the VM (virsh detach-device --live), and wait until it has gone",
                )
