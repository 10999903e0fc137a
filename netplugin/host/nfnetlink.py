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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from pyroute2.netlink import NETLINK_NETFILTER, NLM_F_ACK, NLM_F_DUMP, NLM_F_ECHO, NLM_F_REQUEST, NLMSG_ERROR
from pyroute2.netlink.nfnetlink import NFNL_SUBSYS_NFTABLES

from netplugin.api.errors import BackendUnavailable, HostError, NetpluginError, OperationTimeout
from netplugin.host import netlink
from netplugin.host.kernel_events import queued
from netplugin.host.netlink import ANSWER_S, HEADER_BYTES, Channel, Interrupted, Kept, attribute, attributes
from netplugin.host.processes import remaining
from netplugin.host.threaded_call import ThreadedCall

# include/uapi/linux/netfilter: nfnetlink.h, nf_tables.h
_KINDS, _BEGIN, _END = NFNL_SUBSYS_NFTABLES << 8, 0x10, 0x11
_NEWGEN, _GETGEN = 15, 16
#: The highest number of an attribute that is read of an object.
_ATTRIBUTES = 7
_GENMSG = struct.Struct("=BBH")
#: The length of the header that follows netlink's own.
HEAD = _GENMSG.size
#: By nft's name: the kernel's number (NFPROTO_*).
FAMILIES: Mapping[str, int] = {"inet": 1, "ip": 2, "arp": 3, "netdev": 5, "bridge": 7, "ip6": 10}
FAMILY_NAMES: Mapping[int, str] = {number: name for name, number in FAMILIES.items()}
_ANY_FAMILY = 0
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
#: For the answers of the kernel about a transaction: one for each refused message.
_ANSWERS = 1 << 20
_LEAST_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class NfMessage:
    """One change: its kind (NFT_MSG_*), its attributes, its flags."""

    kind: int
    body: bytes
    flags: int = 0


class TransactionRefused(HostError):
    """The kernel made none of the changes of a transaction.

    ``refused``: the error texts of the kernel, by the numbers of the commands that it refused; empty if it
    refused the transaction as a whole.
    """

    refused: Mapping[int, str] = MappingProxyType({})


@dataclass
class Nfnetlink:
    """nf_tables in the network namespace of the calling thread. Used by one thread at a time."""

    #: How a socket is sent to; tests replace it by one that hangs.
    send: Callable[[socket.socket, bytes], object] = socket.socket.send
    _channels: Kept = field(default_factory=lambda: Kept(NETLINK_NETFILTER), repr=False)
    #: How many generations our own transactions have made.
    _generations: int = 0
    _late: ThreadedCall | None = field(default=None, repr=False)

    def read(self, step: str, deadline: float, look: Callable[[Channel, int], T]) -> T:
        """Return what ``look`` reads, of which it gets the stamp; again while others change what it lists.

        Raises: OperationTimeout also while the outcome of a transaction is not known: what is read may
        change. BackendUnavailable, HostError.
        """
        self._require_certain(step, deadline)
        with netlink.translated(step, "nftables", partial(_refusal, step)), self._channels.use() as channel:
            netlink.wait_at_most(channel.socket, max(_LEAST_S, remaining(deadline)))
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
        [[_, generation, *_]] = ask(channel, _ANY_FAMILY, _GETGEN, b"")
        return (int.from_bytes(generation, "big") - self._generations) % (1 << 32)

    def commit(
        self, family: int, commands: Sequence[Iterable[NfMessage]], step: str, deadline: float
    ) -> None:
        """Make all of the changes, or none. Each command is one message or several.

        After OperationTimeout the kernel may still make them; until that is known, all calls raise it.

        Raises: TransactionRefused, BackendUnavailable, HostError, OperationTimeout.
        """
        self._require_certain(step, deadline)
        data = _batch(family, commands)
        with netlink.translated(step, "nftables", partial(_refusal, step)), self._channels.use() as channel:
            for option, size in ((_SO_SNDBUFFORCE, 2 * len(data)), (_SO_RCVBUFFORCE, _ANSWERS)):
                with contextlib.suppress(PermissionError):  # then the system's limit is left
                    channel.socket.setsockopt(socket.SOL_SOCKET, option, size)
            channel.idle = False
            self._send(channel, data, step, deadline)
            refused, generations = _outcome(channel)
            channel.idle = True
        if refused:
            fix = "look in nft list ruleset for tables named netplugin that another program has changed"
            reasons = "; ".join(dict.fromkeys(refused.values()))
            error = TransactionRefused(f"nftables: {reasons}", step=step, fix=fix)
            error.refused = {number - 1: text for number, text in refused.items() if number}
            raise error
        self._generations += generations

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
                what = "nftables: the kernel still works on an earlier transaction"
                raise OperationTimeout(what, step=step)
        self._late = None


def ask(channel: Channel, family: int, kind: int, body: bytes) -> list[list[bytes]]:
    """Return the object that a request asks for, as ``dump`` does; empty if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return list(dump(channel, family, kind, body, NLM_F_ACK))
    return []


def dump(
    channel: Channel, family: int, kind: int, body: bytes = b"", flags: int = NLM_F_DUMP
) -> Iterator[list[bytes]]:
    """Yield all objects that a request asks for: of each its family, and its attributes by their numbers.

    Raises: OSError, TimeoutError, netlink.Interrupted.
    """
    for _, answer in channel.request(_KINDS | kind, _head(family) + body, NLM_F_REQUEST | flags):
        head = answer[HEADER_BYTES : HEADER_BYTES + 1]
        yield [head, *unpacked(answer, _ATTRIBUTES, HEADER_BYTES + HEAD)]


def changed_tables(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield family and name of the table that each of the kernel's notices (NFNLGRP_NFTABLES) is about."""
    for _, kind, _, message in netlink.numbered(data):
        if kind >> 8 == NFNL_SUBSYS_NFTABLES and kind & 0xFF != _NEWGEN:
            family = FAMILY_NAMES.get(message[HEADER_BYTES], "")
            yield family, netlink.text(unpacked(message, 1, HEADER_BYTES + HEAD)[0])


def unavailable() -> NetpluginError | None:
    """Return why nf_tables cannot be used; None if it can. Changes nothing."""
    try:
        Nfnetlink().read("nftables", time.monotonic() + ANSWER_S, lambda *_: None)
    except NetpluginError as error:
        return error
    return None


def packed(*values: int | str | bytes | None) -> bytes:
    """Encode attributes numbered from 1: numbers of 32 bits, names, what is encoded, and None for none."""
    found = b""
    for number, value in enumerate(values, 1):
        match value:
            case int():  # in network byte order, as nf_tables has all of its own
                value = struct.pack(">I", value % (1 << 32))
            case str():
                value = value.encode() + b"\0"
        if value is not None:
            found += attribute(number, value)
    return found


def unpacked(data: bytes, count: int, offset: int = 0) -> list[bytes]:
    """Decode the attributes numbered 1 to ``count``, after a header; each is empty if there is none."""
    found = dict(attributes(data, offset))
    return [found.get(number, b"") for number in range(1, count + 1)]


def _head(family: int, resource: int = 0) -> bytes:
    return _GENMSG.pack(family, 0, socket.htons(resource))


def _batch(family: int, commands: Sequence[Iterable[NfMessage]]) -> bytes:
    """The messages of a transaction, with the number of their command, from 1.

    The kernel acknowledges the last, or says what is wrong with which number. With NLM_F_ECHO on the first,
    it also sends us its notice of a new generation.
    """
    each = [(number, message) for number, command in enumerate(commands, 1) for message in command]
    bound, start = _head(_ANY_FAMILY, NFNL_SUBSYS_NFTABLES), _head(family)
    parts = [netlink.with_header(_BEGIN, NLM_F_REQUEST, 0, bound)]
    for at, (number, message) in enumerate(each, 1):
        flags = NLM_F_REQUEST | message.flags | NLM_F_ECHO * (at == 1) | NLM_F_ACK * (at == len(each))
        parts.append(netlink.with_header(_KINDS | message.kind, flags, number, start + message.body))
    return b"".join([*parts, netlink.with_header(_END, NLM_F_REQUEST, 0, bound)])


def _outcome(channel: Channel) -> tuple[dict[int, str], int]:
    """Read what the kernel says of a transaction, all of which it queues before the sending call returns.

    The error texts by the number of their command, with 0 for the whole; and how many notices of a new
    generation there are: none if the transaction changed nothing.
    """
    refused: dict[int, str] = {}
    generations, received = 0, False
    for data in queued(channel.socket):
        if not data:
            refused[0] = "more is wrong than the kernel could tell"
        for number, kind, marks, message in netlink.numbered(data):
            if kind == NLMSG_ERROR:
                received = True
                if (error := netlink.refusal(marks, message[HEADER_BYTES:])) is not None:
                    refused.setdefault(number, error.strerror or str(error))
            elif kind == _KINDS | _NEWGEN:
                generations += 1
    if not received:
        refused.setdefault(0, "the kernel did not answer")
    return refused, generations


def _refusal(step: str, error_text: str, code: int) -> NetpluginError:
    if code in (errno.EPERM, errno.EACCES):
        return HostError(f"nftables: {error_text}", step=step, fix="give the agent CAP_NET_ADMIN")
    if code in (errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.EINVAL) and step == "nftables":
        fix = "modprobe nf_tables, or use another kernel"
        return BackendUnavailable(f"the kernel has no nftables: {error_text}", step=step, fix=fix)
    return HostError(f"nftables: {error_text}", step=step)
