"""A client of etcd v3 for what a fleet needs: read a prefix, compare and put, watch, lease.

One connection to one member at a time, by TLS, with a client certificate whose common name is etcd's user.
Each wait has a deadline. A watch ends with an error as soon as something may have been missed: its user reads
again. The files of the certificates are read for each connection, so that renewed ones are used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

from netplugin.api.errors import reason
from netplugin.fleet.errors import (
    Compacted,
    EtcdError,
    EtcdForbidden,
    EtcdUnavailable,
    LeaseLost,
    TooLarge,
    explained,
)
from netplugin.fleet.messages import DELETE, EQUAL, MESSAGES, MOD
from netplugin.fleet.names import checked_endpoint

# What gRPC writes to standard error is in its errors too.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
import grpc.aio

T = TypeVar("T")
_Io: TypeAlias = Callable[..., Awaitable[Any]]
# Keys of one answer: some 1 MB if the values are those of ports.
_PAGE = 500
# Bytes of one answer; etcd's own limit for a value is 1.5 MB (``--max-request-bytes``).
_LARGEST = 8 << 20
# A member that has lost the others ends a stream instead of keeping it without events (etcd's ``hasleader``).
_REQUIRE_LEADER = (("hasleader", "true"),)
_OPTIONS = (
    ("grpc.max_receive_message_length", _LARGEST),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: str
    value: bytes
    #: The revision that wrote it: the condition of the next change.
    mod_revision: int


@dataclass(frozen=True)
class Snapshot:
    """All keys of a prefix as they were at a revision."""

    cluster_id: int
    revision: int
    items: tuple[KeyValue, ...]


@dataclass(frozen=True)
class Watched:
    """Changes in order, each a key with its value, or None for one that was deleted.

    Without changes: etcd has answered that there are none.
    """

    revision: int
    changes: tuple[tuple[KeyValue, bool], ...] = ()


@dataclass(frozen=True)
class Credentials:
    """The files with etcd's CA and with the certificate and key of the user."""

    ca: Path
    cert: Path
    key: Path

    def read(self) -> Any:
        """Raises: EtcdForbidden if a file cannot be read."""
        try:
            parts = [path.read_bytes() for path in (self.ca, self.key, self.cert)]
        except OSError as wrong:
            fix = "correct [fleet] ca, cert and key"
            raise EtcdForbidden(f"{wrong.filename}: {reason(wrong)}", step="credentials", fix=fix) from None
        return grpc.ssl_channel_credentials(*parts)


class Etcd:
    """For one event loop. ``close`` it after use."""

    #: Seconds for a call, and of silence after which a watch asks whether its connection is alive.
    timeout_s: ClassVar[float] = 5.0

    def __init__(self, endpoints: Sequence[str], credentials: Credentials, quiet_s: float = 20.0) -> None:
        """``endpoints``: ``host:port`` of the members, the first of which is asked first."""
        self._endpoints = [checked_endpoint(each) for each in endpoints]
        self._credentials = credentials
        self._quiet_s = quiet_s
        self._at = 0
        self._channel: Any = None

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def read(self, prefix: str, *, page: int = _PAGE) -> Snapshot:
        """All keys with this prefix, as of one revision. Asks one member after the other.

        Raises: EtcdError.
        """
        for left in range(len(self._endpoints) - 1, -1, -1):
            try:
                return await self._read(prefix, page)
            except EtcdUnavailable:
                if not left:
                    raise
        raise AssertionError("a client has an endpoint")

    async def _read(self, prefix: str, page: int) -> Snapshot:
        start, end = span(prefix)
        items: list[KeyValue] = []
        cluster = revision = 0
        while True:
            request = MESSAGES["RangeRequest"](key=start, range_end=end, limit=page, revision=revision)
            try:
                answer = await self._ask("KV/Range", request, "RangeResponse")
            except TooLarge:
                if page == 1:
                    raise
                page = max(1, page // 8)
                continue
            cluster, revision = answer.header.cluster_id, revision or answer.header.revision
            items += map(_item, answer.kvs)
            if not answer.more:
                return Snapshot(cluster, revision, tuple(items))
            start = answer.kvs[-1].key + b"\0"

    async def change(
        self,
        put: Mapping[str, bytes],
        *,
        delete: Sequence[str] = (),
        unchanged: Mapping[str, int] | None = None,
        lease: int = 0,
    ) -> int | None:
        """Put and delete up to 128 keys at once, if all of ``unchanged`` have that revision; 0: no such key.

        Returns the revision of the change; None if another was there before. After EtcdUnavailable it may
        have taken place: read it.

        Raises: EtcdError.
        """
        compares = [
            MESSAGES["Compare"](result=EQUAL, target=MOD, key=key.encode(), mod_revision=known)
            for key, known in (unchanged or {}).items()
        ]
        puts = [
            MESSAGES["PutRequest"](key=key.encode(), value=value, lease=lease) for key, value in put.items()
        ]
        ops = [MESSAGES["RequestOp"](request_put=each) for each in puts]
        deletes = [MESSAGES["DeleteRequest"](key=key.encode()) for key in delete]
        ops += [MESSAGES["RequestOp"](request_delete_range=each) for each in deletes]
        request = MESSAGES["TxnRequest"](compare=compares, success=ops)
        answer = await self._ask("KV/Txn", request, "TxnResponse")
        return int(answer.header.revision) if answer.succeeded else None

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[Watched]:
        """The changes of keys with this prefix from a revision on, until something may be missed.

        Raises: Compacted, EtcdUnavailable, EtcdForbidden.
        """
        start, end = span(prefix)
        created = MESSAGES["WatchCreate"](key=start, range_end=end, start_revision=revision, fragment=True)
        silent = MESSAGES["WatchRequest"](progress_request=MESSAGES["Nothing"]())
        async with self._stream("Watch/Watch", "WatchResponse") as (write, read):
            await write(MESSAGES["WatchRequest"](create_request=created))
            waited_s = self.timeout_s
            while True:
                answer = await read(waited_s, silent)
                waited_s = self._quiet_s
                if answer.canceled:
                    raise _canceled(answer, revision)
                if not answer.created:
                    changes = tuple((_item(event.kv), event.type == DELETE) for event in answer.events)
                    yield Watched(int(answer.header.revision), changes)

    async def grant(self, ttl_s: int) -> int:
        """A new lease. Raises: EtcdError."""
        request = MESSAGES["LeaseGrantRequest"](TTL=ttl_s)
        return int((await self._ask("Lease/LeaseGrant", request, "LeaseGrantResponse")).ID)

    async def keep(self, lease: int, ttl_s: int) -> None:
        """Keep a lease alive until cancelled. Raises: LeaseLost, EtcdUnavailable."""
        request = MESSAGES["LeaseRequest"](ID=lease)
        async with self._stream("Lease/LeaseKeepAlive", "LeaseKeepAliveResponse") as (write, read):
            while True:
                await write(request)
                if (await read(self.timeout_s, None)).TTL <= 0:
                    raise LeaseLost(f"lease {lease:x} has run out", step="lease")
                await asyncio.sleep(ttl_s / 3)

    async def revoke(self, lease: int) -> None:
        """End a lease, and with it the keys that have it. Raises: EtcdError."""
        await self._ask("Lease/LeaseRevoke", MESSAGES["LeaseRequest"](ID=lease), "Nothing")

    # -- the connection --------------------------------------------------------------------------

    def _open(self) -> Any:
        """The channel to the member whose turn it is. Raises: EtcdForbidden."""
        if self._channel is None:
            endpoint = self._endpoints[self._at % len(self._endpoints)]
            self._channel = grpc.aio.secure_channel(endpoint, self._credentials.read(), _OPTIONS)
        return self._channel

    async def _next_member(self, channel: Any) -> None:
        """Leave a connection that failed, unless another call has done so."""
        if channel is self._channel:
            self._at += 1
            await self.close()

    async def _ask(self, method: str, request: Any, answer: str) -> Any:
        channel = self._open()
        call = channel.unary_unary(*_method(method, answer))
        return await self._explained(method, channel, call(request, timeout=self.timeout_s))

    @asynccontextmanager
    async def _stream(self, method: str, answer: str) -> AsyncIterator[tuple[_Io, _Io]]:
        """Write and read of a stream; read takes its deadline, and what to write once when that is over."""
        channel = self._open()
        call = channel.stream_stream(*_method(method, answer))(metadata=_REQUIRE_LEADER)

        async def write(request: Any) -> None:
            await self._explained(method, channel, self._in_time(call.write(request)))

        async def read(within_s: float, ask: Any) -> Any:
            # Not wait_for: to cancel a read is to cancel the stream.
            reading = asyncio.ensure_future(call.read())
            try:
                if not (await asyncio.wait({reading}, timeout=within_s))[0]:
                    if ask is not None:
                        await write(ask)
                        await asyncio.wait({reading}, timeout=self.timeout_s)
                if not reading.done():
                    raise TimeoutError
                answer = await self._explained(method, channel, reading)
            except TimeoutError:
                await self._next_member(channel)
                raise EtcdUnavailable(f"{self._name} is silent", step=method) from None
            finally:
                reading.cancel()
            if answer is grpc.aio.EOF:
                await self._explained(method, channel, _ended(call))
            return answer

        try:
            yield write, read
        finally:
            call.cancel()

    async def _in_time(self, work: Awaitable[T]) -> T:
        async with asyncio.timeout(self.timeout_s):
            return await work

    async def _explained(self, step: str, channel: Any, work: Awaitable[T]) -> T:
        """Await the work, and raise what went wrong as one of our errors."""
        name = self._name
        try:
            return await work
        except grpc.aio.AioRpcError as failed:
            error = explained(failed.code().name, failed.details() or "", step, name)
        except (grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError) as closed:
            error = EtcdUnavailable(f"{name}: the connection is closed: {closed}", step=step)
        if isinstance(error, EtcdUnavailable):
            with suppress(Exception):
                await self._next_member(channel)
        raise error

    @property
    def _name(self) -> str:
        return self._endpoints[self._at % len(self._endpoints)]


def span(prefix: str) -> tuple[bytes, bytes]:
    """The first key with a prefix, and the first after all of them. Without a / at its end it is one key."""
    start = prefix.encode()
    return start, start[:-1] + b"0" if prefix.endswith("/") else b""


async def _ended(call: Any) -> None:
    """Raise why a stream has ended."""
    code, detail = await call.code(), await call.details()
    raise grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE if code is grpc.StatusCode.OK else code, None, None, details=detail
    )


def _canceled(answer: Any, revision: int) -> EtcdError:
    """Why etcd has ended a watch."""
    if answer.compact_revision:
        what = f"revision {revision} was compacted; the oldest is {answer.compact_revision}"
        return Compacted(what, step="Watch/Watch")
    code = "PERMISSION_DENIED" if "permission denied" in answer.cancel_reason else "UNAVAILABLE"
    return explained(code, answer.cancel_reason or "the watch was cancelled", "Watch/Watch", "etcd")


def _item(kv: Any) -> KeyValue:
    return KeyValue(kv.key.decode(errors="backslashreplace"), kv.value, kv.mod_revision)


def _method(name: str, answer: str) -> tuple[str, Any, Any]:
    return f"/etcdserverpb.{name}", lambda request: request.SerializeToString(), MESSAGES[answer].FromString
