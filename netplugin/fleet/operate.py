"""What an operator changes for many hosts: an acceptance, and a change that is rolled from host to host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from netplugin.api.errors import Conflict, InvalidRequest, NetpluginError, NotFound, some
from netplugin.api.fields import Name, Value
from netplugin.fleet import values
from netplugin.fleet.errors import EtcdError, EtcdUnavailable, NotAsDesired
from netplugin.fleet.names import Ref
from netplugin.fleet.reports import Written
from netplugin.fleet.values import Acceptance
from netplugin.fleet.writer import Writer, encoded

# No time and no count of acceptances comes to it.
_HIGHEST = 1 << 40


async def accept(writer: Writer, revision: int, host: str = "") -> Acceptance:
    """Let etcd count as it was at a revision: for all hosts, or for one.

    Raises: InvalidRequest, Conflict if hosts come from several clusters, EtcdError.
    """
    everyone, own = values.acceptance_keys(host)
    snapshot = await writer.etcd.read(values.root("accepted"))
    before = [*(await writer.etcd.read(everyone)).items, *snapshot.items]
    if revision > snapshot.revision:
        raise InvalidRequest.of_field("revision", f"etcd is at {snapshot.revision} now")
    summaries = [report.summary for report in (await writer.reports(host)).values() if report.summary]
    here = values.cluster_name(snapshot.cluster_id)
    # A host that is taken over may report anything: it makes none of the others refuse for good.
    clusters = {each.cluster for each in summaries if each.cluster != here or each.refused} - {""}
    if len(clusters) > 1:
        text = f"the hosts come from several clusters: {some(sorted(clusters))}"
        raise Conflict(text, step="accept", fix="accept for one host after the other, with --host")
    numbers = [each.accepted for each in summaries if each.accepted < _HIGHEST]
    for kv in before:
        with suppress(InvalidRequest):
            numbers.append(values.valid_value(Acceptance, kv.value).number)
    # The time, to be above those that a backup has forgotten, too.
    number = max([int(time.time()), *(each + 1 for each in numbers)])
    made = Acceptance(number=number, cluster=here, replaces=min(clusters, default=here), revision=revision)
    key = own if host else everyone
    known = {key: next((kv.mod_revision for kv in before if kv.key == key), 0)}
    if await writer.etcd.change({key: made.model_dump_json().encode()}, unchanged=known) is None:
        raise Conflict("another operator has accepted just now", step="accept", fix="netplugin fleet status")
    return made


class Roll(Value):
    """A change that is not on all hosts yet, as etcd has it. ``hosts``: none for all that have the object."""

    change: dict[str, Any]
    hosts: tuple[Name, ...] = ()


@dataclass(eq=False)
class Roller:
    """Rolls the change of one object. ``_say`` gets a line for each host, which has ``_host_s`` seconds.

    Who has the change is seen from what the hosts are to have. Each write for a host writes the key of the
    roll too, in one transaction, if nobody else has. So any machine goes on with it, and two do not at once.
    """

    _writer: Writer
    _ref: Ref
    _host_s: float
    _say: Callable[[str], None]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: The roll as etcd has it, and the revision that wrote it.
    _value: bytes = b""
    _revision: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def _key(self) -> str:
        return values.roll_key(self._ref)

    async def run(
        self, change: dict[str, Any] | None, hosts: Sequence[str], most: int, stop_on_error: bool
    ) -> int:
        """Begin, or (with the same change, or None) go on. Returns how many hosts are left.

        ``most`` hosts are unavailable at once: changed and not verified, or ``failed``. Some are left if so
        many have failed, or one with ``stop_on_error``.

        Raises: InvalidRequest before anything is written, Conflict, NotFound, EtcdError.
        """
        roll = await self._open(change, tuple(hosts))
        left = await self._hosts_left(roll)
        await self._save({}, {})
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                failed = len(self.failed)
                while left and len(running) + failed < most and not (failed and stop_on_error):
                    running.add(asyncio.create_task(self._one(*left.pop(0))))
                if not running:
                    break
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in running:
                task.cancel()
        if not left and not self.failed:
            await self.abandon()
        return len(left)

    async def abandon(self) -> None:
        """Forget the roll; what it has changed stays. Raises: EtcdError."""
        await self._writer.etcd.change({}, delete=[self._key])

    async def _open(self, change: dict[str, Any] | None, hosts: tuple[str, ...]) -> Roll:
        for kv in (await self._writer.etcd.read(self._key)).items:
            there = values.valid_value(Roll, kv.value)
            if change is not None and (change, hosts) != (there.change, there.hosts):
                text = f"a roll of {self._ref} with another change is not finished"
                fix = f"go on with it: netplugin fleet roll {self._ref}; or forget it, with --abandon"
                raise Conflict(text, step="roll", fix=fix)
            self._value, self._revision = kv.value, kv.mod_revision
            return there
        if change is None:
            text = f"there is no roll of {self._ref} to go on with"
            raise NotFound(text, step="roll", fix="give the change with --change")
        roll = Roll(change=change, hosts=hosts)
        self._value = roll.model_dump_json().encode()
        return roll

    async def _hosts_left(self, roll: Roll) -> list[tuple[Written, dict[str, Any]]]:
        """What hosts have, and their new specs; first those that have these already: to be verified."""
        there = {each.host: each for each in await self._writer.desired("", lambda ref: ref == self._ref)}
        found: list[tuple[bool, str, dict[str, Any]]] = []
        for host in roll.hosts or there:
            has = there.get(host)
            if has is None or has.desired is None or (roll.hosts and has.spec is None):
                fix = "repair it, or name the hosts with --host"
                raise NotFound(f"{host} has no {self._ref} that can be read", step="roll", fix=fix)
            if has.spec is not None:
                body = merged(has.spec.model_dump(mode="json", exclude_unset=True), roll.change)
                changes = encoded(self._ref, {"spec": body}, 1)[0].digest != has.desired.digest
                found.append((changes, host, body))
        return [(there[host], body) for _, host, body in sorted(found, key=lambda each: each[:2])]

    async def _one(self, there: Written, body: dict[str, Any]) -> None:
        """Raises: Conflict if another machine goes on with this roll, EtcdError."""
        host = there.host
        try:
            report = await self._writer.report(host)
            if not report.is_alive:
                fix = "repair its agent, and go on with the roll"
                raise NotAsDesired("its agent is not connected to etcd", step="roll", fix=fix)
            made = await self._writer.write(host, self._ref, {"spec": body}, there.generation, self._save)
            await self._writer.verified(made, within_s=self._host_s)
            off = (await self._writer.report(host)).off
            if off > report.off:
                fix = f"netplugin fleet ports --host {host} --off"
                text = f"{off} objects are not as desired any more, {report.off} before"
                raise NotAsDesired(text, step="roll", fix=fix)
            self._say(f"{host}: verified")
        except (_Overtaken, EtcdError):
            raise
        except NetpluginError as error:
            self._say(f"{host}: {error}")
            self.failed[host] = str(error)

    async def _save(self, put: Mapping[str, bytes], unchanged: Mapping[str, int]) -> int | None:
        """Write the roll, and a host's key if that has this revision. Returns the revision of both, or None.

        Raises: Conflict, EtcdError.
        """
        async with self._lock:
            put, known = {self._key: self._value, **put}, {self._key: self._revision, **unchanged}
            try:
                revision = await self._writer.etcd.change(put, unchanged=known)
            except EtcdUnavailable as away:  # whether it took place is not known: who runs it again sees it
                raise EtcdError(away.detail, step="roll", fix="run it again") from None
            if revision is not None:
                self._revision = revision
                return revision
            now = (await self._writer.etcd.read(self._key)).items
            if (now[0].mod_revision if now else 0) == self._revision:
                return None
            text = f"another machine has gone on with the roll of {self._ref}, or has ended it"
            raise _Overtaken(text, step="roll", fix="netplugin fleet status")


class _Overtaken(Conflict):
    """Whatever happens to a host, this machine has nothing more to do."""


def merged(there: Any, change: Any) -> Any:
    """A JSON merge patch (RFC 7396): null takes a field away."""
    if not isinstance(change, Mapping):
        return change
    result = dict(there) if isinstance(there, Mapping) else {}
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result
