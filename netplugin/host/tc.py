"""tc over netlink: egress rate (tbf), ingress filter (cls_bpf), ingress redirect to an ifb.

Reading one port takes one or two requests, instead of a dump of the qdiscs of all devices.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyroute2.netlink import NLM_F_ECHO, rtnl
from pyroute2.netlink.rtnl.tcmsg import act_mirred, plugins, tcmsg
from pyroute2.netlink.rtnl.tcmsg.common import stats2
from pyroute2.protocols import ETH_P_ALL

from netplugin.api.errors import BackendUnavailable
from netplugin.host import offload_guard
from netplugin.host.cbpf import BpfProgram
from netplugin.host.links import words
from netplugin.host.netlink import ignored
from netplugin.host.rtnetlink import CREATE, DO, DUMP, REPLACE, Rtnetlink, nest
from netplugin.host.rtnetlink_messages import Attributes, Message

# include/uapi/linux: pkt_sched.h, pkt_cls.h, if_ether.h, tc_act/tc_mirred.h
_INGRESS_FILTERS = 0xFFFFFFF2  # the same for an ingress qdisc and clsact
_INGRESS = {"handle": 0xFFFF0000, "parent": rtnl.TC_H_INGRESS}
_EGRESS_FILTERS = 0xFFFFFFF3  # of clsact
_BPF_DIRECT_ACTION = 1
_EGRESS_REDIRECT, _STOLEN = 1, 4
_ETHERNET = 1
_MOST = 0xFFFFFFFF
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

        The kernel's clock refills the bucket, on some kernels (CONFIG_HZ=100) only every 10 ms. So the bucket
        holds 10 ms of traffic, or the rate is not reached, and at least one frame, or none is ever sent. From
        about 50 Mbit/s on, it exceeds the 64 KiB of a TSO frame, which then need not be segmented. A longer
        queue would add delay and no throughput: the limit is 50 ms of traffic, and at least ten frames.
        """
        rate = kbps * 1000 // 8
        burst = max(_FILL_NS, -(-frame * 10**9 // rate))
        # Extra ticks, because the kernel rounds down when it converts ticks to bytes.
        ticks = burst // _TICK_NS + 2
        limit = max(rate * _WAIT_MS // 1000, 10 * frame)
        return cls(rate, ticks * _TICK_NS, min(limit, _MOST))

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


@dataclass(frozen=True, slots=True)
class QdiscDrops:
    """What the qdiscs of a device have dropped: its own tbf, and the one that has its ingress filters."""

    bucket: int | None = None
    ingress: int | None = None


class Tc:
    """tc on the devices in the network namespace of the calling thread.

    All methods raise HostError and OperationTimeout, besides what they name.
    """

    def __init__(self) -> None:
        self._kernel = Rtnetlink()

    def read(self, index: int, root_kind: str) -> Queueing:
        """Read one device. ``root_kind`` is the kind of its root qdisc as reported by the device."""
        root = self._get(index, rtnl.TC_H_ROOT) if root_kind == "tbf" else None
        return self._queueing(index, root, self._get(index, rtnl.TC_H_INGRESS))

    def read_all(self) -> Mapping[int, Queueing]:
        """Read all devices that have a qdisc, by index.

        By one list, because a request for one of them may be answered to all listeners (``_get``): our own
        would lose events of links when it gets as many at once.
        """
        with words("list-qdiscs", "qdiscs"):
            found = self._kernel.ask(rtnl.RTM_GETQDISC, tcmsg(), DUMP)
        at = {(qdisc["index"], qdisc["parent"]): qdisc for qdisc in found}
        return {
            index: self._queueing(index, at.get((index, rtnl.TC_H_ROOT)), at.get((index, rtnl.TC_H_INGRESS)))
            for index in {index for index, _ in at}
        }

    def drops(self) -> Mapping[int, QdiscDrops]:
        """What the qdiscs of all devices have dropped, by index; that of a filter counts in its qdisc."""
        with words("list-qdiscs", "qdiscs"):
            listed = self._kernel.ask(rtnl.RTM_GETQDISC, tcmsg(), DUMP)
        drops: dict[tuple[int, int], int] = {}
        for qdisc in listed:
            if qdisc["parent"] == rtnl.TC_H_INGRESS or qdisc["handle"] == OURS << 16:
                counted = qdisc.attributes.nest_as("TCA_STATS2", stats2).fields("TCA_STATS_QUEUE")
                drops[qdisc["index"], qdisc["parent"]] = int(counted.get("drops", 0))
        return {
            index: QdiscDrops(drops.get((index, rtnl.TC_H_ROOT)), drops.get((index, rtnl.TC_H_INGRESS)))
            for index, _ in drops
        }

    def is_filtered(self, index: int) -> bool:
        """Whether a device has filters where frames come in or go out, which we set on no uplink."""
        if self._get(index, rtnl.TC_H_INGRESS) is None:
            return False
        with _gone("list-filters", index):
            return any(self._filters(index, at) for at in (_INGRESS_FILTERS, _EGRESS_FILTERS))
        return False

    def set_root(self, index: int, tbf: Tbf) -> None:
        """Set the egress rate. An existing tbf is changed in place and keeps its queue."""
        there = self._get(index, rtnl.TC_H_ROOT)
        if there is not None and there["handle"] == OURS << 16 and _tbf(there) is None:
            self.delete_root(index)  # another kind has our handle; the kernel cannot change it
        parameters = {
            "rate": min(tbf.rate, _MOST),
            "rate___reserved": _ETHERNET,  # its link layer
            "rate_overhead": tbf.overhead,
            "limit": tbf.limit,
            "buffer": tbf.burst_ns // _TICK_NS,
        }
        options = [("TCA_TBF_PARMS", parameters), *[("TCA_TBF_RATE64", tbf.rate)] * (tbf.rate > _MOST)]
        with words("set-rate", f"device {index}"):
            place = {"handle": OURS << 16, "parent": rtnl.TC_H_ROOT}
            self._ask(rtnl.RTM_NEWQDISC, REPLACE, index, **place, **_made("tbf", nest(options)))

    def delete_root(self, index: int) -> None:
        """Remove the egress rate."""
        with _gone("remove-rate", index):
            self._ask(rtnl.RTM_DELQDISC, DO, index, handle=OURS << 16, parent=rtnl.TC_H_ROOT)

    def set_redirect(self, index: int, to: int) -> None:
        """Redirect all ingress traffic to the egress of device ``to``, whose qdisc shapes it."""
        action = {"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": to}
        all_of_it = plugins["u32"].get_parameters({"keys": ["0/0+0"], "target": 0, "action": action})
        with words("set-redirect", f"device {index}"):
            self._make_ingress(index)
            self._delete_filter(index, OURS)
            place = {"parent": _INGRESS_FILTERS, "info": _info(OURS)}
            self._ask(rtnl.RTM_NEWTFILTER, CREATE, index, **place, **_made("u32", all_of_it))

    def delete_redirect(self, index: int) -> None:
        """Remove the redirect, and the ingress qdisc unless it has other filters."""
        self._remove_from_ingress(index, OURS)

    def delete_guard(self, index: int) -> None:
        """Remove the program and the guard of offloads, and the ingress qdisc unless it has other filters."""
        self._remove_from_ingress(index, _OFFLOADS, _GUARD)

    def _remove_from_ingress(self, index: int, *priorities: int) -> None:
        for priority in priorities:
            self._delete_filter(index, priority)
        ingress = self._get(index, rtnl.TC_H_INGRESS)
        if ingress is None or self._filters(index):
            return
        if ingress.attributes.text("TCA_KIND") == "ingress":
            with _gone("remove-ingress", index):
                self._ask(rtnl.RTM_DELQDISC, DO, index, **_INGRESS)

    def set_guard(self, index: int, program: BpfProgram) -> None:
        """Install a program that filters ingress traffic before any redirect, behind the guard of offloads.

        An existing program is replaced atomically (``cls_bpf_change`` in net/sched/cls_bpf.c).

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        with words("set-guard", f"device {index}"):
            self._make_ingress(index)
            loaded = [("TCA_BPF_FD", _loaded()), ("TCA_BPF_NAME", offload_guard.NAME)]
            self._set_program(index, _OFFLOADS, loaded)
            classic = [("TCA_BPF_OPS_LEN", program.length), ("TCA_BPF_OPS", program.code)]
            self._set_program(index, _GUARD, classic)

    def _set_program(self, index: int, priority: int, program: list[tuple[str, Any]]) -> None:
        place = {"handle": _GUARD_HANDLE, "parent": _INGRESS_FILTERS, "info": _info(priority)}
        options = _made("bpf", nest([*program, ("TCA_BPF_FLAGS", _BPF_DIRECT_ACTION)]))
        try:
            self._ask(rtnl.RTM_NEWTFILTER, REPLACE, index, **place, **options)
        except OSError as refused:
            if refused.errno == errno.ENOENT:
                what = f"the kernel has no BPF filters in tc: {refused.strerror}"
                raise BackendUnavailable(what, step="set-guard", fix="modprobe cls_bpf") from refused
            if refused.errno != errno.EINVAL:
                raise
            # A filter of another kind has our priority.
            self._delete_filter(index, priority)
            self._ask(rtnl.RTM_NEWTFILTER, REPLACE, index, **place, **options)

    def _make_ingress(self, index: int) -> None:
        """Create the qdisc that ingress filters are attached to, unless there is one (or clsact)."""
        if self._get(index, rtnl.TC_H_INGRESS) is None:
            self._ask(rtnl.RTM_NEWQDISC, CREATE, index, **_INGRESS, **nest([("TCA_KIND", "ingress")]))

    def _delete_filter(self, index: int, priority: int) -> None:
        with _gone("remove-filter", index):
            self._ask(rtnl.RTM_DELTFILTER, DO, index, parent=_INGRESS_FILTERS, info=_info(priority))

    def _get(self, index: int, parent: int) -> Message | None:
        """One qdisc; None if there is none or only a placeholder.

        The kernel may answer by a notification to all listeners, and sends it to the requester only with
        NLM_F_ECHO (``qdisc_notify`` in net/sched/sch_api.c).
        """
        with _gone("read-qdisc", index):
            found = self._ask(rtnl.RTM_GETQDISC, DO | NLM_F_ECHO, index, parent=parent)
            return found[0] if found else None
        return None

    def _filters(self, index: int, parent: int = _INGRESS_FILTERS) -> list[Message]:
        with words("list-filters", f"device {index}"):
            return self._ask(rtnl.RTM_GETTFILTER, DUMP, index, parent=parent)

    def _queueing(self, index: int, root: Message | None, ingress: Message | None) -> Queueing:
        filters = self._filters(index) if ingress else []
        return Queueing(_tbf(root) if root else None, _redirect(filters), _guard(filters))

    def _ask(self, kind: int, flags: int, index: int, **values: Any) -> list[Message]:
        """Send a request: fields of struct tcmsg, and attributes. Raises: OSError, TimeoutError."""
        return self._kernel.ask(kind, tcmsg().load({"index": index, **values}), flags)


def _made(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a qdisc or filter to make."""
    return nest([("TCA_KIND", kind), ("TCA_OPTIONS", options)])


@contextlib.contextmanager
def _gone(step: str, index: int) -> Iterator[None]:
    """Ignore errors about a device, qdisc or filter that does not exist."""
    # EINVAL: the device's built-in qdisc, or a filter without its qdisc.
    with words(step, f"device {index}"), ignored(errno.ENOENT, errno.EINVAL, errno.ENODEV):
        yield


def _info(priority: int) -> int:
    """Priority and protocol of a filter (``tcm_info``)."""
    return priority << 16 | socket.htons(ETH_P_ALL)


def _kind_and_options(found: Message) -> tuple[str, Attributes]:
    """The kind of a qdisc or filter, and its options, whose names depend on it."""
    kind = found.attributes.text("TCA_KIND")
    return kind, found.attributes.nest_as("TCA_OPTIONS", getattr(plugins.get(kind), "options", None))


def _redirect(filters: Iterable[Message]) -> int | None:
    """The target of our only redirect of all traffic; None otherwise."""
    targets = [to for each in filters if each["info"] == _info(OURS) and (to := _target(each)) is not None]
    return targets[0] if len(targets) == 1 else None


def _target(found: Message) -> int | None:
    """The target of our redirect of all traffic; None for any other filter."""
    _, options = _kind_and_options(found)
    keys = options.fields("TCA_U32_SEL").get("keys", ())
    actions = options.nest("TCA_U32_ACT")
    action = actions.nest("TCA_ACT_PRIO_1")
    if len(keys) != 1 or keys[0]["key_mask"] != 0 or len(actions) != 1:
        return None
    if action.text("TCA_ACT_KIND") != "mirred":
        return None
    mirred = action.nest_as("TCA_ACT_OPTIONS", act_mirred.options).fields("TCA_MIRRED_PARMS")
    is_redirect = (mirred.get("action"), mirred.get("eaction")) == (_STOLEN, _EGRESS_REDIRECT)
    return int(mirred["ifindex"]) if is_redirect else None


def _guard(filters: Iterable[Message]) -> BpfProgram | None:
    """The only direct-action program at our priority, behind the guard of offloads; None otherwise."""
    found: dict[int, list[Attributes]] = {_info(_OFFLOADS): [], _info(_GUARD): []}
    for each in filters:
        kind, options = _kind_and_options(each)
        is_program = kind == "bpf" and options.number("TCA_BPF_FLAGS") & _BPF_DIRECT_ACTION
        if is_program and each["info"] in found:
            found[each["info"]].append(options)
    offloads = [options.text("TCA_BPF_NAME") for options in found[_info(_OFFLOADS)]]
    programs = [options.value("TCA_BPF_OPS") for options in found[_info(_GUARD)] if "TCA_BPF_OPS" in options]
    is_whole = len(programs) == 1 and offloads == [offload_guard.NAME]
    return BpfProgram(bytes(programs[0])) if is_whole else None


def _loaded() -> int:
    """The descriptor of the guard of offloads. Raises: BackendUnavailable, OSError."""
    try:
        return offload_guard.program()
    except (OSError, ValueError, KeyError) as refused:
        raise BackendUnavailable(
            f"the kernel does not load the guard of offloads: {refused}",
            step="set-guard",
            fix="let the agent have CAP_BPF, CAP_PERFMON and the bpf system call, as its systemd unit does; "
            "the kernel needs CONFIG_BPF_SYSCALL and CONFIG_DEBUG_INFO_BTF",
        ) from refused


def _tbf(qdisc: Message) -> Tbf | None:
    """Our tbf; None for any other qdisc."""
    kind, options = _kind_and_options(qdisc)
    if qdisc["handle"] != OURS << 16 or kind != "tbf":
        return None
    parms = options.fields("TCA_TBF_PARMS")
    rate = options.number("TCA_TBF_RATE64") or parms["rate"]
    return Tbf(rate, parms["buffer"] * _TICK_NS, parms["limit"], parms["rate_overhead"], parms["peak"])
