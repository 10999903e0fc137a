"""Live migration as a call: a step for one port, in the worker of its backend."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import UTC, datetime

from agents.migration_check import compared
from agents.ports.migration import outcome
from agents.ports.operations import Migrate
from agents.store.port_table import Record
from netplugin.api.errors import NetpluginError, Unsupported
from netplugin.api.migration_models import MigrateCheck, MigrateRequest
from netplugin.api.models import BackendInfo, Finding, Port, PortSpec


class Migrations:
    """``backend_with`` names the backend of a port, None without one; ``check_put`` refuses what a PUT
    would refuse before it is queued."""

    def __init__(
        self,
        timeout_s: float,
        is_team: Callable[[str, PortSpec | None], bool],
        check_put: Callable[[str, PortSpec | None], object],
        backend_with: Callable[[str], str | None],
        submit: Callable[[Migrate], Awaitable[Record | None]],
        describe: Callable[[Record], Port],
        backends: Callable[[], Awaitable[list[BackendInfo]]],
        validate: Callable[[PortSpec], Awaitable[None]],
    ) -> None:
        self._timeout_s = timeout_s
        self._is_team = is_team
        self._check_put = check_put
        self._backend_with = backend_with
        self._submit = submit
        self._describe = describe
        self._backends = backends
        self._validate = validate

    async def check(self, wanted: MigrateCheck) -> list[Finding]:
        """What does not fit between the port on the source and the one that this host would have."""
        infos = {info.name: info for info in await self._backends()}
        refused: str | None = None
        try:
            self._check_put(wanted.port_id, wanted.port)
            await self._validate(wanted.port)
        except NetpluginError as error:
            refused = error.detail
        return compared(wanted, infos.get(wanted.port.backend), refused)

    async def step(self, port_id: str, request: MigrateRequest) -> Port | None:
        """Carry out a step. Returns the port; None if it was removed, or there is none to remove.

        Raises: Conflict if the step does not follow the phase of the port, NotFound, Unsupported, and
        what a PUT raises.
        """
        if self._is_team(port_id, request.port):
            raise Unsupported(
                "a VF with a standby NIC (vf.teaming) is not migrated by phases",
                step="validate",
                port_id=port_id,
                fix="docs/live-migration.md has the order of calls for teams",
            )
        self._check_put(port_id, request.port)
        if request.port is None and self._backend_with(port_id) is None:
            outcome(request.phase, request.activation, None, None, datetime.now(UTC))
            return None
        deadline = time.monotonic() + self._timeout_s
        record = await self._submit(
            Migrate(port_id, request.phase, request.activation, deadline, Future(), request.port)
        )
        return None if record is None else self._describe(record)
