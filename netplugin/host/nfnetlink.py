"""nf_tables of the kernel over nfnetlink: transactions, and reads that know whether something changed.

No process and no library: docs/libraries.md has the reasons. The kernel works on a transaction within the
call that sends it. It does so one at a time (``commit_mutex`` in net/netfilter/nf_tables_api.c), and may load
modules for it. So a thread sends it, and the caller waits until its deadline. Reads take no lock.

The kernel frees what a transaction deleted, or replaced, in the background after a grace period, and to close
any socket of this protocol waits for that (``nft_rcv_nl_event``): 4 to 13 ms. So the socket is kept.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self, TypeVar

from netplugin.api.errors import BackendUnavailable, HostError, NetpluginError, OperationTimeout
from netplugin.host import netlink
from netplugin.host.netlink import Channel, Interrupted, Kept, attribute, attributes, wait_at_most
from netplugin.host.processes import remaining
from netplugin.host.threaded_call import ThreadedCall

# include/uapi/linux/netfilter: nfnetlink.h, nf_tables.h
NETLINK_NETFILTER = 12
_SUBSYSTEM, _BEGIN, _END = 10, 0x10, 0x11
_NEWGEN, _GETGEN, _GEN_ID = 15, 16, 1
_REQUEST, _ACK, _ECHO, CREATE = 0x01, 0x04, 0x08, 0x400
_HEADER, _GENMSG = struct.Struct("=IHHII"), struct.Struct("=BBH")
_ANY_FAMILY = 0
FAMILIES = {"inet": 1, "bridge": 7}
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
#: For the answers of the kernel about a transaction: one for each refused message.
_ANSWERS = 1 << 20
_LEAST_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """One request: its kind (NFT_MSG_*), its attributes, its flags."""

    kind: int
    body: bytes
    flags: int = 0


class TransactionRefused(HostError):
    """The kernel made none of the changes of a transaction.

    ``refused``: the error texts of the kernel, by the numbers of the messages that it refused; empty if it
    refused the transaction as a whole.
    """

    refused: Mapping[int, str] = MappingProxyType({})

    @classmethod
    def of(cls, refused: Mapping[int, str], whole: Collection[str], step: str) -> Self:
        """``whole``: the error texts for the whole transaction."""
        texts = "; ".join(dict.fromkeys((*whole, *refused.values())))
        error = cls(
            f"nftables: {texts}",
            step=step,
            fix="look in nft list ruleset for tables named netplugin that another program has changed",
        )
        error.refused = refused
        return error

    def counted(self, number: Callable[[int], int]) -> TransactionRefused:
        """The error with other numbers: ``number`` translates one."""
        error = TransactionRefused(self.detail, step=self.step, fix=self.fix)
        error.refused = {number(at): words for at, words in self.refused.items()}
        return error


@dataclass
class Nfnetlink:
    """nf_tables in the network namespace of the calling thread. Used by one thread at a time."""

    #: How a socket is sent to; tests replace it by one that hangs.
    send: Callable[[socket.socket, bytes], object] = socket.socket.send
    _channels: Kept[Channel] = field(
        default_factory=lambda: Kept(lambda: Channel(NETLINK_NETFILTER)), repr=False
    )
    #: How many generations our own transactions have made.
    _generations: int = 0
    _late: ThreadedCall | None = field(default=None, repr=False)

    # -- reading ---------------------------------------------------------------------------------

    def read(self, step: str, deadline: float, look: Callable[[Channel, int], T]) -> T:
        """Return what ``look`` reads, of which it gets the stamp; again while others change what it lists.

        Raises: OperationTimeout also while the outcome of a transaction is not known: what is read may
        change. BackendUnavailable, HostError.
        """
        self._require_certain(step, deadline)
        with _words(step), self._channels.use() as channel:
            wait_at_most(channel.socket, max(_LEAST_S, remaining(deadline)))
            while True:
                try:
                    return look(channel, self.stamp(channel))
                except (Interrupted, FileNotFoundError):
                    if not remaining(deadline):
                        raise

    def stamp(self, channel: Channel) -> int:
        """Return a number that stays the same while nobody but this object changes nf_tables.

        The kernel counts the transactions of all tables (NFTA_GEN_ID). Raises: OSError, TimeoutError.
        """
        [answer] = ask(channel, _ANY_FAMILY, Message(_GETGEN, b""))
        found = dict(attributes(answer, _GENMSG.size))
        return (int.from_bytes(found[_GEN_ID], "big") - self._generations) % (1 << 32)

    # -- writing ---------------------------------------------------------------------------------

    def commit(self, family: int, messages: Sequence[Message], step: str, deadline: float) -> None:
        """Make all of the changes, or none.

        After OperationTimeout the kernel may still make them; until that is known, all calls raise it.

        Raises: TransactionRefused, BackendUnavailable, HostError, OperationTimeout.
        """
        self._require_certain(step, deadline)
        with _words(step), self._channels.use() as channel:
            data = _batch(family, messages)
            _enlarge(channel.socket, socket.SO_SNDBUF, _SO_SNDBUFFORCE, 2 * len(data))
            _enlarge(channel.socket, socket.SO_RCVBUF, _SO_RCVBUFFORCE, _ANSWERS)
            channel.idle = False
            self._send(channel, data, step, deadline)
            outcome = _outcome(channel)
            channel.idle = True
        if outcome.refused or outcome.whole:
            raise TransactionRefused.of(outcome.refused, outcome.whole, step)
        self._generations += outcome.generations

    def _send(self, channel: Channel, data: bytes, step: str, deadline: float) -> None:
        # A copy, which a late thread can use after the channel is closed.
        own = channel.socket.dup()

        def send() -> None:
            with own:
                self.send(own, data)

        call = ThreadedCall("nftables-transaction", send)
        if not call.ended(max(_LEAST_S, remaining(deadline))):
            self._late = call
            raise OperationTimeout("nftables: the kernel did not end a transaction in time", step=step)

    def _require_certain(self, step: str, deadline: float) -> None:
        if self._late is None:
            return
        with contextlib.suppress(OSError):  # its outcome is read anyway
            if not self._late.ended(remaining(deadline)):
                raise OperationTimeout(
                    "nftables: the kernel still works on an earlier transaction", step=step
                )
        self._late = None


def ask(channel: Channel, family: int, message: Message) -> list[bytes]:
    """Send a request for one object. Raises: OSError (ENOENT if there is none), TimeoutError."""
    return channel.ask(_kind(message), head(family) + message.body, message.flags)


def dump(channel: Channel, family: int, message: Message) -> Iterator[bytes]:
    """Yield all objects that a request asks for. Raises: OSError, TimeoutError, netlink.Interrupted."""
    return channel.dump(_kind(message), head(family) + message.body)


def head(family: int, resource: int = 0) -> bytes:
    """The header that follows netlink's own."""
    return _GENMSG.pack(family, 0, socket.htons(resource))


#: The length of that header.
HEAD = _GENMSG.size


def unavailable() -> NetpluginError | None:
    """Return why nf_tables cannot be used; None if it can. Changes nothing."""
    try:
        with _words("nftables"), Channel(NETLINK_NETFILTER) as channel:
            Nfnetlink().stamp(channel)
    except NetpluginError as error:
        return error
    return None


def text_attribute(kind: int, name: str) -> bytes:
    return attribute(kind, name.encode() + b"\0")


def u32(kind: int, number: int) -> bytes:
    """A number in network byte order, as nf_tables has all of its own."""
    return attribute(kind, struct.pack(">I", number))


def _kind(message: Message) -> int:
    return _SUBSYSTEM << 8 | message.kind


def _batch(family: int, messages: Sequence[Message]) -> bytes:
    """The messages of a transaction, from 1. The kernel acknowledges the last, or says what is wrong.

    With NLM_F_ECHO on the first, it also sends us its notice of a new generation.
    """
    parts = [_packed(_BEGIN, _REQUEST, 0, head(_ANY_FAMILY, _SUBSYSTEM))]
    start = head(family)
    for number, message in enumerate(messages, 1):
        flags = _REQUEST | message.flags | _ECHO * (number == 1) | _ACK * (number == len(messages))
        parts.append(_packed(_kind(message), flags, number, start + message.body))
    parts.append(_packed(_END, _REQUEST, 0, head(_ANY_FAMILY, _SUBSYSTEM)))
    return b"".join(parts)


def _packed(kind: int, flags: int, number: int, body: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, number, 0) + body


def _outcome(channel: Channel) -> _Outcome:
    """Read what the kernel says of a transaction, all of which it queues before the sending call returns."""
    found = _Outcome()
    heard = False
    while True:
        try:
            data = channel.socket.recv(1 << 17, socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
        except OSError as lost:
            if lost.errno != errno.ENOBUFS:
                raise
            found.whole.append("more is wrong than the kernel could tell")
            continue
        for number, kind, marks, message in netlink.numbered(data):
            if kind == netlink.ERROR:
                heard = True
                if (error := netlink.refusal(marks, message[_HEADER.size :])) is not None:
                    found.add(number, error.strerror or str(error))
            elif kind == _SUBSYSTEM << 8 | _NEWGEN:
                found.generations += 1
    if not heard:
        found.whole.append("the kernel did not answer")
    return found


@dataclass
class _Outcome:
    """The error texts of a transaction, by message counted from 0 and for all of it."""

    refused: dict[int, str] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)
    #: Notices of a new generation: none if the transaction changed nothing.
    generations: int = 0

    def add(self, number: int, words: str) -> None:
        if number:
            self.refused.setdefault(number - 1, words)
        else:
            self.whole.append(words)


def _enlarge(end: socket.socket, option: int, force: int, size: int) -> None:
    """Let a buffer have this size, beyond the system's limit if we may (CAP_NET_ADMIN)."""
    if end.getsockopt(socket.SOL_SOCKET, option) < size:
        try:
            end.setsockopt(socket.SOL_SOCKET, force, size)
        except PermissionError:
            end.setsockopt(socket.SOL_SOCKET, option, size)


def _words(step: str) -> contextlib.AbstractContextManager[None]:
    return netlink.translated(step, "nftables", lambda said, code: _refusal(step, code, said))


def _refusal(step: str, code: int, said: str) -> NetpluginError:
    if code in (errno.EPERM, errno.EACCES):
        return HostError(f"nftables: {said}", step=step, fix="give the agent CAP_NET_ADMIN")
    if code in (errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.EINVAL) and step == "nftables":
        return BackendUnavailable(
            f"the kernel has no nftables: {said}", step=step, fix="modprobe nf_tables, or use another kernel"
        )
    return HostError(f"nftables: {said}", step=step)
