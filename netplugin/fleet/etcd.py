"""A client of etcd v3 for what a fleet needs: read a prefix, compare and put, watch, lease.

One connection to one member at a time, by TLS. The user is the common name of a client certificate, or has a
password, for which etcd gives a token (``Auth/Authenticate``; ``token`` in a call's metadata). Another token
is requested when etcd refuses the one before, or the file has another password.
Each wait has a deadline. A watch ends with an error as soon as something may have been missed: its user reads
again. The files of the certificates are read for each connection, so that renewed ones are used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

from netplugin.api.errors import reason
from netplugin.fleet import errors
from netplugin.fleet.messages import DELETE, EQUAL, MOD, M
from netplugin.fleet.names import FILES, checked_endpoint
from netplugin.fleet.names import Credentials as Credentials

# What gRPC writes to standard error is in its errors too.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
import grpc.aio

T = TypeVar("T")
_Io: TypeAlias = Callable[..., Awaitable[Any]]
_Metadata: TypeAlias = tuple[tuple[str, str], ...]
# Keys of one answer, some 1 MB if the values are those of ports, and its bytes; etcd's own limit for a value
# is 1.5 MB (``--max-request-bytes``).
_PAGE, _LARGEST = 500, 8 << 20
_OPTIONS = (("grpc.max_receive_message_length", _LARGEST), ("grpc.enable_http_proxy", 0))
# A member that has lost the others ends a stream instead of keeping it without events.
_REQUIRE_LEADER = (("hasleader", "true"),)
_CLOSED = (grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError, asyncio.CancelledError)


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key with its value and the revision that wrote it, or (in a watch) deleted it."""

    key: str
    value: bytes
    mod_revision: int
    is_deleted: bool = False


@dataclass(frozen=True)
class Snapshot:
    """All keys of a prefix as they were at a revision."""

    cluster_id: int
    revision: int
    items: tuple[KeyValue, ...]


class Etcd:
    """For one event loop. ``close`` it after use."""

    #: Seconds for a call, or for one message of a stream.
    timeout_s: ClassVar[float] = 5.0

    def __init__(self, endpoints: Sequence[str], credentials: Credentials, quiet_s: float = 20.0) -> None:
        """``endpoints``: ``host:port`` of the members, the first of which is asked first. After ``quiet_s``
        seconds of silence a watch asks whether its connection is alive."""
        self._endpoints = [checked_endpoint(each) for each in endpoints]
        self._credentials = credentials
        self._quiet_s = quiet_s
        self._channel: Any = None
        #: The password that was used last, and what etcd has given for it.
        self._token: tuple[str, str] | None = None
        self._login = asyncio.Lock()

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def read(self, prefix: str, *, page: int = _PAGE, keys_only: bool = False) -> Snapshot:
        """All keys with this prefix, which ends with /, or one key. Asks one member after the other.

        ``keys_only``: without the values. Raises: EtcdError.
        """
        for _ in self._endpoints[1:]:
            try:
                return await self._read(prefix, page, keys_only)
            except errors.EtcdUnavailable:
                continue
        return await self._read(prefix, page, keys_only)

    async def _read(self, prefix: str, page: int, keys_only: bool) -> Snapshot:
        start, end = span(prefix)
        items: list[KeyValue] = []
        cluster = revision = 0
        while True:
            words = {"limit": page, "revision": revision, "keys_only": keys_only}
            request = M.RangeRequest(key=start, range_end=end, **words)
            try:
                answer = await self.ask("KV/Range", request, M.RangeResponse)
            except errors.TooLarge:
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
        known = (unchanged or {}).items()
        compares = [M.Compare(result=EQUAL, target=MOD, key=k.encode(), mod_revision=at) for k, at in known]
        puts = [M.PutRequest(key=key.encode(), value=value, lease=lease) for key, value in put.items()]
        ops = [M.RequestOp(request_put=each) for each in puts]
        ops += [M.RequestOp(request_delete_range=M.DeleteRequest(key=key.encode())) for key in delete]
        answer = await self.ask("KV/Txn", M.TxnRequest(compare=compares, success=ops), M.TxnResponse)
        return int(answer.header.revision) if answer.succeeded else None

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[tuple[KeyValue, ...], None]:
        """The changes of keys with this prefix from a revision on, in order, until something may be missed.

        An empty tuple: etcd has answered that there are none. Raises: Compacted, EtcdUnavailable,
        EtcdForbidden.
        """
        start, end = span(prefix)
        create = M.WatchCreate(key=start, range_end=end, start_revision=revision, fragment=True)
        progress = M.WatchRequest(progress_request=M.Nothing())

        async def has_come() -> bool:
            """Whether etcd is at the revision: newer ones say nothing before (etcd's pull request 20229)."""
            one = M.RangeRequest(key=start, limit=1, keys_only=True)
            return bool((await self.ask("KV/Range", one, M.RangeResponse)).header.revision >= revision)

        async with self._stream("Watch/Watch", M.WatchResponse) as (write, read):
            await write(M.WatchRequest(create_request=create))
            quiet_s = self.timeout_s
            while True:
                answer = await read(quiet_s, progress, has_come)
                quiet_s = self._quiet_s
                if answer.canceled:
                    raise _canceled(answer, revision)
                if not answer.created:
                    yield tuple(_item(event.kv, event.type == DELETE) for event in answer.events)

    async def grant(self, ttl_s: int) -> int:
        """A new lease. Raises: EtcdError."""
        answer = await self.ask("Lease/LeaseGrant", M.LeaseGrantRequest(TTL=ttl_s), M.LeaseResponse)
        return int(answer.ID)

    async def keep(self, lease: int, ttl_s: int) -> None:
        """Keep a lease alive until cancelled. Raises: LeaseLost, EtcdUnavailable."""
        async with self._stream("Lease/LeaseKeepAlive", M.LeaseResponse) as (write, read):
            while True:
                await write(M.LeaseRequest(ID=lease))
                if (await read(self.timeout_s)).TTL <= 0:
                    raise errors.LeaseLost(f"lease {lease:x} has run out", step="lease")
                await asyncio.sleep(ttl_s / 3)

    async def revoke(self, lease: int) -> None:
        """End a lease, and with it the keys that have it. Raises: EtcdError."""
        await self.ask("Lease/LeaseRevoke", M.LeaseRequest(ID=lease), M.Nothing)

    # -- the connection --------------------------------------------------------------------------

    def _call(self, kind: str, method: str, answer: Any) -> tuple[Any, Any]:
        """The channel to the first member, and what calls a method of it. Raises: EtcdForbidden."""
        if self._channel is None:
            files = self._credentials
            parts = [_content(path) if path else None for path in (files.ca, files.key, files.cert)]
            credentials = grpc.ssl_channel_credentials(*parts)
            self._channel = grpc.aio.secure_channel(self._endpoints[0], credentials, _OPTIONS)
        make = getattr(self._channel, kind)
        to_bytes = methodcaller("SerializeToString")
        return self._channel, make(f"/etcdserverpb.{method}", to_bytes, answer.FromString)

    async def ask(self, method: str, request: Any, answer: Any) -> Any:
        """One call: the answer is of this class. Raises: EtcdError."""
        try:
            return await self._ask(method, request, answer, await self._user())
        except errors.TokenRefused:
            self._token = None
        return await self._ask(method, request, answer, await self._user())

    async def _ask(self, method: str, request: Any, answer: Any, user: _Metadata) -> Any:
        channel, call = self._call("unary_unary", method, answer)
        return await self._explained(method, channel, call(request, timeout=self.timeout_s, metadata=user))

    def password_of(self, user: str) -> str:
        """As its file has it now; none for another user, or one with a certificate. Raises: EtcdForbidden."""
        file = self._credentials.password_file
        if file is None or user != self._credentials.user:
            return ""
        password = _content(file, 0o077).strip().decode(errors="replace")
        if not password:
            raise errors.EtcdForbidden(f"{file} is empty", step="credentials", fix="write the password to it")
        return password

    async def _user(self) -> _Metadata:
        """The token of a user with a password, which is read each time; nothing for one with a certificate.

        Raises: EtcdError, with the name of the file if etcd does not take the password.
        """
        name, file = self._credentials.user, self._credentials.password_file
        if file is None:
            return ()
        async with self._login:
            password = self.password_of(name)
            if self._token is None or self._token[0] != password:
                request = M.Authenticate(name=name, password=password)
                try:
                    answer = await self._ask("Auth/Authenticate", request, M.AuthenticateResponse, ())
                    self._token = password, answer.token
                except errors.EtcdError as refused:
                    if isinstance(refused, errors.EtcdUnavailable):
                        raise
                    if "authentication is not enabled" not in refused.detail:
                        text = f"{refused.detail}: user {name}, with the password of {file}"
                        fix = "write to the file the password that etcd has (etcdctl user passwd)"
                        raise errors.EtcdForbidden(text, step="Auth/Authenticate", fix=fix) from None
                    self._token = password, ""  # without access control everybody may do everything
            token = self._token[1]
        return (("token", token),) if token else ()

    @asynccontextmanager
    async def _stream(self, method: str, answer: Any) -> AsyncIterator[tuple[_Io, _Io]]:
        """Write and read of a stream. Read has a deadline, and may ask when that is over; it is late when
        nothing has come twice though ``is_due``."""
        user = await self._user()
        channel, make = self._call("stream_stream", method, answer)
        call = make(metadata=(*_REQUIRE_LEADER, *user))

        async def write(request: Any) -> None:
            await self._explained(method, channel, asyncio.wait_for(call.write(request), self.timeout_s))

        async def read(within_s: float, ask: Any = None, is_due: _Io | None = None) -> Any:
            reading = asyncio.ensure_future(_next(call))
            try:  # not wait_for at first: to cancel a read is to cancel the stream
                await asyncio.wait({reading}, timeout=within_s)
                unanswered = 0
                while is_due is not None and not reading.done() and unanswered < 2:
                    await write(ask)
                    await asyncio.wait({reading}, timeout=self.timeout_s)
                    try:
                        unanswered = 0 if reading.done() or not await is_due() else unanswered + 1
                    except errors.EtcdUnavailable:
                        break
                return await self._explained(method, channel, asyncio.wait_for(reading, 0))
            finally:
                reading.cancel()

        try:
            yield write, read
        finally:
            call.cancel()

    async def _explained(self, step: str, channel: Any, work: Awaitable[T]) -> T:
        """Await the work, and raise what went wrong as one of our errors. The next call may ask another."""
        member = self._endpoints[0]
        try:
            return await work
        except grpc.aio.AioRpcError as failed:
            error = errors.explained(failed.code().name, failed.details() or "", step, member)
        except TimeoutError:
            error = errors.EtcdUnavailable(f"{member} is silent", step=step, fix=errors.LOOK)
        except _CLOSED:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # gRPC cancels the other calls of a connection that is closed.
            error = errors.EtcdUnavailable(f"{member}: the connection is closed", step=step, fix=errors.LOOK)
        if isinstance(error, errors.EtcdUnavailable) and channel is self._channel:
            self._endpoints = [*self._endpoints[1:], member]
            await self.close()
        raise error


def _content(path: Path, deny: int = 0) -> bytes:
    """Raises: EtcdForbidden if it cannot be read, or its mode has a bit of ``deny``."""
    try:
        if not path.stat().st_mode & deny:
            return path.read_bytes()
        why, fix = "others may read it", f"chmod 0600 {path}"
    except OSError as wrong:
        why, fix = reason(wrong), f"correct it: {FILES}"
    raise errors.EtcdForbidden(f"{path}: {why}", step="credentials", fix=fix)


async def _next(call: Any) -> Any:
    """The next message of a stream, or as an error why it has ended."""
    answer = await call.read()
    if answer is grpc.aio.EOF:
        code, detail = await call.code(), await call.details()
        ended = grpc.StatusCode.UNAVAILABLE if code is grpc.StatusCode.OK else code
        raise grpc.aio.AioRpcError(ended, None, None, details=detail)
    return answer


def span(prefix: str) -> tuple[bytes, bytes | None]:
    """The first key with a prefix, and the first after all of them: 0 comes after /. None: one key; to etcd
    an end that is empty, and sent, is no end at all."""
    start = prefix.encode()
    return start, start[:-1] + b"0" if prefix.endswith("/") else None


def _canceled(answer: Any, revision: int) -> errors.EtcdError:
    """Why etcd has ended a watch."""
    if answer.compact_revision:
        what = f"revision {revision} was compacted; the oldest is {answer.compact_revision}"
        return errors.Compacted(what, step="Watch/Watch")
    words = {"permission denied": "PERMISSION_DENIED", "auth token": "UNAUTHENTICATED"}
    code = next((code for text, code in words.items() if text in answer.cancel_reason), "UNAVAILABLE")
    return errors.explained(code, answer.cancel_reason or "the watch was cancelled", "Watch/Watch", "etcd")


def _item(kv: Any, is_deleted: bool = False) -> KeyValue:
    return KeyValue(kv.key.decode(errors="backslashreplace"), kv.value, kv.mod_revision, is_deleted)
