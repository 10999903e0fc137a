"""What tc has on a device, by netlink: a rate for what leaves it, a guard and a turn for what enters.

As bytes (see netlink.py): what a plug reads of one port is a request or two here, where the kernel
would otherwise list the qdiscs of all devices; and pyroute2 has no 64-bit rates, so that a tbf of
its making ends at 34 Gbit/s.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from netplugin.errors import BackendUnavailable
from netplugin.host import netlink
from netplugin.host.cbpf import Program
from netplugin.host.links import words
from netplugin.host.netlink import attribute, attributes, number, text

# include/uapi/linux: rtnetlink.h, pkt_sched.h, pkt_cls.h, if_ether.h, tc_act/tc_mirred.h
_NEWQDISC, DELQDISC, _GETQDISC = 36, 37, 38
_NEWFILTER, DELFILTER, _GETFILTER = 44, 45, 46
_ROOT, _INGRESS, _INGRESS_HANDLE = 0xFFFFFFFF, 0xFFFFFFF1, 0xFFFF0000
_INGRESS_FILTERS = 0xFFFFFFF2  # of an ingress qdisc and of clsact alike
_KIND, _OPTIONS = 1, 2
_TBF_PARMS, _TBF_RATE64 = 1, 4
_U32_SEL, _U32_ACT = 5, 7
_BPF_OPS_LEN, _BPF_OPS, _BPF_FLAGS, _BPF_DIRECT_ACTION = 4, 5, 8, 1
_ACT_KIND, _ACT_OPTIONS, _MIRRED_PARMS = 1, 2, 2
_EGRESS_REDIRECT, _STOLEN = 1, 4
_ETHERNET = 1
_ALL_PROTOCOLS = 0x0003
TCMSG = struct.Struct("=BxxxiIII")
_RATE = struct.Struct("=BBHhHI")
_SIZES = struct.Struct("=III")
_U32 = struct.Struct("=BBBxHHhhI")  # tc_u32_sel, and one tc_u32_key after it
_U32_KEY = struct.Struct("=IIii")
_U32_TERMINAL = 1
_MIRRED = struct.Struct("=IIiiiiI")
_TICK_NS = 64  # PSCHED_SHIFT in include/net/pkt_sched.h

#: Our root qdisc has it as its handle (6e70:), our redirect as its priority; the guard comes before.
OURS = 0x6E70
_GUARD, _GUARD_HANDLE = OURS - 1, 1


@dataclass(frozen=True)
class Tbf:
    """A token bucket (tc-tbf(8)): what leaves has this rate, and no more than ``limit`` waits.

    One object that says all. htb would be a qdisc, a class and a leaf for the same, and what it can
    do beyond, to lend what one class does not use to another, one rate for one NIC has no use for.
    """

    rate: int  # bytes a second
    burst_ns: int  # what may leave at once, as the time it takes at this rate
    limit: int  # bytes
    overhead: int = 0
    peak: int = 0

    @classmethod
    def of(cls, kbps: int, frame: int) -> Tbf:
        """The bucket for a rate in kbit/s and the longest frame, all of it, in bytes.

        It is filled by the clock of the kernel, which on some kernels ticks each 10 ms (CONFIG_HZ
        100): so much must fit, or the rate is not reached; and one frame, or none leaves. From about
        50 Mbit/s on, that is more than the 64 KiB of a TSO frame, which then need not be cut up.
        Half a second of 10 ms buckets would be delay and not rate: what waits is 50 ms, ten frames at
        least.
        """
        rate = kbps * 1000 // 8
        burst = max(_FILL_NS, -(-frame * 10**9 // rate))
        # A tick more, for what is lost when the kernel counts bytes from ticks.
        ticks = burst // _TICK_NS + 2
        limit = max(rate * _WAIT_MS // 1000, 10 * frame)
        return cls(rate, ticks * _TICK_NS, min(limit, 0xFFFFFFFF))

    @property
    def kbps(self) -> int:
        return self.rate * 8 // 1000


_FILL_NS, _WAIT_MS = 10_000_000, 50


@dataclass(frozen=True)
class Queueing:
    """What of this is on one device. ``redirect`` is the index of the device that what enters turns
    to; 0 if that is gone. ``guard`` decides what may enter at all."""

    root: Tbf | None = None
    redirect: int | None = None
    guard: Program | None = None


class Tc:
    """The qdiscs of the devices of the network namespace that the calling thread is in."""

    def read(self, index: int, root_kind: str) -> Queueing:
        """Of one device, with what the device itself says of the kind of its root qdisc.

        Raises: HostError, OperationTimeout.
        """
        root = self._get(index, _ROOT) if root_kind == "tbf" else None
        ingress = self._get(index, _INGRESS)
        return self._queueing(index, _tbf(root) if root else None, ingress is not None)

    def read_all(self) -> Mapping[int, Queueing]:
        """Of all devices that have any, by index. Raises: HostError, OperationTimeout."""
        with words("list-qdiscs", "qdiscs"):
            found = netlink.dump(_GETQDISC, TCMSG.pack(0, 0, 0, 0, 0))
        roots: dict[int, Tbf | None] = {}
        entered: set[int] = set()
        for payload in found:
            _, index, _, parent, _ = TCMSG.unpack_from(payload)
            if parent == _INGRESS:
                entered.add(index)
            elif parent == _ROOT and (root := _tbf(payload)) is not None:
                roots[index] = root
        return {
            index: self._queueing(index, roots.get(index), index in entered)
            for index in {*roots, *entered}
        }

    def set_root(self, index: int, tbf: Tbf) -> None:
        """Set the rate; one that is there changes in place and keeps what waits.

        Raises: HostError, OperationTimeout.
        """
        there = self._get(index, _ROOT)
        if there is not None and _handle(there) == OURS and _tbf(there) is None:
            self.delete_root(index)  # another kind under our handle: the kernel cannot change that
        body = TCMSG.pack(0, index, OURS << 16, _ROOT, 0) + attribute(_KIND, b"tbf\0")
        with words("set-rate", f"device {index}"):
            netlink.ask(_NEWQDISC, body + attribute(_OPTIONS, *_parameters(tbf)), netlink.REPLACE)

    def delete_root(self, index: int) -> None:
        """Raises: HostError, OperationTimeout."""
        with _gone("remove-rate", index):
            netlink.ask(DELQDISC, TCMSG.pack(0, index, OURS << 16, _ROOT, 0))

    def set_redirect(self, index: int, to: int) -> None:
        """Whatever enters the device leaves the other one first, for its qdisc's sake.

        Raises: HostError, OperationTimeout.
        """
        with words("set-redirect", f"device {index}"):
            self._make_ingress(index)
            self._delete_filter(index, OURS)
            body = TCMSG.pack(0, index, 0, _INGRESS_FILTERS, _info(OURS))
            body += attribute(_KIND, b"u32\0") + attribute(_OPTIONS, *_match_all(to))
            netlink.ask(_NEWFILTER, body, netlink.EXCLUSIVE)

    def delete_redirect(self, index: int) -> None:
        """The qdisc goes too, unless somebody else has filters there.

        Raises: HostError, OperationTimeout.
        """
        self._delete_filter(index, OURS)
        ingress = self._get(index, _INGRESS)
        if ingress is not None and not self._filters(index) and _kind(ingress) == "ingress":
            with _gone("remove-redirect", index):
                netlink.ask(DELQDISC, TCMSG.pack(0, index, _INGRESS_HANDLE, _INGRESS, 0))

    def set_guard(self, index: int, program: Program) -> None:
        """The program decides what enters the device, before any redirect; one that is there is
        replaced at one moment (``cls_bpf_change`` in net/sched/cls_bpf.c).

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        body = TCMSG.pack(0, index, _GUARD_HANDLE, _INGRESS_FILTERS, _info(_GUARD))
        body += attribute(_KIND, b"bpf\0") + attribute(_OPTIONS, *_direct_action(program))
        with words("set-guard", f"device {index}"):
            self._make_ingress(index)
            try:
                netlink.ask(_NEWFILTER, body, netlink.REPLACE)
            except OSError as refused:
                if refused.errno == errno.ENOENT:
                    raise _no_classifier(refused) from refused
                if refused.errno != errno.EINVAL:
                    raise
                # A filter of another kind has our priority.
                self._delete_filter(index, _GUARD)
                netlink.ask(_NEWFILTER, body, netlink.REPLACE)

    def _make_ingress(self, index: int) -> None:
        """The qdisc that filters of what enters hang at; clsact serves as well."""
        if self._get(index, _INGRESS) is None:
            body = TCMSG.pack(0, index, _INGRESS_HANDLE, _INGRESS, 0)
            netlink.ask(_NEWQDISC, body + attribute(_KIND, b"ingress\0"), netlink.EXCLUSIVE)

    def _delete_filter(self, index: int, priority: int) -> None:
        with _gone("remove-filter", index):
            netlink.ask(DELFILTER, TCMSG.pack(0, index, 0, _INGRESS_FILTERS, _info(priority)))

    def _get(self, index: int, parent: int) -> bytes | None:
        """One qdisc; None for one that only stands for there being none."""
        with _gone("read-qdisc", index):
            found = netlink.ask(_GETQDISC, TCMSG.pack(0, index, 0, parent, 0), netlink.ECHO)
            return found[0] if found else None
        return None

    def _filters(self, index: int) -> list[bytes]:
        with words("list-filters", f"device {index}"):
            return netlink.dump(_GETFILTER, TCMSG.pack(0, index, 0, _INGRESS_FILTERS, 0))

    def _queueing(self, index: int, root: Tbf | None, entered: bool) -> Queueing:
        filters = self._filters(index) if entered else []
        return Queueing(root, _redirect(filters), _guard(filters))


@contextlib.contextmanager
def _gone(step: str, index: int) -> Iterator[None]:
    """What is not there, device or qdisc, need not be read or removed."""
    with words(step, f"device {index}"):
        try:
            yield
        except OSError as refused:
            # EINVAL: the device's built-in qdisc, or a filter where there is no such qdisc.
            if refused.errno not in (errno.ENOENT, errno.EINVAL, errno.ENODEV):
                raise


def _info(priority: int) -> int:
    """Priority and protocol of a filter (``tcm_info``)."""
    return priority << 16 | socket.htons(_ALL_PROTOCOLS)


def _no_classifier(refused: OSError) -> BackendUnavailable:
    return BackendUnavailable(
        f"the kernel has no BPF filters in tc: {refused.strerror}", step="set-guard",
        fix="modprobe cls_bpf",
    )  # fmt: skip


def _redirect(filters: Iterable[bytes]) -> int | None:
    ours = [p for p in filters if TCMSG.unpack_from(p)[4] == _info(OURS)]
    targets = [to for p in ours if (to := _target(p)) is not None]
    return targets[0] if len(targets) == 1 else None


def _guard(filters: Iterable[bytes]) -> Program | None:
    """The one program at our priority that decides by itself; None for anything else."""
    ours = [p for p in filters if TCMSG.unpack_from(p)[4] == _info(_GUARD)]
    programs = [program for p in ours if (program := _program(p)) is not None]
    return programs[0] if len(programs) == 1 else None


def _program(payload: bytes) -> Program | None:
    found = dict(attributes(payload, TCMSG.size))
    options = dict(attributes(found.get(_OPTIONS, b"")))
    direct = number(options.get(_BPF_FLAGS)) & _BPF_DIRECT_ACTION
    if text(found.get(_KIND)) != "bpf" or not direct or _BPF_OPS not in options:
        return None
    return Program(options[_BPF_OPS])


def _direct_action(program: Program) -> list[bytes]:
    return [
        attribute(_BPF_OPS_LEN, struct.pack("=H", program.length)),
        attribute(_BPF_OPS, program.code),
        attribute(_BPF_FLAGS, struct.pack("=I", _BPF_DIRECT_ACTION)),
    ]


def _kind(payload: bytes) -> str:
    return text(dict(attributes(payload, TCMSG.size)).get(_KIND))


def _handle(payload: bytes) -> int:
    return int(TCMSG.unpack_from(payload)[2]) >> 16


def _tbf(payload: bytes) -> Tbf | None:
    """Our own; None for any other."""
    found = dict(attributes(payload, TCMSG.size))
    if _handle(payload) != OURS or text(found.get(_KIND)) != "tbf":
        return None
    options = dict(attributes(found.get(_OPTIONS, b"")))
    parameters = options[_TBF_PARMS]
    _, _, overhead, _, _, rate = _RATE.unpack_from(parameters)
    peak = _RATE.unpack_from(parameters, _RATE.size)[-1]
    limit, ticks, _ = _SIZES.unpack_from(parameters, 2 * _RATE.size)
    rate = number(options.get(_TBF_RATE64)) or rate
    return Tbf(rate, ticks * _TICK_NS, limit, overhead, peak)


def _parameters(tbf: Tbf) -> list[bytes]:
    rate = _RATE.pack(0, _ETHERNET, tbf.overhead, 0, 0, min(tbf.rate, 0xFFFFFFFF))
    sizes = _SIZES.pack(tbf.limit, tbf.burst_ns // _TICK_NS, 0)
    parts = [attribute(_TBF_PARMS, rate, bytes(_RATE.size), sizes)]
    if tbf.rate > 0xFFFFFFFF:
        parts.append(attribute(_TBF_RATE64, struct.pack("=Q", tbf.rate)))
    return parts


def _match_all(to: int) -> list[bytes]:
    selector = _U32.pack(_U32_TERMINAL, 0, 1, 0, 0, 0, 0, 0) + _U32_KEY.pack(0, 0, 0, 0)
    mirred = _MIRRED.pack(0, 0, _STOLEN, 0, 0, _EGRESS_REDIRECT, to)
    action = attribute(
        1,
        attribute(_ACT_KIND, b"mirred\0"),
        attribute(_ACT_OPTIONS, attribute(_MIRRED_PARMS, mirred)),
    )
    return [attribute(_U32_SEL, selector), attribute(_U32_ACT, action)]


def _target(payload: bytes) -> int | None:
    """Where a filter of ours turns everything to; None for what is not such a filter."""
    options = dict(attributes(dict(attributes(payload, TCMSG.size)).get(_OPTIONS, b"")))
    selector = options.get(_U32_SEL, b"")
    actions = dict(attributes(options.get(_U32_ACT, b"")))
    if len(selector) < _U32.size + _U32_KEY.size or len(actions) != 1:
        return None
    mask = _U32_KEY.unpack_from(selector, _U32.size)[0]
    action = dict(attributes(next(iter(actions.values()))))
    mirred = dict(attributes(action.get(_ACT_OPTIONS, b""))).get(_MIRRED_PARMS)
    if text(action.get(_ACT_KIND)) != "mirred" or mirred is None or mask != 0:
        return None
    _, _, verdict, _, _, direction, to = _MIRRED.unpack_from(mirred)
    return int(to) if (verdict, direction) == (_STOLEN, _EGRESS_REDIRECT) else None
