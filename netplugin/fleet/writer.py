"""What a platform writes for the hosts of a fleet: put, delete, wait until it is verified.

``Writer`` is for an event loop, ``BlockingWriter`` for everyone else. Each call is complete or not there: a
writer that is killed leaves an object as it was, or as it is desired, or a tombstone that stays until
it is deleted again. No call overwrites what another writer has written since the caller has seen it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias, TypeVar

from netplugin.api.errors import InvalidRequest, NotFound, OperationTimeout, PreconditionFailed
from netplugin.fleet import values
from netplugin.fleet.errors import Compacted, EtcdUnavailable
from netplugin.fleet.etcd import Credentials, Etcd
from netplugin.fleet.names import PORTS, Ref, checked_name
from netplugin.fleet.reports import Report, Written, refs, reports
from netplugin.fleet.reports import written as written
from netplugin.fleet.values import AnyDesired, Fault, Spec

T = TypeVar("T")
#: What a PUT has, as JSON or as a model.
AnySpec: TypeAlias = Mapping[str, Any] | Spec
#: As ``Etcd.change``.
Save: TypeAlias = Callable[..., Awaitable[int | None]]
#: Seconds for a call, and for a wait until the host has carried something out, if the caller gives none.
WRITE_S, VERIFY_S = 15.0, 120.0
# Seconds before another try, after a member of etcd did not answer.
AGAIN_S = 0.2


class Writer:
    """For one event loop, which may use it for many objects at once."""

    def __init__(self, etcd: Etcd, write_s: float = WRITE_S) -> None:
        """``write_s``: seconds for a put or a delete."""
        self.etcd = etcd
        self._write_s = write_s

    async def get(self, host: str, ref: Ref) -> Written | None:
        """The object as it is desired. Raises: EtcdError."""
        return (await self._at(host, ref))[0]

    async def put(self, host: str, ref: Ref, spec: AnySpec, *, after: int | None = None) -> Written:
        """Desire an object with this spec: the JSON of a PUT. The same spec again changes nothing.

        ``after``: the generation that it replaces, of ``get`` or the last call; None: there is none.

        Raises: InvalidRequest, PreconditionFailed if another has written it, OperationTimeout, EtcdError.
        """
        # Only what the caller has set: an agent of an older version refuses fields that it does not know.
        body = spec if isinstance(spec, Mapping) else spec.model_dump(mode="json", exclude_unset=True)
        return await self.write(host, ref, {"spec": body}, after)

    async def delete(
        self, host: str, ref: Ref, *, after: int | None = None, drained: bool = False
    ) -> Written:
        """Desire that the object goes, by a tombstone. ``after``: as of ``put``; None: whatever is there.

        ``drained``: as part of the whole host's, which no brake stops. Raises: as ``put``.
        """
        body = {"deleted": True, **({"drained": True} if drained else {})}
        return await self.write(host, ref, body, after)

    async def verified(self, written: Written, *, within_s: float = VERIFY_S) -> Written:
        """Wait until the host has carried this out and has read it back; a tombstone is then taken away.

        Raises: NotAsDesired with the host's error, HostRefuses, PreconditionFailed if another has written it
        meanwhile, OperationTimeout, EtcdError.
        """
        host, ref = written.host, written.ref
        async with deadline(within_s, f"{host}: {ref} is not verified"):
            while True:
                try:
                    report, there = await self.report(host), await self.get(host, ref)
                    if there is None and written.is_removal:
                        return written  # it was carried out, and taken away
                    if there is None or there.revision != written.revision:
                        now = f"generation {there.generation}" if there else "no key"
                        text = f"{host}: {ref} was written by another: {now}, not {written.generation}"
                        raise PreconditionFailed(text, step="fleet", fix="read it, and decide again")
                    if report.is_verified(ref, written.revision):
                        break
                    prefix = values.reported_prefix(host)
                    async with aclosing(self.etcd.watch(prefix, report.at + 1)) as watch:
                        while not await anext(watch):
                            pass  # until its next report
                except (EtcdUnavailable, Compacted):
                    await asyncio.sleep(AGAIN_S)
            if written.is_removal:  # not if another has written it since
                key = values.desired_key(host, ref)
                await self.etcd.change({}, delete=[key], unchanged={key: written.revision})
        return written

    async def drain(self, host: str, ports: Collection[str] = ()) -> list[Written]:
        """Desire that these ports go, or all of the host, among them those whose keys have gone.

        Raises: NotFound if one of ``ports`` is not there, and as ``delete``.
        """
        desired = await self.desired(host, lambda ref: ref.kind in PORTS)
        there = dict.fromkeys((await self.report(host)).faults, 0) | {d.ref: d.generation for d in desired}
        chosen = [ref for ref in sorted(there) if ref.kind in PORTS and (not ports or ref.id in ports)]
        for missing in sorted(set(ports) - {ref.id for ref in chosen}):
            fix = f"netplugin fleet ports --host {host}"
            raise NotFound(f"{host} has no port {missing}", step="fleet", fix=fix)
        return [await self.delete(host, ref, after=there[ref], drained=True) for ref in chosen]

    async def desired(self, host: str, chosen: Callable[[Ref], bool]) -> list[Written]:
        """What etcd has for a host, or (without name) for all of them. Raises: EtcdError."""
        prefix = values.desired_prefix(host) if host else values.root("desired")
        found = (await self.etcd.read(prefix)).items
        return [written(name, ref, kv.mod_revision, kv.value) for name, ref, kv in refs(found) if chosen(ref)]

    async def reports(self, host: str = "") -> dict[str, Report]:
        """Of all hosts, or of one, whether it has reported or not. Raises: InvalidRequest, EtcdError."""
        prefix = values.reported_prefix(checked_name("host", host)) if host else values.root("reported")
        reported = await self.etcd.read(prefix)
        alive = await self.etcd.read(values.alive_key(host) if host else values.root("alive"))
        return reports(reported, alive, {host} if host else ())

    async def report(self, host: str) -> Report:
        """Of one host, whether it has reported or not. Raises: InvalidRequest, EtcdError."""
        return (await self.reports(host))[host]

    # -- one object ------------------------------------------------------------------------------

    async def _at(self, host: str, ref: Ref) -> tuple[Written | None, int]:
        """The object, and the revision of etcd now."""
        snapshot = await self.etcd.read(values.desired_key(checked_name("host", host), ref))
        for kv in snapshot.items:
            return written(host, ref, kv.mod_revision, kv.value), snapshot.revision
        return None, snapshot.revision

    async def write(
        self, host: str, ref: Ref, body: Mapping[str, Any], after: int | None, save: Save | None = None
    ) -> Written:
        """``put`` or ``delete``, by ``save`` in place of a transaction with the key alone."""
        key, save = values.desired_key(host, ref), save or self.etcd.change
        async with deadline(self._write_s, f"{key} is not written"):
            while True:
                try:
                    there, now = await self._at(host, ref)
                    generation = there.generation if there else 0
                    report = await self.report(host)
                    fault = report.faults.get(ref, Fault(state=""))
                    # Above all of before, also of one whose key has gone: an agent refuses a step back.
                    desired, value = encoded(ref, body, max(generation, fault.generation, now) + 1)
                    has = there.desired if there else None
                    is_same = has and has.digest == desired.digest and has.drained >= desired.drained
                    # What the host has tried and is not as desired is tried again, by a new generation.
                    tried = there is not None and report.has_carried_out(there.revision)
                    again = fault.state in ("failed", "overridden") and tried
                    if there is not None and is_same and not again:
                        return there
                    if desired.deleted and after is None:  # what is there now, and nothing later
                        after = generation
                    if not is_same:
                        _require(there, after, key)
                    revision = await save({key: value}, unchanged={key: there.revision if there else 0})
                    if revision is not None:
                        return Written(host, ref, revision, desired)
                except EtcdUnavailable:
                    # It may have taken place: then the same spec is there.
                    await asyncio.sleep(AGAIN_S)


def encoded(ref: Ref, body: Mapping[str, Any], generation: int) -> tuple[AnyDesired, bytes]:
    """A value of ``desired/`` and its bytes. Raises: InvalidRequest, as the API for the same JSON."""
    try:
        value = json.dumps({"generation": generation, **body}, allow_nan=False).encode()
    except (TypeError, ValueError) as wrong:
        raise InvalidRequest.of_field("spec", f"is no JSON: {wrong}") from None
    return values.parsed(ref, value), value


def _require(there: Written | None, after: int | None, key: str) -> None:
    """Whether the caller has seen what it replaces. Raises: PreconditionFailed."""
    now = there.generation if there else 0
    gone = there is None or there.spec is None
    if now == after or (after is None and gone):
        return
    text = f"{key} has generation {now}, written by another" if there else f"{key} is not there any more"
    fix = f"read it, and write what is to replace it, with after={now}"
    raise PreconditionFailed(text, step="fleet", fix=fix)


@asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """Raises: OperationTimeout."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        fix = "netplugin fleet status says which host is down or behind"
        raise OperationTimeout(f"{what} within {seconds:g} s", step="fleet", fix=fix) from None


class BlockingWriter:
    """A ``Writer`` for a thread without an event loop: ``with BlockingWriter(...) as fleet: fleet.run(
    fleet.writer.put(...))``."""

    def __init__(self, endpoints: Sequence[str], credentials: Credentials) -> None:
        self.writer = Writer(Etcd(endpoints, credentials))
        self._runner = asyncio.Runner()

    def __enter__(self) -> BlockingWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self.run(self.writer.etcd.close())
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the result of a method of ``writer``."""
        return self._runner.run(work)
