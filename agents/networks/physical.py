"""Physical networks that the API makes: stored, put into the registry, applied by the backends."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from agents.networks.changes import OneAtATime, apply_on
from agents.networks.physical_checks import Users, refuse_change, refuse_unusable, refuse_used
from agents.ports.findings import of_network
from agents.ports.reconciler import NetworkOutcome
from agents.store.port_table import Record
from agents.store.store import Store
from agents.worker import BackendWorker
from netplugin.api.conditions import NO_CONDITION, Condition, intent_tag
from netplugin.api.errors import (
    Conflict,
    NetpluginError,
    NotFound,
)
from netplugin.api.models import Finding
from netplugin.api.physical_models import KEPT_PARTS, PhysicalNetworkInfo, PhysicalNetworkSpec
from netplugin.fleet.names import Kind
from netplugin.host.physical_networks import PhysicalNetworks, clash, completed
from netplugin.host.uplink_devices import device_findings
from netplugin.host.vfs import SYS

LOG = logging.getLogger(__name__)


#: A change that is stored: the spec before, and the backends that have to apply it.
_Saved: TypeAlias = tuple[PhysicalNetworkSpec | None, tuple[str, ...]]


class PhysicalNetworkService:
    """The physical networks of this host.

    A change is stored first, with the registry in the same lock as the check of the ports, and then
    applied by the workers of the backends that keep the network or have ports on it. If that fails, the
    state before is stored and applied again. A killed agent goes on with what is stored.
    """

    def __init__(
        self,
        store: Store,
        registry: PhysicalNetworks,
        workers: Mapping[str, BackendWorker],
        timeout_s: float,
        sys: Path = SYS,
    ) -> None:
        self._store = store
        self._registry = registry
        self._workers = workers
        self._sys = sys
        self._in_thread = store.database.in_thread
        self._one_at_a_time = OneAtATime(timeout_s)
        extras = {name: worker.ports.extras.networks for name, worker in workers.items()}
        self._users: Users = {name: uses for name, uses in extras.items() if uses is not None}
        self._publish()

    async def put(
        self, name: str, spec: PhysicalNetworkSpec, condition: Condition = NO_CONDITION
    ) -> PhysicalNetworkInfo:
        """Create or change a network, and wait until the host has what it keeps.

        Raises: PreconditionFailed, InvalidRequest, Conflict, Unsupported, errors of the host; then
        nothing is changed.
        """
        self._store.fleet.require_free(Kind.PHYSICAL_NETWORK, name, condition)
        async with self._one_at_a_time.turn() as deadline:
            before, backends = await self._in_thread(self._save, name, spec, condition)
            outcome = await self._converge(name, backends, deadline)
            if not outcome.reached:
                if before != spec:
                    await self._go_back(name, before, backends, deadline)
                raise self._explained(name, spec, outcome.failures[0])
            for failure in outcome.failures:
                LOG.warning("physical network %s: %s", name, failure)
            errors = tuple(failure.problem() for failure in outcome.failures)
            info = await self._in_thread(self.get, name)
            return info.model_copy(update={"errors": errors})

    async def delete(self, name: str, condition: Condition = NO_CONDITION) -> None:
        """Delete a network that the API made; no error if there is none.

        Raises: Conflict if it has ports, or is of the configuration; errors of the host, and then it stays.
        """
        self._store.fleet.require_free(Kind.PHYSICAL_NETWORK, name, condition)
        async with self._one_at_a_time.turn() as deadline:
            before, backends = await self._in_thread(self._forget, name, condition)
            outcome = await self._converge(name, backends, deadline, gone=True)
            if not outcome.reached:
                await self._go_back(name, before, backends, deadline)
                raise outcome.failures[0]

    def get(self, name: str) -> PhysicalNetworkInfo:
        """Reads files. Raises: NotFound."""
        for info in self._infos([name]):
            return info
        raise NotFound(f"there is no physical network {name}", step="lookup")

    def all(self) -> list[PhysicalNetworkInfo]:
        """Ordered by name. Reads files."""
        return list(self._infos(None))

    def findings(self) -> list[Finding]:
        """The findings about devices, and about stored networks that are not in force. Reads files."""
        now = self._registry.now
        found = [f for name, spec in sorted(now.all.items()) for f in device_findings(name, spec, self._sys)]
        found += [f for name, spec in sorted(now.made.items()) for f in self._unattended(name, spec)]
        return found + [_set_aside(name, why) for name, why in sorted(now.set_aside.items())]

    # -- reading ---------------------------------------------------------------------------------

    def _infos(self, names: Collection[str] | None) -> Iterator[PhysicalNetworkInfo]:
        now = self._registry.now
        stored = self._store.physical_networks.all()
        aside = {name: stored[name] for name in now.set_aside if name in stored}
        for name, spec in sorted({**aside, **now.all}.items()):
            if names is None or name in names:
                findings = device_findings(name, spec, self._sys)
                if name in now.set_aside:
                    findings.append(_set_aside(name, now.set_aside[name]))
                elif name in now.made:
                    findings += self._unattended(name, spec)
                faults = (worker.reconciler.network_faults.get(name) for worker in self._workers.values())
                findings += [of_network(name, fault) for fault in faults if fault is not None]
                origin = "config" if name in now.configured else "api"
                yield PhysicalNetworkInfo.model_construct(
                    **{field: getattr(spec, field) for field in type(spec).model_fields}
                    | {"name": name, "origin": origin, "bridge": completed(name, spec).bridge},
                    ports=len(self._ports_on(name)),
                    findings=tuple(findings),
                )

    def _unattended(self, name: str, spec: PhysicalNetworkSpec) -> Iterator[Finding]:
        """What no backend does, or looks at now: its state here is that of the last look."""
        for part in sorted(spec.parts):
            using = {backend: uses for backend, uses in self._users.items() if part in uses.network_parts}
            keepers = [backend for backend, uses in using.items() if uses.network_parts[part]]
            if not using or (spec.keep and part in KEPT_PARTS and not keepers):
                found = f"no enabled backend {'keeps' if using else 'uses'} {part} of physical network {name}"
                fix = f"enable a backend of {part} in [agent] enabled_backends, or PUT the network without it"
                yield _unused_part(name, part, found, fix)
            for backend in keepers if spec.keep else ():
                usable = self._workers[backend].ports.usable()
                if not usable.usable:
                    found = f"{backend}, which keeps {part}, is not usable: {usable.reason}"
                    yield _unused_part(name, part, found, usable.fix)

    def _ports_on(self, name: str) -> list[Record]:
        """The ports of a network, including those that move to or from it, or are being removed."""
        return [
            record
            for record in self._store.records()
            if any(
                spec and spec.network.physical_network == name and spec.overlay_id is None
                for spec in (record.spec, record.previous)
            )
        ]

    # -- changing --------------------------------------------------------------------------------

    def _publish(self) -> None:
        self._registry.replace_stored(self._store.physical_networks.all())

    def _save(self, name: str, spec: PhysicalNetworkSpec, condition: Condition) -> _Saved:
        """Check and store a network. It runs in the database thread, after earlier changes."""
        refuse_unusable(name, spec, self._users, self._workers)
        with self._store.database.lock:  # no port may be added meanwhile
            now, stored = self._registry.now, self._store.physical_networks.all()
            there = now.configured.get(name) or stored.get(name)
            is_done = there is not None and completed(name, there) == completed(name, spec)
            condition.require(f"physical network {name}", _tag(name, there), is_done=is_done)
            if name in now.configured:
                if not is_done:
                    raise Conflict(
                        f"physical network {name} is of the agent's configuration, with other values",
                        step="validate",
                        fix=f"change the options of the agent and restart it, or take {name} out of them",
                    )
                return stored.get(name), ()
            if (taken := clash(name, spec, {**stored, **now.configured})) is not None:
                raise taken
            before = stored.get(name)
            refuse_change(name, spec, before, self._ports_on(name), self._users)
            if before != spec:
                self._store.physical_networks.save(name, spec)
                self._publish()
            return before, self._concerned(name, before, spec)

    def _forget(self, name: str, condition: Condition) -> _Saved:
        with self._store.database.lock:  # no port may be added meanwhile
            now, before = self._registry.now, self._store.physical_networks.all().get(name)
            there = now.configured.get(name) or before
            condition.require_missing_or(f"physical network {name}", _tag(name, there))
            if before is None and name in now.configured:
                raise Conflict(
                    f"physical network {name} is of the agent's configuration",
                    step="validate",
                    fix=f"take {name} out of the options of the agent and restart it",
                )
            if before is None:
                return None, ()
            if name not in now.configured:  # else the ports are on the network of the configuration
                refuse_used(name, self._ports_on(name), self._users)
            self._store.physical_networks.forget(name, stays=name in now.configured)
            self._publish()
            return before, self._concerned(name, before, None) if name in now.made else ()

    def _concerned(
        self, name: str, before: PhysicalNetworkSpec | None, after: PhysicalNetworkSpec | None
    ) -> tuple[str, ...]:
        """The backends that keep the network, have kept it, or have ports on it."""
        kept = frozenset[str]().union(*(spec.parts for spec in (before, after) if spec and spec.keep))
        busy = {record.spec.backend for record in self._ports_on(name)}
        return tuple(
            backend
            for backend, uses in sorted(self._users.items())
            if backend in busy or any(keeps and part in kept for part, keeps in uses.network_parts.items())
        )

    async def _converge(
        self,
        name: str,
        backends: Collection[str],
        deadline: float,
        *,
        gone: bool = False,
        undo: bool = False,
    ) -> NetworkOutcome:
        return await apply_on(
            [self._workers[backend] for backend in backends],
            deadline,
            lambda reconciler, until: reconciler.converge_physical_network(name, until, gone=gone),
            undo=undo,
        )

    async def _go_back(
        self, name: str, before: PhysicalNetworkSpec | None, backends: Collection[str], deadline: float
    ) -> None:
        """Restore the state before a failed change."""

        def restore() -> None:
            with self._store.database.lock:
                now = self._store.physical_networks.all().get(name)
                try:  # ports that have come meanwhile are plugged as the network is now
                    if before is None:
                        refuse_used(name, self._ports_on(name), self._users)
                    elif now is not None:
                        refuse_change(name, before, now, self._ports_on(name), self._users)
                except Conflict as used:
                    LOG.warning("physical network %s stays as it is: %s", name, used)
                    return
                if before is None:
                    self._store.physical_networks.forget(name)
                else:
                    self._store.physical_networks.save(name, before)
                self._publish()

        await self._in_thread(restore)
        for failure in (await self._converge(name, backends, deadline, undo=True)).failures:
            LOG.warning("physical network %s goes back: %s", name, failure)

    def _explained(self, name: str, spec: PhysicalNetworkSpec, error: NetpluginError) -> NetpluginError:
        """The error with what is wrong with the devices, if OVS or the kernel gave no fix."""
        for finding in device_findings(name, spec, self._sys):
            if error.fix is None:
                return type(error)(f"{error.detail} ({finding.found})", step=error.step, fix=finding.fix)
        return error


def tag_of(info: PhysicalNetworkInfo) -> str:
    """The part of its entity tag that stands for what was requested."""
    fields = {field: getattr(info, field) for field in PhysicalNetworkSpec.model_fields}
    return intent_tag(PhysicalNetworkSpec.model_construct(**fields))


def _tag(name: str, spec: PhysicalNetworkSpec | None) -> str | None:
    if spec is None:
        return None
    return intent_tag(spec.model_copy(update={"bridge": completed(name, spec).bridge}))


def _unused_part(name: str, part: str, found: str, fix: str | None) -> Finding:
    return Finding(
        id=f"physical-network-{name}-{part}",
        status="fail",
        found=found,
        expected=f"each part of physical network {name} has a backend that uses and keeps it",
        fix=fix,
    )


def _set_aside(name: str, why: str) -> Finding:
    return Finding(
        id=f"physical-network-{name}-unused",
        status="fail",
        found=f"the stored definition of physical network {name} is not in force: {why}",
        expected="a physical network is either of the configuration or made by the API",
        fix=f"DELETE /v1/physical-networks/{name}, or take the other out of the configuration and restart "
        "the agent",
    )
