"""What is wrong on this host: unusable backends, findings, and why the agent is not ready."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agents.host.view import HostView
from agents.off_loop import OffLoop
from agents.ports.backend_ports import BackendPorts
from agents.ports.findings import orphan_sentences, same_macs
from agents.ports.reconciler import CHECK_S
from agents.store.store import Store
from agents.telemetry.host_events import HostEvents
from agents.worker import BackendWorker, ask
from netplugin.api.errors import (
    BackendUnavailable,
    InvalidRequest,
    NetpluginError,
    OperationTimeout,
    Overloaded,
)
from netplugin.api.models import BackendInfo, Finding, PortSpec
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Usability
from netplugin.spelling import did_you_mean

# A reconcile of the whole host takes at most CHECK_S; a thread that is busy for longer hangs.
_STUCK_S = CHECK_S + 60.0


@dataclass
class Health:
    """Looks at the machine, the store, and all backends."""

    _store: Store
    _view: HostView
    _workers: Mapping[str, BackendWorker]
    #: Those that could not be loaded, with the reasons.
    _broken: Mapping[str, str]
    _supervisor: Supervisor
    _timeout_s: float
    _off_loop: OffLoop
    #: Those about physical networks that belong to no backend.
    _network_findings: Callable[[], list[Finding]]
    #: What the configuration sets and no option takes.
    ignored: Sequence[Finding] = ()
    #: Those about the fleet, if there is one.
    fleet: Callable[[], Sequence[Finding]] = tuple

    async def backends(self) -> list[BackendInfo]:
        """The enabled backends, with their features and facts on this host; unusable if it hangs."""
        infos = [BackendInfo(name=n, usable=False, reason=why) for n, why in self._broken.items()]
        infos += await asyncio.gather(*(self._info(name) for name in self._workers))
        return sorted(infos, key=lambda info: info.name)

    async def _info(self, name: str) -> BackendInfo:
        ports = self._workers[name].ports
        try:
            return await self._off_loop.look(partial(_looked_at, ports), f"backend {name}")
        except OperationTimeout as hangs:
            features = ports.backend.features
            return BackendInfo(name=name, usable=False, reason=hangs.detail, fix=hangs.fix, features=features)

    def not_loaded(self, backend: str, port_id: str | None = None) -> BackendUnavailable:
        """Why the ports of a backend that is not loaded cannot be managed."""
        if backend in self._broken:
            return BackendUnavailable(
                f"backend {backend} {self._broken[backend]}",
                step="load",
                port_id=port_id,
                fix="see the agent's log, install or correct the backend, restart the agent",
            )
        return BackendUnavailable(
            f"backend {backend} is not in [agent] enabled_backends, and has ports here: nothing "
            "looks at them, repairs or removes them",
            step="load",
            port_id=port_id,
            fix=f"add {backend} to [agent] enabled_backends and restart the agent; then delete its "
            "ports before you take it out again",
        )

    def missing(self, backend: str, port_id: str) -> NetpluginError:
        """The error for a port of a backend that has no worker: it is not loaded, or there is none."""
        record = self._store.get(port_id)
        if backend in self._broken or (record is not None and record.spec.backend == backend):
            return self.not_loaded(backend, port_id)
        enabled = ", ".join(sorted(self._workers)) or "none"
        message = f"{backend!r} is not enabled here (enabled: {enabled})"
        return InvalidRequest.of_field("backend", message + did_you_mean(backend, self._workers))

    async def validate(self, spec: PortSpec) -> None:
        """Raises: NetpluginError if its backend, which is loaded, would refuse the port."""
        backend = self._workers[spec.backend].ports.backend
        await self._off_loop.look(partial(backend.validate, spec), f"backend {spec.backend}")

    def note_not_loaded(self) -> None:
        """Store an event for each backend that is not loaded; its findings are gone."""
        for name in {*self._broken, *self._store.events.backends()} - set(self._workers):
            events = HostEvents(self._store.events, name)
            events.usability(Usability(False, self.not_loaded(name).detail))
            events.findings(())

    async def note_usability(self) -> None:
        """Store an event for each backend that has become usable or unusable since the last call."""
        for name, worker in self._workers.items():
            # It may read sysfs, and wait for a lock of the kernel.
            usability = await self._off_loop.look(worker.ports.usable, f"backend {name}")
            await self._store.database.in_thread(worker.ports.events.usability, usability)

    async def checks(self) -> list[Finding]:
        """The findings about the machine, the store, and the host as seen by each usable backend.

        Raises: Overloaded.
        """
        findings: list[Finding] = [*self.ignored, *self.fleet()]
        try:
            findings += await self._view.within(self._view.findings)
        except NetpluginError as error:
            findings.append(_unseen("host", error, "the host can be looked at"))
        findings += await self._store.database.in_thread(self._store.findings)
        findings += await self._off_loop.look(self._network_findings, "physical networks")
        for name, worker in self._workers.items():
            try:
                findings += await ask(worker, self._timeout_s, worker.reconciler.findings)
            except Overloaded:
                raise
            except NetpluginError as error:
                findings.append(_unseen(name, error, f"backend {name} can look at the host"))
        findings += [_unusable(info) for info in await self.backends() if not info.usable]
        findings += self._unseen_ports()
        findings += same_macs(self._store.records())
        return list(dict.fromkeys(findings))  # backends that share NICs return the same findings

    def _unseen_ports(self) -> list[Finding]:
        """Ports of backends that are not loaded."""
        counts = Counter(record.spec.backend for record in self._store.records())
        findings = []
        for name in sorted(set(counts) - set(self._workers)):
            error = self.not_loaded(name)
            id, found = f"{name}-ports-failed", f"{counts[name]} ports: {error.detail}"
            expected = "every backend that has ports is loaded"
            findings.append(Finding(id=id, status="fail", found=found, expected=expected, fix=error.fix))
        return findings

    async def unready(self) -> list[str]:
        """The reasons why the agent is not ready; empty if it is."""
        reasons = [f"{b.name}: {b.reason}" for b in await self.backends() if not b.usable]
        reasons += [
            f"{name}: the host has not been looked at yet"
            for name, worker in self._workers.items()
            if not worker.looked_once.is_set()
        ]
        reasons += self._supervisor.reasons()
        reasons += self.stuck()
        reasons += [
            f"{name}: {sentence}"
            for name, worker in self._workers.items()
            for sentence in orphan_sentences(worker.ports.kept())
        ]
        if self._store.database.failure:  # of the last write; reads do not detect it
            reasons.append(f"the store cannot be written: {self._store.database.failure}")
        return reasons

    def stuck(self) -> list[str]:
        """The backends whose thread makes no progress, with the duration."""
        return [
            f"{name}: at the same work for {worker.stuck_s():.0f} s"
            for name, worker in self._workers.items()
            if worker.stuck_s() > _STUCK_S
        ]


def _looked_at(ports: BackendPorts) -> BackendInfo:
    """Reads the host."""
    state, extras = ports.usable(), ports.extras
    return BackendInfo(
        name=ports.name,
        usable=state.usable,
        reason=state.reason,
        fix=state.fix,
        features=extras.features.offered() if extras.features else ports.backend.features,
        facts=dict(extras.facts.facts()) if extras.facts else {},
    )


def _unseen(name: str, error: NetpluginError, expected: str) -> Finding:
    return Finding(id=f"{name}-unseen", status="fail", found=error.detail, expected=expected, fix=error.fix)


def _unusable(info: BackendInfo) -> Finding:
    id, expected = f"{info.name}-unusable", f"backend {info.name} is usable"
    return Finding(id=id, status="fail", found=str(info.reason), expected=expected, fix=info.fix)
