"""Follows this host's range of etcd: reads it, watches it, reports, and connects again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from agents.api.audit import AuditLog
from agents.api.roles import BodyRules
from agents.fleet.carry import Carrier, current_spec
from agents.fleet.plan import Held, Plan, Reading, plan_read, plan_watched
from agents.fleet.report import counts_of, faults_of
from agents.fleet.settings import FleetSettings
from agents.service import Service
from agents.store.fleet import CLAIM
from agents.store.store import Store
from netplugin.api.conditions import digest
from netplugin.api.errors import Conflict, InvalidRequest, NetpluginError
from netplugin.api.models import Finding
from netplugin.fleet import values
from netplugin.fleet.errors import EtcdError, LeaseLost
from netplugin.fleet.etcd import Etcd, KeyValue
from netplugin.fleet.names import Ref
from netplugin.fleet.reports import Written, refs, written
from netplugin.fleet.values import Acceptance, Alive, Fault, Summary, digest_of
from netplugin.host.supervisor import Supervisor

LOG = logging.getLogger(__name__)
# Seconds of the lease of ``alive/<host>``; of the longest wait before a new connection; between two looks for
# an acceptance; and between two looks at what is to be reported, if nothing says that it has changed.
LEASE_S = 30
_MOST_S, _ACCEPT_S, _REPORT_S = 30.0, 15.0, 5.0
# Seconds after which everything is read again: what was deleted by hand of the host's own keys comes back.
_REREAD_S = 900.0
# Seconds for what an agent that ends has to tell etcd.
_LEAVE_S = 2.0
# Objects that are reported one by one; the summary has the numbers of all. A thousand hosts that lose their
# keys at once would fill etcd otherwise.
_MOST_FAULTS = 64
# Keys of one transaction: etcd's ``--max-txn-ops`` is 128.
_OPS = 100


class Fleet:
    """For the event loop. Nothing of it is needed for what the host has already."""

    def __init__(
        self,
        settings: FleetSettings,
        service: Service,
        store: Store,
        rules: BodyRules,
        audit: AuditLog,
        supervisor: Supervisor,
    ) -> None:
        self._host = settings.host
        self._summary_key = values.summary_key(settings.host)
        self._store = store
        self._service = service
        self._supervisor = supervisor
        self._credentials = settings.credentials
        self._endpoints = list(settings.endpoints)
        random.shuffle(self._endpoints)  # the hosts of a fleet spread over the members
        self._changed = asyncio.Event()
        self._carrier = Carrier(service, store, rules, settings.role, audit, self._changed.set)
        self._version = version("netplugin")
        self._lease = 0
        #: Whether etcd was read and is watched, and why not.
        self.connected = False
        self.refused: NetpluginError | None = None
        self._faults: dict[Ref, NetpluginError] = {}
        #: The objects that have a key; None while it is not known.
        self._listed: frozenset[Ref] | None = None
        #: The revision up to which changes of this host's range were seen.
        self._seen = 0
        #: The acceptances that were there when the range was read: they change nothing more.
        self._accepted: tuple[tuple[Acceptance, int], ...] = ()
        #: The revision of the last acceptance that was none.
        self._unreadable = 0
        store.fleet.is_on = True

    async def keep(self) -> None:
        """Follow etcd until cancelled, whatever happens to it."""
        carrying = asyncio.create_task(self._supervisor.every("fleet-carrier", 1.0, self._carrier.keep))
        wait_s = 0.5
        try:
            while True:
                begun = asyncio.get_running_loop().time()
                try:
                    await self._follow()
                except NetpluginError as error:
                    self._refuse(error)
                except Exception as error:
                    self.connected = False
                    self._supervisor.failed("fleet", error)
                lasted_s = asyncio.get_running_loop().time() - begun
                wait_s = 0.5 if lasted_s > _MOST_S else min(_MOST_S, wait_s * 2)
                await asyncio.sleep(random.uniform(0, wait_s))
        finally:
            carrying.cancel()

    async def _look_back(self) -> None:
        """What was changed here while there was no fleet in the options is not the fleet's any more."""
        fleet = self._store.fleet
        if fleet.memory.was_off:
            owned = {ref: known for ref, known in fleet.known.items() if known.is_owned}
            taken = {
                ref: replace(known, value="", tag="")
                for ref, known in owned.items()
                if known.tag != digest_of(current_spec(self._store, ref))
            }
            await self._store.database.in_thread(fleet.save, replace(fleet.memory, was_off=False), taken)

    def _refuse(self, error: NetpluginError) -> None:
        """Note why etcd is not followed. What all its members say is logged once, not for each in turn."""
        before, self.refused, self.connected = self.refused, error, False
        is_same = type(before) is type(error) and isinstance(error, EtcdError)
        if not is_same and (before is None or before.detail != error.detail):
            LOG.warning("fleet: %s", error)

    async def leave(self) -> None:
        """Give the name of the host free at once, as the agent ends."""
        if not self._lease:
            return
        etcd = Etcd(self._endpoints, self._credentials)
        with suppress(NetpluginError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await etcd.revoke(self._lease)
        await etcd.close()

    # -- one connection --------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Read and watch until the connection ends, or an acceptance came. Raises: NetpluginError."""
        await self._look_back()
        # One member for all of it: what two have may be of different clusters. The next time another.
        etcd = Etcd(self._endpoints[:1], self._credentials)
        self._endpoints = [*self._endpoints[1:], self._endpoints[0]]
        try:
            self._lease = lease = self._lease or await etcd.grant(LEASE_S)
            await self._claim_name(etcd, lease)
            reports = (await etcd.read(values.reported_prefix(self._host))).items
            written = {kv.key: kv.value for kv in reports}
            summary = next((kv.mod_revision for kv in reports if kv.key == self._summary_key), 0)
            revision, refused = await self._read(etcd, summary)
            if refused is not None:
                self._refuse(refused)
            else:
                self.refused, self.connected = None, True
            work = [etcd.keep(lease, LEASE_S), self._report(etcd, written), self._until_accepted(etcd)]
            if refused is None:
                work.append(self._watch(etcd, revision))
            await _first_of(work)
        except LeaseLost:
            self._lease = 0
            raise
        finally:
            await etcd.close()

    async def _claim_name(self, etcd: Etcd, lease: int) -> None:
        """Write ``alive/<host>``. Raises: Conflict while another agent has the name."""
        key = values.alive_key(self._host)
        identity, instance = self._store.identity, self._store.fleet.instance
        mine = Alive(identity=identity, instance=instance, version=self._version)
        found = (await etcd.read(key)).items
        other, revision = (found[0].value, found[0].mod_revision) if found else (b"", 0)
        is_of_store = identity.encode() in other
        # An agent of an older version has no instance.
        is_copy = is_of_store and b'"instance"' in other and instance.encode() not in other
        is_free = not other or (is_of_store and not is_copy)
        value = {key: mine.model_dump_json().encode()}
        if not is_free or await etcd.change(value, unchanged={key: revision}, lease=lease) is None:
            what = ", with a copy of the store of this one" if is_copy else ""
            text = f"another agent is in the fleet as host {self._host}{what}: {other[:200]!r}"
            fix = "give each host its own name in [fleet] host, and its own store"
            fix = f"{fix}; an agent that has ended keeps its name for {LEASE_S} s"
            raise Conflict(text, step="fleet", fix=fix)

    async def _read(self, etcd: Etcd, summary: int) -> tuple[int, NetpluginError | None]:
        """Read the range and plan. Returns its revision, and why nothing of it counts."""
        accepted = self._accepted = await self._acceptances(etcd)
        snapshot = await etcd.read(values.desired_prefix(self._host))
        items = await self._service.off_loop.compute(_items, snapshot.items)
        cluster = values.cluster_name(snapshot.cluster_id)
        reading = Reading(cluster, snapshot.revision, items, accepted, summary, self._host)
        fleet = self._store.fleet
        try:
            plan = plan_read(fleet.memory, fleet.known, reading)
        except NetpluginError as refused:
            # It will come to higher revisions.
            if reading.is_older_than(fleet.memory) and not fleet.memory.went_back:
                await self._store.database.in_thread(fleet.save, replace(fleet.memory, went_back=True))
            return snapshot.revision, refused
        self._carrier.drop({*self._carrier.open} - {step.ref for step in plan.steps})
        self._faults, self._listed = {}, frozenset(items)
        self._seen = max((item.revision for item in items.values()), default=0)
        never = [ref for ref, known in fleet.known.items() if known == CLAIM and ref not in items]
        gone = plan.gone | {ref for ref in never if current_spec(self._store, ref) is None}
        save = partial(fleet.save, plan.memory, plan.known, gone=gone)
        await self._store.database.in_thread(save, forget_generations=plan.forget_generations)
        self._take(plan)
        return snapshot.revision, None

    async def _watch(self, etcd: Etcd, revision: int) -> None:
        async for changes in etcd.watch(values.desired_prefix(self._host), revision + 1):
            if not changes:
                continue
            last = {kv.key: kv for kv in changes}.values()
            items = await self._service.off_loop.compute(_items, [kv for kv in last if not kv.is_deleted])
            deleted = frozenset(ref for _, ref, kv in refs(last) if kv.is_deleted)
            seen, concerned = max(kv.mod_revision for kv in last), {*items, *deleted}
            self._carrier.drop(deleted)  # a removal too, if it is not done: what is not there does not count
            plan = plan_watched(self._store.fleet.memory, self._known(), items, deleted, seen)
            self._faults = {ref: why for ref, why in self._faults.items() if ref not in concerned}
            self._listed = ((self._listed or frozenset()) | items.keys()) - deleted
            self._seen = max(self._seen, seen)
            # On the disk with what is carried out: a revision that is older there hides no change.
            self._store.fleet.memory = plan.memory
            self._take(plan)  # before anything is awaited: the report has the revision, and so the steps
            if plan.gone:
                await self._store.database.in_thread(self._store.fleet.save, gone=plan.gone)

    def _take(self, plan: Plan) -> None:
        """Have the steps carried out."""
        self._faults |= plan.faults
        self._carrier.want(plan.steps)
        self._changed.set()

    def _known(self) -> Mapping[Ref, Any]:
        """What was carried out, or is about to be: changes may come faster than the host makes them."""
        known = dict(self._store.fleet.known)
        for ref, step in self._carrier.open.items():
            if step.known.generation > (known[ref].generation if ref in known else 0):
                known[ref] = step.known
        return known

    # -- acceptances -----------------------------------------------------------------------------

    async def _acceptances(self, etcd: Etcd) -> tuple[tuple[Acceptance, int], ...]:
        """Those of an operator for all hosts and for this one, with the revision of each."""
        found = []
        for key in values.acceptance_keys(self._host):
            for kv in (await etcd.read(key)).items:
                try:
                    found.append((values.valid_value(Acceptance, kv.value), kv.mod_revision))
                except InvalidRequest as wrong:
                    if kv.mod_revision > self._unreadable:
                        LOG.warning("fleet: %s: %s", key, wrong)
                    self._unreadable = max(self._unreadable, kv.mod_revision)
        return tuple(found)

    async def _until_accepted(self, etcd: Etcd) -> None:
        """Return when something that waits for an operator may go on, or it is time to read again."""
        until = asyncio.get_running_loop().time() + random.uniform(0.5, 1) * _REREAD_S
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(random.uniform(0.5, 1) * _ACCEPT_S)
            is_waiting = self.refused or any(isinstance(why, Held) for why in self._faults.values())
            # A token is used before it runs out; and a password that is not that of etcd any more is noticed.
            if not is_waiting and self._credentials.password_file is None:
                continue
            if await self._acceptances(etcd) != self._accepted:
                return

    # -- reports ---------------------------------------------------------------------------------

    def faults(self) -> dict[Ref, Fault]:
        errors = {**self._faults, **self._carrier.faults}
        return faults_of(self._store, errors, self._listed)

    def counts(self) -> dict[str, int]:
        """For the metrics."""
        return counts_of(self._store.fleet.known, len(self._carrier.open), self.faults())

    def findings(self) -> list[Finding]:
        if self.refused is None:
            return []
        found, fix = f"the fleet of host {self._host}: {self.refused.detail}", self.refused.fix
        expected = "what etcd has for this host is read and carried out"
        return [Finding(id="fleet-not-followed", status="fail", found=found, expected=expected, fix=fix)]

    async def _report(self, etcd: Etcd, written: dict[str, bytes]) -> None:
        """Write what has changed of the report, as soon as it does."""
        while True:
            self._changed.clear()
            report = self._reported()
            put = {key: value for key, value in report.items() if written.get(key) != value}
            gone = [key for key in written if key not in report]
            # The summary last: whoever reads it finds the rest.
            names = sorted([*gone, *put], key=lambda key: key == self._summary_key)
            for first in range(0, len(names), _OPS):
                part = names[first : first + _OPS]
                puts = {key: put[key] for key in part if key in put}
                revision = await etcd.change(puts, delete=[key for key in part if key not in put])
                if revision and self._summary_key in puts and self.connected:
                    fleet = self._store.fleet
                    fleet.memory = replace(fleet.memory, reported=revision)
                    await self._store.database.in_thread(fleet.save)
            written = report
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await self._changed.wait()

    def _reported(self) -> dict[str, bytes]:
        fleet, faults = self._store.fleet, self.faults()
        failed = set(self._carrier.faults)
        open_steps = [step for ref, step in self._carrier.open.items() if ref not in failed]
        made = sorted((ref, each) for ref, each in fleet.known.items() if each.is_made)
        summary = Summary(
            identity=self._store.identity,
            version=self._version,
            cluster=fleet.memory.cluster,
            highest=fleet.memory.revision,
            accepted=fleet.memory.accepted,
            revision=min([self._seen, *(step.revision - 1 for step in open_steps)]),
            digest=digest(*(f"{ref} {each.generation}" for ref, each in made)),
            counts=counts_of(fleet.known, len(open_steps), faults),
            refused=self.refused.problem() if self.refused else None,
        )
        # Errors come before the rest.
        chosen = sorted(faults, key=lambda ref: (faults[ref].error is None, ref))[:_MOST_FAULTS]
        prefix = values.reported_prefix(self._host)
        models = {**{f"{prefix}{ref}": faults[ref] for ref in chosen}, self._summary_key: summary}
        return {key: model.model_dump_json().encode() for key, model in models.items()}


def _items(found: Iterable[KeyValue]) -> dict[Ref, Written]:
    return {ref: written(host, ref, kv.mod_revision, kv.value) for host, ref, kv in refs(found)}


async def _first_of(work: list[Coroutine[Any, Any, None]]) -> None:
    """Run these until one of them ends, and raise its error; the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
