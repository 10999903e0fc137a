"""tc over netlink: egress rate (tbf), ingress filter (cls_bpf), ingress redirect to an ifb.

Reading one port takes one or two requests, instead of a dump of the qdiscs of all devices.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from netplugin.api.errors import BackendUnavailable
from netplugin.host import netlink, offload_guard
from netplugin.host.cbpf import BpfProgram
from netplugin.host.links import words
from netplugin.host.netlink import Rtnetlink, attribute, attributes, number, text

# include/uapi/linux: rtnetlink.h, pkt_sched.h, pkt_cls.h, if_ether.h, tc_act/tc_mirred.h
_NEWQDISC, DELQDISC, _GETQDISC = 36, 37, 38
_NEWFILTER, DELFILTER, _GETFILTER = 44, 45, 46
_ROOT, _INGRESS, _INGRESS_HANDLE = 0xFFFFFFFF, 0xFFFFFFF1, 0xFFFF0000
_INGRESS_FILTERS = 0xFFFFFFF2  # the same for an ingress qdisc and clsact
_EGRESS_FILTERS = 0xFFFFFFF3  # of clsact
_KIND, _OPTIONS = 1, 2
_TBF_PARMS, _TBF_RATE64 = 1, 4
_U32_SEL, _U32_ACT = 5, 7
_BPF_OPS_LEN, _BPF_OPS, _BPF_FD, _BPF_NAME, _BPF_FLAGS, _BPF_DIRECT_ACTION = 4, 5, 6, 7, 8, 1
_ACT_KIND, _ACT_OPTIONS, _MIRRED_PARMS = 1, 2, 2
_EGRESS_REDIRECT, _STOLEN = 1, 4
_ETHERNET = 1
_ALL_PROTOCOLS = 0x0003
TCMSG = struct.Struct("=BxxxiIII")
_RATE = struct.Struct("=BBHhHI")
_SIZES = struct.Struct("=III")
_U32 = struct.Struct("=BBBxHHhhI")  # tc_u32_sel, followed by one tc_u32_key
_U32_KEY = struct.Struct("=IIii")
_U32_TERMINAL = 1
_MIRRED = struct.Struct("=IIiiiiI")
_TICK_NS = 64  # PSCHED_SHIFT in include/net/pkt_sched.h

#: Handle of our root qdisc (6e70:) and priority of our redirect. Those of the guards are lower, so they
#: run first.
OURS = 0x6E70
_OFFLOADS, _GUARD, _GUARD_HANDLE = OURS - 2, OURS - 1, 1


@dataclass(frozen=True)
class Tbf:
    """A token bucket filter (tc-tbf(8)): egress ``rate``, and ``limit`` of its queue.

    htb would need a qdisc, a class and a leaf for the same. Its advantage, classes that borrow
    bandwidth from each other, is of no use for one rate per NIC.
    """

    rate: int  # bytes/s
    burst_ns: int  # burst as its duration at this rate
    limit: int  # bytes
    overhead: int = 0
    peak: int = 0

    @classmethod
    def of(cls, kbps: int, frame: int) -> Tbf:
        """The bucket for a rate in kbit/s and the largest frame in bytes, with all headers.

        The kernel's clock refills the bucket, on some kernels (CONFIG_HZ=100) only every 10 ms. So
        the bucket holds 10 ms of traffic, or the rate is not reached, and at least one frame, or
        none is ever sent. From about 50 Mbit/s on, it exceeds the 64 KiB of a TSO frame, which then
        need not be segmented. A longer queue would add delay and no throughput: the limit is 50 ms
        of traffic, and at least ten frames.
        """
        rate = kbps * 1000 // 8
        burst = max(_FILL_NS, -(-frame * 10**9 // rate))
        # Extra ticks, because the kernel rounds down when it converts ticks to bytes.
        ticks = burst // _TICK_NS + 2
        limit = max(rate * _WAIT_MS // 1000, 10 * frame)
        return cls(rate, ticks * _TICK_NS, min(limit, 0xFFFFFFFF))

    @property
    def kbps(self) -> int:
        """The rate in kbit/s."""
        return self.rate * 8 // 1000


_FILL_NS, _WAIT_MS = 10_000_000, 50


@dataclass(frozen=True)
class Queueing:
    """Our tc objects on one device. ``guard`` filters ingress traffic before the redirect; it counts only
    together with the guard of offloads (``netplugin.host.offload_guard``).

    ``redirect`` is the index of the device that ingress traffic goes to; 0 if it no longer exists.
    """

    root: Tbf | None = None
    redirect: int | None = None
    guard: BpfProgram | None = None


class Tc:
    """tc on the devices in the network namespace of the calling thread."""

    def __init__(self) -> None:
        self._kernel = Rtnetlink()

    def read(self, index: int, root_kind: str) -> Queueing:
        """Read one device. ``root_kind`` is the kind of its root qdisc as reported by the device.

        Raises: HostError, OperationTimeout.
        """
        root = self._get(index, _ROOT) if root_kind == "tbf" else None
        ingress = self._get(index, _INGRESS)
        return self._queueing(index, _tbf(root) if root else None, ingress is not None)

    def read_all(self) -> Mapping[int, Queueing]:
        """Read all devices that have any of these, by index. Raises: HostError, OperationTimeout."""
        with words("list-qdiscs", "qdiscs"):
            found = self._kernel.dump(_GETQDISC, TCMSG.pack(0, 0, 0, 0, 0))
        roots: dict[int, Tbf | None] = {}
        entered: set[int] = set()
        for payload in found:
            _, index, _, parent, _ = TCMSG.unpack_from(payload)
            if parent == _INGRESS:
                entered.add(index)
            elif parent == _ROOT and (root := _tbf(payload)) is not None:
                roots[index] = root
        return {
            index: self._queueing(index, roots.get(index), index in entered) for index in {*roots, *entered}
        }

    def is_filtered(self, index: int) -> bool:
        """Whether a device has filters where frames come in or go out, which we set on no uplink.

        Raises: HostError, OperationTimeout.
        """
        if self._get(index, _INGRESS) is None:
            return False
        with _gone("list-filters", index):
            places = (_INGRESS_FILTERS, _EGRESS_FILTERS)
            return any(self._kernel.dump(_GETFILTER, TCMSG.pack(0, index, 0, at, 0)) for at in places)
        return False

    def set_root(self, index: int, tbf: Tbf) -> None:
        """Set the egress rate. An existing tbf is changed in place and keeps its queue.

        Raises: HostError, OperationTimeout.
        """
        there = self._get(index, _ROOT)
        if there is not None and _handle(there) == OURS and _tbf(there) is None:
            self.delete_root(index)  # another kind has our handle; the kernel cannot change it
        body = TCMSG.pack(0, index, OURS << 16, _ROOT, 0) + attribute(_KIND, b"tbf\0")
        with words("set-rate", f"device {index}"):
            self._kernel.ask(_NEWQDISC, body + attribute(_OPTIONS, *_parameters(tbf)), netlink.REPLACE)

    def delete_root(self, index: int) -> None:
        """Remove the egress rate. Raises: HostError, OperationTimeout."""
        with _gone("remove-rate", index):
            self._kernel.ask(DELQDISC, TCMSG.pack(0, index, OURS << 16, _ROOT, 0))

    def set_redirect(self, index: int, to: int) -> None:
        """Redirect all ingress traffic to the egress of device ``to``, whose qdisc shapes it.

        Raises: HostError, OperationTimeout.
        """
        with words("set-redirect", f"device {index}"):
            self._make_ingress(index)
            self._delete_filter(index, OURS)
            body = TCMSG.pack(0, index, 0, _INGRESS_FILTERS, _info(OURS))
            body += attribute(_KIND, b"u32\0") + attribute(_OPTIONS, *_match_all(to))
            self._kernel.ask(_NEWFILTER, body, netlink.EXCLUSIVE)

    def delete_redirect(self, index: int) -> None:
        """Remove the redirect, and the ingress qdisc unless it has other filters.

        Raises: HostError, OperationTimeout.
        """
        self._remove_from_ingress(index, OURS)

    def delete_guard(self, index: int) -> None:
        """Remove the program and the guard of offloads, and the ingress qdisc unless it has other filters.

        Raises: HostError, OperationTimeout.
        """
        self._remove_from_ingress(index, _OFFLOADS, _GUARD)

    def _remove_from_ingress(self, index: int, *priorities: int) -> None:
        for priority in priorities:
            self._delete_filter(index, priority)
        ingress = self._get(index, _INGRESS)
        if ingress is not None and not self._filters(index) and _kind(ingress) == "ingress":
            with _gone("remove-ingress", index):
                self._kernel.ask(DELQDISC, TCMSG.pack(0, index, _INGRESS_HANDLE, _INGRESS, 0))

    def set_guard(self, index: int, program: BpfProgram) -> None:
        """Install a program that filters ingress traffic before any redirect, behind the guard of offloads.

        An existing program is replaced atomically (``cls_bpf_change`` in net/sched/cls_bpf.c).

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        with words("set-guard", f"device {index}"):
            self._make_ingress(index)
            self._set_program(index, _OFFLOADS, _loaded())
            self._set_program(index, _GUARD, _direct_action(program))

    def _set_program(self, index: int, priority: int, options: Iterable[bytes]) -> None:
        body = TCMSG.pack(0, index, _GUARD_HANDLE, _INGRESS_FILTERS, _info(priority))
        body += attribute(_KIND, b"bpf\0") + attribute(_OPTIONS, *options)
        try:
            self._kernel.ask(_NEWFILTER, body, netlink.REPLACE)
        except OSError as refused:
            if refused.errno == errno.ENOENT:
                raise _no_classifier(refused) from refused
            if refused.errno != errno.EINVAL:
                raise
            # A filter of another kind has our priority.
            self._delete_filter(index, priority)
            self._kernel.ask(_NEWFILTER, body, netlink.REPLACE)

    def _make_ingress(self, index: int) -> None:
        """Create the qdisc that ingress filters are attached to, unless there is one (or clsact)."""
        if self._get(index, _INGRESS) is None:
            body = TCMSG.pack(0, index, _INGRESS_HANDLE, _INGRESS, 0)
            self._kernel.ask(_NEWQDISC, body + attribute(_KIND, b"ingress\0"), netlink.EXCLUSIVE)

    def _delete_filter(self, index: int, priority: int) -> None:
        with _gone("remove-filter", index):
            self._kernel.ask(DELFILTER, TCMSG.pack(0, index, 0, _INGRESS_FILTERS, _info(priority)))

    def _get(self, index: int, parent: int) -> bytes | None:
        """One qdisc; None if there is none or only a placeholder."""
        with _gone("read-qdisc", index):
            found = self._kernel.ask(_GETQDISC, TCMSG.pack(0, index, 0, parent, 0), netlink.ECHO)
            return found[0] if found else None
        return None

    def _filters(self, index: int) -> list[bytes]:
        with words("list-filters", f"device {index}"):
            return self._kernel.dump(_GETFILTER, TCMSG.pack(0, index, 0, _INGRESS_FILTERS, 0))

    def _queueing(self, index: int, root: Tbf | None, entered: bool) -> Queueing:
        filters = self._filters(index) if entered else []
        return Queueing(root, _redirect(filters), _guard(filters))


@contextlib.contextmanager
def _gone(step: str, index: int) -> Iterator[None]:
    """Ignore errors about a device, qdisc or filter that does not exist."""
    with words(step, f"device {index}"):
        try:
            yield
        except OSError as refused:
            # EINVAL: the device's built-in qdisc, or a filter without its qdisc.
            if refused.errno not in (errno.ENOENT, errno.EINVAL, errno.ENODEV):
                raise


def _info(priority: int) -> int:
    """Priority and protocol of a filter (``tcm_info``)."""
    return priority << 16 | socket.htons(_ALL_PROTOCOLS)


def _no_classifier(refused: OSError) -> BackendUnavailable:
    return BackendUnavailable(
        f"the kernel has no BPF filters in tc: {refused.strerror}",
        step="set-guard",
        fix="modprobe cls_bpf",
    )


def _redirect(filters: Iterable[bytes]) -> int | None:
    ours = [p for p in filters if TCMSG.unpack_from(p)[4] == _info(OURS)]
    targets = [to for p in ours if (to := _target(p)) is not None]
    return targets[0] if len(targets) == 1 else None


def _guard(filters: Sequence[bytes]) -> BpfProgram | None:
    """The only direct-action program at our priority, behind the guard of offloads; None otherwise."""
    options = {priority: _programs(filters, priority) for priority in (_OFFLOADS, _GUARD)}
    offloads = [text(each.get(_BPF_NAME)) for each in options[_OFFLOADS]]
    programs = [BpfProgram(each[_BPF_OPS]) for each in options[_GUARD] if _BPF_OPS in each]
    return programs[0] if len(programs) == 1 and offloads == [offload_guard.NAME] else None


def _programs(filters: Iterable[bytes], priority: int) -> list[dict[int, bytes]]:
    """The options of the direct-action programs at a priority."""
    found = [dict(attributes(p, TCMSG.size)) for p in filters if TCMSG.unpack_from(p)[4] == _info(priority)]
    programs = [dict(attributes(p.get(_OPTIONS, b""))) for p in found if text(p.get(_KIND)) == "bpf"]
    return [each for each in programs if number(each.get(_BPF_FLAGS)) & _BPF_DIRECT_ACTION]


def _direct_action(program: BpfProgram) -> list[bytes]:
    return [
        attribute(_BPF_OPS_LEN, struct.pack("=H", program.length)),
        attribute(_BPF_OPS, program.code),
        attribute(_BPF_FLAGS, struct.pack("=I", _BPF_DIRECT_ACTION)),
    ]


def _loaded() -> list[bytes]:
    """The options of the guard of offloads. Raises: BackendUnavailable, OSError."""
    try:
        program = offload_guard.program()
    except (OSError, ValueError, KeyError) as refused:
        raise BackendUnavailable(
            f"the kernel does not load the guard of offloads: {refused}",
            step="set-guard",
            fix="let the agent have CAP_BPF, CAP_PERFMON and the bpf system call, as its systemd unit does; "
            "the kernel needs CONFIG_BPF_SYSCALL and CONFIG_DEBUG_INFO_BTF",
        ) from refused
    return [
        attribute(_BPF_FD, struct.pack("=I", program)),
        attribute(_BPF_NAME, offload_guard.NAME.encode() + b"\0"),
        attribute(_BPF_FLAGS, struct.pack("=I", _BPF_DIRECT_ACTION)),
    ]


def _kind(payload: bytes) -> str:
    return text(dict(attributes(payload, TCMSG.size)).get(_KIND))


def _handle(payload: bytes) -> int:
    return int(TCMSG.unpack_from(payload)[2]) >> 16


def _tbf(payload: bytes) -> Tbf | None:
    """Parse our tbf; None for any other qdisc."""
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
    """The target of our redirect of all traffic; None for any other filter."""
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
