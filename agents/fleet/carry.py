"""Carries out the steps of a plan as the PUT and DELETE of a caller, and tries again what failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

from agents.api.audit import AuditLog
from agents.api.roles import BodyRules, Role, of_port, of_service_port
from agents.fleet.plan import Step
from agents.service import Service
from agents.store.fleet import CLAIM, Known
from agents.store.store import Store
from netplugin.api.conditions import Condition
from netplugin.api.errors import Forbidden, NetpluginError, as_host_error
from netplugin.api.models import PortState
from netplugin.fleet.names import Kind, Ref
from netplugin.fleet.values import Spec, digest_of

LOG = logging.getLogger(__name__)
# The fleet may change what it has made.
_FLEET = Condition(override=True, is_logged=True)
# Seconds between two tries of what failed: twice as many each time.
_FIRST_S, _MOST_S = 1.0, 60.0
# Objects that are carried out at once: as many as a batch of the API has.
_AT_ONCE = 4096


class Carrier:
    """For the event loop. It goes on without etcd. The last step of an object is the one that counts."""

    def __init__(
        self,
        service: Service,
        store: Store,
        rules: BodyRules,
        role: Role,
        audit: AuditLog,
        when_changed: Callable[[], None],
    ) -> None:
        self._service = service
        self._store = store
        self._rules = rules
        self._role = role
        self._audit = audit
        self._when_changed = when_changed
        #: The last step of each object that is not done, and the errors of those that failed.
        self.open: dict[Ref, Step] = {}
        self.faults: dict[Ref, NetpluginError] = {}
        self._waiting: set[Ref] = set()
        self._busy: set[Ref] = set()
        self._tries: dict[Ref, int] = {}
        #: What is done and not committed yet.
        self._done: dict[Ref, tuple[Step, Known]] = {}
        self._is_unsaved = False
        self._work = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def want(self, steps: Iterable[Step]) -> None:
        """Carry these out, in place of earlier ones for the same objects. The same step again goes on."""
        for step in steps:
            if self.open.get(step.ref) == step:
                continue
            self.open[step.ref] = step
            self._tries.pop(step.ref, None)
            self.faults.pop(step.ref, None)  # of the one before
            self._waiting.add(step.ref)
        self._work.set()

    def drop(self, refs: Iterable[Ref]) -> None:
        """Carry nothing out any more for these objects: what etcd has of them does not count."""
        for ref in refs:
            self.open.pop(ref, None)
            self._waiting.discard(ref)
            self._tries.pop(ref, None)
            self.faults.pop(ref, None)

    async def keep(self) -> None:
        """Carry out steps until cancelled."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                self._waiting &= self.open.keys()
                ready = sorted(self._waiting - self._busy)
                self._waiting -= set(ready)
                self._busy |= set(ready)
                if ready:
                    task = asyncio.create_task(self._batch([self.open[ref] for ref in ready]))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                await self._save()
        finally:
            for task in self._tasks:
                task.cancel()
            self._waiting |= self.open.keys()  # for who calls it again

    async def _batch(self, steps: list[Step]) -> None:
        """Networks before the ports that are on them, and removed after them."""
        made = {Kind.PHYSICAL_NETWORK: 0, Kind.NETWORK: 1}

        def turn(step: Step) -> int:
            first = made.get(step.ref.kind, 2)
            return first if step.spec is not None else 4 - first

        refs = {step.ref for step in steps}
        try:
            await self._claim(steps)
            for _, group in groupby(sorted(steps, key=turn), key=turn):
                each = list(group)
                for first in range(0, len(each), _AT_ONCE):
                    await asyncio.gather(*map(self._one, each[first : first + _AT_ONCE]))
        finally:
            self._busy -= refs
            self._work.set()

    async def _claim(self, steps: list[Step]) -> None:
        """Commit that these are the fleet's, before the host has them: the agent may be killed in between.

        Not for what is there already: that is the fleet's once its value was carried out.
        """
        new = [s.ref for s in steps if s.spec is not None and not self._owns(s.ref)]
        claims = {ref: CLAIM for ref in new if current_spec(self._store, ref) is None}
        if not claims:
            return
        try:
            await self._store.database.in_thread(self._store.fleet.save, None, claims)
        except NetpluginError as refused:
            for step in steps:
                if step.ref in claims:
                    self._failed(step, refused)
            steps[:] = [step for step in steps if step.ref not in claims]

    async def _one(self, step: Step) -> None:
        ref, status = step.ref, 204 if step.spec is None else 200
        if self.open.get(ref) is not step:
            return  # another has come since
        is_news = True
        try:
            tag = digest_of(await self._carried_out(step))
        except Exception as error:
            wrong = as_host_error(error, "fleet")
            status = wrong.status
            is_news = self._failed(step, wrong)
        else:
            self._done[ref] = step, replace(step.known, tag=tag)
        self._busy.discard(ref)
        self._work.set()
        method = "DELETE" if step.spec is None else "PUT"
        path = f"/v1/{ref.kind}s/{ref.id}"
        if is_news:
            await self._audit.of_fleet(method, path, status, step.known.generation, step.revision)

    def _failed(self, step: Step, error: NetpluginError) -> bool:
        """Try again later. Returns whether this is news: what fails each minute is logged once."""
        before = self.faults.get(step.ref)
        is_news = before is None or before.detail != error.detail
        if is_news:
            LOG.warning("fleet: %s: %s", step.ref, error)
        if self.open.get(step.ref) is not step:
            return is_news
        self.faults[step.ref] = error
        tries = self._tries[step.ref] = self._tries.get(step.ref, 0) + 1
        delay_s = min(_MOST_S, _FIRST_S * 2 ** min(tries - 1, 10))
        asyncio.get_running_loop().call_later(delay_s, self._again, step)
        self._when_changed()
        return is_news

    def _again(self, step: Step) -> None:
        if self.open.get(step.ref) is step:
            self._waiting.add(step.ref)
            self._work.set()

    async def _save(self) -> None:
        """Commit what was done; if the disk refuses it, with the next: until then it would be done again."""
        done, self._done = self._done, {}
        if not done:
            return
        try:
            known = {ref: each for ref, (_, each) in done.items()}
            await self._store.database.in_thread(self._store.fleet.save, None, known)
        except NetpluginError as refused:
            if not self._is_unsaved:
                LOG.warning("fleet: %s", refused)
            self._is_unsaved = True
            self._done = done | self._done
            asyncio.get_running_loop().call_later(_FIRST_S, self._work.set)
            return
        self._is_unsaved = False
        for ref, (step, _) in done.items():
            if self.open.get(ref) is step:
                self.drop([ref])
        self._when_changed()

    async def _carried_out(self, step: Step) -> Spec | None:
        """Returns the spec that the host has for it. Raises: what a PUT or a DELETE of the API raises."""
        kind, id, spec = step.ref.kind, step.ref.id, step.spec
        of_kind: dict[Kind, Any] = {
            Kind.PORT: self._service.ports,
            Kind.SERVICE_PORT: self._service.service_ports,
            Kind.NETWORK: self._service.networks,
            Kind.PHYSICAL_NETWORK: self._service.physical_networks,
        }
        self._require_role(step)
        if spec is None:
            if self._owns(step.ref):
                await of_kind[kind].delete(id, _FLEET)
            return None
        made = await of_kind[kind].put(id, spec, _FLEET)
        if kind is Kind.PHYSICAL_NETWORK:
            return current_spec(self._store, step.ref)
        has: Spec = made.spec.as_port(id) if kind is Kind.SERVICE_PORT else made.spec
        return has

    def _owns(self, ref: Ref) -> bool:
        """Whether the fleet has made the object: what it has failed to make may be another's."""
        known = self._done[ref][1] if ref in self._done else self._store.fleet.known.get(ref)
        return known is not None and known.is_owned

    def _require_role(self, step: Step) -> None:
        """Raises: Forbidden, as the API does for a caller with the role of the fleet."""
        if self._role >= Role.OPERATE:
            return
        of_body = {Kind.PORT: of_port, Kind.SERVICE_PORT: of_service_port}.get(step.ref.kind)
        more = None
        if step.ref.kind is Kind.PHYSICAL_NETWORK and (step.spec is not None or self._owns(step.ref)):
            more = "a physical network"
        elif of_body and step.spec is not None:
            more = next(of_body(step.spec.model_dump(mode="json"), self._rules), None)
        if more is not None:
            raise Forbidden(
                f"{more} takes the role operate, and the fleet has {self._role}",
                step="role",
                fix="set [fleet] role = operate on the host, if all writers of the fleet may do so",
            )


def current_spec(store: Store, ref: Ref) -> Spec | None:
    """What the host is to have of an object, whoever requested it."""
    if ref.kind in (Kind.PORT, Kind.SERVICE_PORT):
        record = store.get(ref.id)
        return None if record is None or record.state is PortState.REMOVING else record.spec
    if ref.kind is Kind.NETWORK:
        network = store.network(ref.id)
        return None if network is None else network.spec
    return store.physical_networks.all().get(ref.id)
