"""OpenFlow flows of OVS bridges: written in atomic bundles and read, on one kept connection per bridge."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from netplugin.api.errors import BackendUnavailable, HostError, NetpluginError, OperationTimeout, TryAgain
from netplugin.host import openflow_messages as m
from netplugin.host.flow import COOKIE_MARK, MARK_MASK, Flow
from netplugin.host.openflow_connection import STEP, Connection
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.oxm import Malformed
from netplugin.host.port_stats import (
    FlowStats,
    PortStats,
    read_flow_stats,
    read_port_stats,
    request_port_stats,
)
from netplugin.host.processes import remaining

#: The least time that an exchange gets, in seconds: what another wait has used up must not make it fail.
_LEAST_S = 0.05
_FIX = "look into the log of ovs-vswitchd, and restart it"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """The settings of a bridge that OpenFlow can change and the database does not have.

    They last until vswitchd ends or the bridge is deleted ("set-frags", "mod-port" in ovs-ofctl(8)).
    """

    #: Whether it matches the L4 ports and ICMP types of first fragments.
    matches_fragments: bool
    #: The ports to which it forwards nothing (``no-forward``).
    shut: frozenset[int]


@dataclass(slots=True)
class _Kept:
    """The connection to one bridge; used by one thread at a time.

    ``editing`` is held for longer than ``lock``, which each exchange takes.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    editing: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None
    #: Whether vswitchd has closed the last one: what others changed since was not noticed.
    lost: bool = False
    #: The settings that were read or written last.
    settings: BridgeSettings | None = None

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def take(self) -> None:
        """Take what has come in and is no answer; drop the connection if vswitchd has closed it."""
        if self.connection is not None and not self.connection.alive():
            self.drop()
            self.lost = True


class OpenFlow:
    """The flows of the bridges of one vswitchd. Thread-safe: the workers of several backends share it.

    A connection is made when it is first needed, and again after vswitchd or the bridge was. Threads
    that use the same bridge wait for each other. What has a deadline raises BackendUnavailable, HostError,
    OperationTimeout, and TryAgain if vswitchd ends within an exchange.
    """

    def __init__(
        self, sockets: OvsSockets, gone: Callable[[], BackendUnavailable | None] = lambda: None
    ) -> None:
        """``gone`` says why vswitchd is not there; None if it is."""
        self._sockets = sockets
        self._gone = gone
        #: Called with a bridge on which others have changed something, or (``NOTHING``) to which there is a
        #: new connection, in any thread. It is set before the first connection is made, or not at all.
        self.changed: Callable[[str, m.Changed], None] | None = None
        self._lock = threading.Lock()
        self._bridges: dict[str, _Kept] = {}

    def close(self) -> None:
        """Close the connections, after the exchanges that are under way."""
        with self._lock:
            bridges = list(self._bridges.values())
        for kept in bridges:
            with kept.lock:
                kept.drop()

    @contextmanager
    def editing(self, bridge: str, deadline: float) -> Iterator[None]:
        """Meanwhile no other thread is ``editing`` the bridge: what an edit was made for does not change."""
        kept = self._kept(bridge)
        if not kept.editing.acquire(timeout=remaining(max(deadline, time.monotonic() + _LEAST_S))):
            raise OperationTimeout(f"{bridge}: another edit has not ended in time", step=STEP)
        try:
            yield
        finally:
            kept.editing.release()

    def dump(
        self, bridge: str, cookies: Collection[int] | None, deadline: float, without: int = 0
    ) -> list[Flow]:
        """The flows of these cookies on the bridge, or (None) all of ours.

        OVS has an index of whole cookies: a dump of some takes no longer where the bridge has many
        flows (``collect_rules_loose`` in ofproto/ofproto.c). Of all, flows whose cookie has one of the
        bits ``without`` are left out.
        """
        whole = [(cookie, m.WHOLE_COOKIE) for cookie in sorted(set(cookies or ()))]
        queries = whole if cookies is not None else [(COOKIE_MARK, MARK_MASK | without)]
        asked = {xid: m.request_flows(xid, *cookie) for xid, cookie in enumerate(queries, 1)}
        read = partial(m.read_flows, requests=asked)
        return self._exchange(bridge, [[*asked.values()]], deadline, read)

    def replace(
        self,
        bridge: str,
        cookies: Iterable[int],
        flows: Iterable[Flow],
        deadline: float,
        gone: Iterable[Flow] = (),
        read: Collection[int] = (),
    ) -> list[Flow]:
        """Delete flows by cookie and the flows ``gone``, and add ``flows``, in one atomic bundle.

        Returns the flows that the bridge has then of the cookies ``read``. They are requested with the
        commit, because vswitchd answers both in one turn of its main loop (``ofconn_run`` in
        ofproto/connmgr.c), and only then makes of the flows what the datapath needs.
        """
        flow_mods = [m.delete(cookie) for cookie in sorted(set(cookies))]
        flow_mods += map(m.delete_strict, gone)
        added = dict(enumerate(flows, m.FIRST_IN_BUNDLE + len(flow_mods)))
        filled = m.bundle([*flow_mods, *map(m.add, added.values())])
        asked = {xid: m.request_flows(xid, cookie, m.WHOLE_COOKIE) for xid, cookie in enumerate(read, 2)}

        def committed(answers: Sequence[m.OpenFlowMessage]) -> list[Flow]:
            if [answer.kind for answer in answers[:1]] != [m.BUNDLE_CONTROL]:
                raise Malformed("nothing to the commit of a bundle")
            return m.read_flows(answers[1:], asked)

        return self._exchange(bridge, [filled, [m.commit(), *asked.values()]], deadline, committed, added)

    def count_of_others(self, bridge: str, deadline: float) -> int:
        """The number of flows on the bridge that have no mark of ours."""
        every = m.request_flows(1, 0, 0, counted=True)
        marked = m.request_flows(2, COOKIE_MARK, MARK_MASK, counted=True)
        read = partial(m.read_counts, requests=(1, 2))
        total, ours = self._exchange(bridge, [[every, marked]], deadline, read)
        return total - ours

    def counters(
        self, bridge: str, cookies: Collection[int], deadline: float
    ) -> tuple[list[PortStats], list[FlowStats]]:
        """The counters of all ports, and of the flows of these cookies that packets have met.

        By one exchange. vswitchd answers 50 requests in one turn of its main loop (``ofconn_run`` in
        ofproto/connmgr.c), so those for many cookies do not hold it up as one for all of their flows would.
        """
        asked = {
            xid: m.request_flows(xid, each, m.WHOLE_COOKIE) for xid, each in enumerate(sorted(cookies), 2)
        }

        def read(answers: Sequence[m.OpenFlowMessage]) -> tuple[list[PortStats], list[FlowStats]]:
            of_ports = [answer for answer in answers if answer.xid == 1]
            of_flows = [answer for answer in answers if answer.xid != 1]
            return read_port_stats(of_ports, 1), read_flow_stats(of_flows, asked)

        return self._exchange(bridge, [[request_port_stats(1), *asked.values()]], deadline, read)

    def settings(self, bridge: str, deadline: float) -> BridgeSettings:
        """The settings as they are."""
        return self._settings(bridge, deadline)[0]

    def compare_settings(self, bridge: str, deadline: float) -> None:
        """Call ``changed`` if others have changed the settings since the last comparison, or may have
        changed flows while there was no connection.

        OVS sends no notice of them: none of a SET_CONFIG, and that of a changed port only to who takes
        packets too (``ofconn_receives_async_msg`` in ofproto/connmgr.c). Connects if there is no
        connection, so that flows are watched.
        """
        kept = self._kept(bridge)

        def compare(known: BridgeSettings | None, found: BridgeSettings) -> BridgeSettings:
            differs = known not in (None, found)
            if (differs or kept.lost) and self.changed is not None:
                self.changed(bridge, m.Changed.OURS if differs else m.Changed.OTHERS)
            kept.lost = False
            return found

        try:
            self._settings(bridge, deadline, update=compare)
        except NetpluginError:
            kept.lost = True
            raise

    def match_fragments(self, bridge: str, deadline: float) -> None:
        """Match L4 ports and ICMP types of first fragments, which OVS matches as zeros by default.

        Read back.
        """

        def update(known: BridgeSettings | None, found: BridgeSettings) -> BridgeSettings:
            return replace(known or found, matches_fragments=found.matches_fragments)

        found, _ = self._settings(bridge, deadline, [m.match_fragments(1)], update)
        if not found.matches_fragments:
            fix = f"ovs-ofctl set-frags {bridge} nx-match says why"
            raise HostError(f"{bridge} does not match the ports of fragments", step=STEP, fix=fix)

    def forward(self, bridge: str, ofports: Collection[int], on: bool, deadline: float) -> None:
        """Have the bridge forward frames to these ports, or none whatever its flows say; read back.

        Ports that the bridge does not have are left out.
        """

        def wrong(ports: Iterable[m.OfPortState]) -> list[m.OfPortState]:
            return [port for port in ports if port.ofport in ofports and port.is_shut is on]

        def update(known: BridgeSettings | None, found: BridgeSettings) -> BridgeSettings:
            shut = (known or found).shut
            return replace(known or found, shut=shut - those if on else shut | those)

        if not (changed := wrong(self._settings(bridge, deadline)[1])):
            return
        those = {port.ofport for port in changed}
        changes = [m.set_port(xid, port, shut=not on) for xid, port in enumerate(changed, 1)]
        for port in wrong(self._settings(bridge, deadline, changes, update)[1]):
            found = f"{bridge} does not {'forward to' if on else 'shut'} port {port.ofport}"
            fix = f"ovs-ofctl mod-port {bridge} {port.ofport} {'' if on else 'no-'}forward says why"
            raise HostError(found, step=STEP, fix=fix)

    def _settings(
        self,
        bridge: str,
        deadline: float,
        changes: Sequence[bytes] = (),
        update: Callable[[BridgeSettings | None, BridgeSettings], BridgeSettings] = lambda known, found: (
            known or found
        ),
    ) -> tuple[BridgeSettings, list[m.OfPortState]]:
        """Send changes, which have no answer, and return the settings and the ports then.

        ``update`` returns what is to be compared with next.
        """
        kept, xid = self._kept(bridge), len(changes) + 1

        def read(answers: Sequence[m.OpenFlowMessage]) -> tuple[BridgeSettings, list[m.OfPortState]]:
            ports = m.read_ports(answers[1:], xid + 1)
            shut = frozenset(port.ofport for port in ports if port.is_shut)
            known, found = kept.settings, BridgeSettings(m.fragments_matched(answers[0]), shut)
            if known is not None:  # the database tells of ports that have gone
                known = replace(known, shut=known.shut & {port.ofport for port in ports})
            kept.settings = update(known, found)
            return found, ports

        requests = [*changes, m.message(m.GET_CONFIG_REQUEST, xid), m.request_ports(xid + 1)]
        return self._exchange(bridge, [requests], deadline, read)

    def send(self, bridge: str, frames: Sequence[tuple[int, bytes]], deadline: float) -> None:
        """Have the bridge treat frames as if it had received each of them from the port with that number."""
        requests = [m.packet_out(xid, ofport, frame) for xid, (ofport, frame) in enumerate(frames, 1)]
        self._exchange(bridge, [requests], deadline, lambda answers: None)

    def descriptors(self) -> dict[int, str]:
        """Where notices of changed flows come in, each with its bridge."""
        with self._lock:
            connections = [(name, kept.connection) for name, kept in self._bridges.items()]
        return {c.fileno(): name for name, c in connections if c is not None and c.fileno() >= 0}

    def take(self, bridge: str) -> None:
        """Read what has come in and is no answer. An exchange that is under way does so itself."""
        self._take(self._kept(bridge), _LEAST_S)

    @staticmethod
    def _take(kept: _Kept, timeout_s: float) -> None:
        if kept.lock.acquire(timeout=timeout_s):
            try:
                kept.take()
            finally:
                kept.lock.release()

    def _exchange(
        self,
        bridge: str,
        steps: Sequence[Sequence[bytes]],
        deadline: float,
        read: Callable[[Sequence[m.OpenFlowMessage]], _T],
        flows: Mapping[int, Flow] | None = None,
    ) -> _T:
        """Send each step when the one before was answered without an error, and ``read`` the last answers.

        ``flows`` are those that are added, by transaction id: the error says which one. After an error
        the connection is closed, and with it goes a bundle that was not committed.
        """
        deadline = max(deadline, time.monotonic() + _LEAST_S)
        kept = self._kept(bridge)
        if not kept.lock.acquire(timeout=remaining(deadline)):
            raise OperationTimeout(f"{bridge}: another exchange has not ended in time", step=STEP)
        try:
            connection = self._connection(bridge, kept, deadline)
            answers: list[m.OpenFlowMessage] = []
            for requests in steps:
                answers = connection.exchange(requests, deadline)
                for refused in (answer for answer in answers if answer.kind == m.ERROR):
                    flow = (flows or {}).get(refused.xid)
                    what = f"the flow {flow}" if flow else "the request"
                    raise HostError(f"{bridge}: OVS refused {what}: {m.error_name(refused)}", step=STEP)
            return read(answers)
        except BaseException as failed:
            kept.drop()
            if isinstance(failed, Malformed):
                raise HostError(f"{bridge}: vswitchd answered with {failed}", step=STEP, fix=_FIX) from failed
            if isinstance(failed, HostError | TryAgain) and (gone := self._gone()) is not None:
                raise gone from failed
            raise
        finally:
            kept.lock.release()

    def _kept(self, bridge: str) -> _Kept:
        with self._lock:
            return self._bridges.setdefault(bridge, _Kept())

    def _connection(self, bridge: str, kept: _Kept, deadline: float) -> Connection:
        """The kept connection, or a new one if vswitchd has closed it."""
        kept.take()
        if kept.connection is None:
            with self._lock:
                others = list(self._bridges.values())
            for other in others:  # some may be to bridges that were deleted
                self._take(other, 0)
            changed = partial(self.changed, bridge) if self.changed is not None else None
            kept.connection = Connection(self._sockets.management(bridge), deadline, changed)
            if changed is not None:
                changed(m.Changed.NOTHING)
        return kept.connection
