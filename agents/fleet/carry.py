"""Carries out the steps of a plan as the PUT and DELETE of a caller, and tries again what failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
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
from netplugin.fleet.names import PORTS, Kind, Ref
from netplugin.fleet.values import Spec, digest_of

LOG = logging.getLogger(__name__)
# The fleet may change what it has made.
_FLEET = Condition(override=True, is_logged=True)
# Seconds between two tries of what failed: twice as many each time.
_FIRST_S, _MOST_S = 1.0, 60.0
# Objects that are carried out at once: as many as a batch of the API has.
_AT_ONCE = 4096


@dataclass(eq=False)
class Carrier:
    """For the event loop. It goes on without etcd. The last step of an object is the one that counts."""

    _service: Service
    _store: Store
    _rules: BodyRules
    _role: Role
    _audit: AuditLog
    _when_changed: Callable[[], None]
    #: The last step of each object that is not done, and the errors of those that failed.
    open: dict[Ref, Step] = field(default_factory=dict)
    faults: dict[Ref, NetpluginError] = field(default_factory=dict)
    _tries: dict[Ref, int] = field(default_factory=dict)
    _waiting: set[Ref] = field(default_factory=set)
    _busy: set[Ref] = field(default_factory=set)
    #: What is done and not committed yet.
    _done: dict[Ref, tuple[Step, Known]] = field(default_factory=dict)
    _is_unsaved: bool = False
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def want(self, steps: Iterable[Step]) -> None:
        """Carry these out, in place of earlier ones for the same objects. The same step again goes on."""
        for step in steps:
            if self.open.get(step.ref) != step:
                self.drop([step.ref])
                self.open[step.ref] = step
                self._waiting.add(step.ref)
        self._work.set()

    def drop(self, refs: Iterable[Ref]) -> None:
        """Carry nothing out any more for these objects: what etcd has of them does not count."""
        for ref in refs:
            self._waiting.discard(ref)
            for of_ref in (self.open, self._tries, self.faults):
                of_ref.pop(ref, None)

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
        refs = {step.ref for step in steps}
        try:
            await self._claim(steps)
            for _, group in groupby(sorted(steps, key=_turn), key=_turn):
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
        made = [step for step in steps if step.spec is not None and not self._owns(step.ref)]
        new = [step for step in made if current_spec(self._store, step.ref) is None]
        try:
            if new:
                claims = dict.fromkeys((step.ref for step in new), CLAIM)
                await self._store.database.in_thread(self._store.fleet.save, None, claims)
        except NetpluginError as refused:
            for step in new:
                self._failed(step, refused)
                steps.remove(step)

    async def _one(self, step: Step) -> None:
        ref, is_news = step.ref, True
        method, status = ("PUT", 200) if step.spec is not None else ("DELETE", 204)
        if self.open.get(ref) is not step:
            return  # another has come since
        try:
            tag = digest_of(await self._carried_out(step))
            self._done[ref] = step, replace(step.known, tag=tag)
        except Exception as error:
            wrong = as_host_error(error, "fleet")
            status, is_news = wrong.status, self._failed(step, wrong)
        self._busy.discard(ref)
        self._work.set()
        if is_news:
            path = f"/v1/{ref.kind}s/{ref.id}"
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
        kind, id = step.ref.kind, step.ref.id
        self._require_role(step)
        of_kind: Any = getattr(self._service, f"{kind}s".replace("-", "_"))
        if step.spec is None:
            if self._owns(step.ref):
                await of_kind.delete(id, _FLEET)
            return None
        made = await of_kind.put(id, step.spec, _FLEET)
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
        kind, more = step.ref.kind, None
        if kind is Kind.PHYSICAL_NETWORK and (step.spec is not None or self._owns(step.ref)):
            more = "a physical network"
        elif kind in PORTS and step.spec is not None:
            of_body = of_port if kind is Kind.PORT else of_service_port
            more = next(of_body(step.spec.model_dump(mode="json"), self._rules), None)
        if more is not None:
            fix = "set [fleet] role = operate on the host, if all writers of the fleet may do so"
            text = f"{more} takes the role operate, and the fleet has {self._role}"
            raise Forbidden(text, step="role", fix=fix)


def _turn(step: Step) -> int:
    """When its turn comes: what others are on is first, and last if it is removed."""
    first = {Kind.PHYSICAL_NETWORK: 0, Kind.NETWORK: 1}.get(step.ref.kind, 2)
    return first if step.spec is not None else 4 - first


def current_spec(store: Store, ref: Ref) -> Spec | None:
    """What the host is to have of an object, whoever requested it."""
    if ref.kind in PORTS:
        record = store.get(ref.id)
        return None if record is None or record.state is PortState.REMOVING else record.spec
    if ref.kind is Kind.NETWORK:
        network = store.network(ref.id)
        return None if network is None else network.spec
    return store.physical_networks.all().get(ref.id)
