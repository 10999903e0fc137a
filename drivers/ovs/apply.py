"""Apply changes to OVS: OVSDB transactions of a bounded time, then one flow bundle per bridge."""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from drivers.ovs import commands as c
from drivers.ovs.commands import FlowChange, FlowEdit, RowChange
from drivers.ovs.pace import Pace
from drivers.ovs.ports import VhostPort, policer_refused
from drivers.ovs.usability import keeps_old_actions
from netplugin.api.errors import Conflict, HostError, NetpluginError, OperationTimeout, TryAgain
from netplugin.backend import Applied, Change, chosen_name
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import OvsInterface
from netplugin.host.vswitchd import appctl, appctl_each

LOG = logging.getLogger(__name__)
_MTU_S = 5.0  # vswitchd may set an MTU after cur_cfg has caught up
_PURGE_S = 2.0  # past the deadline: the filter is not in force until the purge
_PURGES = 2
_Failed = dict[str, NetpluginError]


def may_be_used(change: FlowChange, edit: FlowEdit, idle: Collection[str]) -> bool:
    """Whether frames may have used flows that the edit deletes.

    The ports ``idle`` have sent no frames yet, or no longer exist.
    """
    of_others = not change.ports or not set(change.ports) <= set(idle)
    return bool(edit.gone) or (bool(edit.cookies) and of_others)


def _write_files(changes: Sequence[c.SocketChange], failed: _Failed) -> None:
    for change in changes:
        try:
            change.apply()
        except HostError as error:
            failed.update({port: error.for_port(port) for port in change.ports})


def _refuse_devices(changes: Sequence[Change], failed: _Failed) -> None:
    """Add no port with the chosen name of a device of the kernel: OVS opens devices by name."""
    for change in changes:
        port = change.port if isinstance(change, c.AddPort) else None
        name = chosen_name(port.spec) if port is not None and not port.opened else None
        if name is not None and _is_device(name):
            conflict = Conflict(
                f"a device named {name} exists and is not ours",
                step="plan",
                fix=f"choose another name; or look who has it: ip -d link show {name}",
            )
            failed.update({port: conflict.for_port(port) for port in change.ports})


def _is_device(name: str) -> bool:
    try:
        return socket.if_nametoindex(name) > 0
    except OSError:
        return False


def _has_failed(change: Change, failed: _Failed) -> bool:
    return bool(change.ports) and all(port in failed for port in change.ports)


def _ports(changes: Iterable[Change]) -> Iterator[str]:
    for change in changes:
        yield from change.ports


class Applier:
    """Implements ``netplugin.backend.Backend.apply`` for OVS."""

    def __init__(self, ovs: OvsHost) -> None:
        self._ovs = ovs
        #: Whether datapath flows may still have old actions; initially true, because a killed agent
        #: may have left some.
        self._purge_due = True
        #: Bridges with a port that has left its VLAN since the last purge.
        self._retagged: set[str] = set()
        self._pace = Pace()
        #: The flows that the last ``apply`` read back, by bridge and cookie.
        self.read: dict[str, dict[int, list[Flow]]] = {}

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        self.read = {}
        failed: _Failed = {}
        of_networks: dict[str, NetpluginError] = {}
        start = time.monotonic()
        of_files = [each for each in changes if isinstance(each, c.SocketChange)]
        _write_files([each for each in of_files if each.before_rows], failed)
        _refuse_devices(changes, failed)
        retags = [each for each in changes if isinstance(each, c.SetPort) and self._retags(each.port)]
        by_purge = [*(each for each in changes if isinstance(each, c.PurgeDatapath)), *retags]
        self._retagged |= {each.port.bridge for each in retags}
        self._purge_due |= bool(by_purge)
        self._write_rows(changes, deadline, failed, of_networks)
        self._wait_for_mtu(changes, failed, deadline)
        self._require_policers(changes, deadline, failed)
        rows_done = time.monotonic()
        self._write_flows(changes, deadline, failed, of_networks)
        by_purge += [each for each in changes if isinstance(each, FlowChange)]
        self._purge_if_due(by_purge, deadline, failed)
        _write_files([each for each in of_files if not each.before_rows], failed)
        return Applied(
            failed,
            {
                "vswitchd": (rows_done - start) * 1e3,
                "openflow": (time.monotonic() - rows_done) * 1e3,
            },
            of_networks=of_networks,
        )

    # -- rows ------------------------------------------------------------------------------------

    def _write_rows(
        self,
        changes: Sequence[Change],
        deadline: float,
        failed: _Failed,
        of_networks: dict[str, NetpluginError],
    ) -> None:
        """Commit the changes in transactions, each of which vswitchd carries out in a bounded time.

        After one that was not carried out in time none is begun.
        """
        rows = [change for change in changes if isinstance(change, RowChange)]
        left = deque(self._pace.parts([change for change in rows if not _has_failed(change, failed)]))
        while left:
            # Without those that share a change which was refused.
            if not (part := [change for change in left[0] if not _has_failed(change, failed)]):
                left.popleft()
                continue
            try:
                self._write_part(part, deadline, failed, of_networks)
                left.popleft()
                if left and time.monotonic() >= deadline:
                    raise OperationTimeout("other ports of the batch took all of the time", step="vswitchd")
            except NetpluginError as error:
                rest = [change for part in left for change in part]
                LOG.warning("changes of %d ports are not made: %s", len({*_ports(rest)}), error)
                self._fail(rest, error, failed)
                of_networks.update({change.physical_network: error for change in rest if not change.ports})
                return

    def _write_part(
        self,
        rows: Sequence[RowChange],
        deadline: float,
        failed: _Failed,
        of_networks: dict[str, NetpluginError],
    ) -> None:
        """Commit one transaction.

        If the database or a change refuses it, commit one per port, so that the error is attributed to the
        right port, and one per physical network for the changes that are for no port.

        Raises: NetpluginError if OVS does not answer in time, or not at all.
        """
        try:
            self._commit(rows, deadline)
        except NetpluginError as error:
            if not isinstance(error, HostError | TryAgain):
                raise
            ports = sorted({*_ports(rows)})
            LOG.warning("a transaction for %d ports was refused: %s", len(ports), error)
            by_network: dict[str, list[RowChange]] = defaultdict(list)
            for change in rows:
                if not change.ports:
                    by_network[change.physical_network].append(change)
            if len(ports) + len(by_network) < 2:
                failed.update({port: error.for_port(port) for port in ports})
                of_networks.update(dict.fromkeys(by_network, error))
                return
            # Changes that several ports share are written with the first port that succeeds.
            done: list[RowChange] = []
            for port in ports:
                own = [change for change in rows if port in change.ports and change not in done]
                try:
                    self._commit(own, deadline)
                    done += own
                except NetpluginError as refused:
                    failed[port] = refused.for_port(port)
            for network, own in by_network.items():
                try:
                    self._commit(own, deadline)
                except NetpluginError as refused:
                    of_networks[network] = refused

    def _commit(self, changes: Sequence[RowChange], deadline: float) -> None:
        start = time.monotonic()
        try:
            self._ovs.db.write(changes, min(deadline, start + self._ovs.settings.timeout_s))
        except TryAgain:
            raise  # nothing was sent
        except OperationTimeout:
            self._pace = self._pace.after(changes, time.monotonic() - start)
            raise
        self._pace = self._pace.after(changes, time.monotonic() - start)

    def _wait_for_mtu(self, changes: Sequence[Change], failed: _Failed, deadline: float) -> None:
        """Wait for the requested MTUs. A missing one is reported when the port is read back."""
        wanted = [
            mtu
            for change in changes
            if isinstance(change, RowChange) and not any(port in failed for port in change.ports)
            for mtu in change.mtus()
        ]
        if wanted:
            until = min(deadline, time.monotonic() + _MTU_S)
            self._ovs.db.wait_for(lambda: all(self._has_mtu(*w) for w in wanted), until)

    def _has_mtu(self, name: str, mtu: int, may_wait_for_vm: bool) -> bool:
        port = self._ovs.view.port(name)
        return all(
            i.mtu == mtu or bool(i.error) or (may_wait_for_vm and not i.mtu)
            for i in (port.interfaces if port else ())
        )

    def _require_policers(self, changes: Sequence[Change], deadline: float, failed: _Failed) -> None:
        """Check that vswitchd has applied the changed policers, which the database does not show."""
        limits = {
            change.port.name: change.port
            for change in changes
            if isinstance(change, c.SetQos) or (isinstance(change, c.AddPort) and change.port.receives)
        }
        # vswitchd could not create the others, which is reported as such.
        limits = {n: p for n, p in limits.items() if p.port_id not in failed and self._interface(n)}
        if not limits:
            return
        try:
            sockets = self._ovs.settings.sockets
            answers = appctl_each(sockets, [("qos/show", name) for name in limits], deadline)
        except NetpluginError as error:
            failed.update({port.port_id: error.for_port(port.port_id) for port in limits.values()})
            return
        for (name, port), shown in zip(limits.items(), answers, strict=True):
            if isinstance(shown, HostError):
                failed[port.port_id] = shown.for_port(port.port_id)
            elif wrong := policer_refused(shown, port.receives):
                failed[port.port_id] = HostError(f"{name}: {wrong}", step="qos").for_port(port.port_id)

    def _interface(self, name: str) -> OvsInterface | None:
        """The interface of a port, if vswitchd has created it."""
        port = self._ovs.view.port(name)
        works = port is not None and port.interface is not None and port.interface.works_at
        return port.interface if port and works else None

    # -- flows -----------------------------------------------------------------------------------

    def _write_flows(
        self,
        changes: Sequence[Change],
        deadline: float,
        failed: _Failed,
        of_networks: dict[str, NetpluginError],
    ) -> None:
        by_bridge: dict[str, list[FlowChange]] = defaultdict(list)
        for change in changes:
            if isinstance(change, FlowChange):
                if not any(port in failed for port in change.ports) or len(change.ports) > 1:
                    by_bridge[change.bridge].append(change)
        come = {change.port.port_id: change.port.name for change in changes if isinstance(change, c.AddPort)}
        go = {port for change in changes if isinstance(change, c.RemovePort) for port in change.ports}
        idle = {port for port in come.keys() ^ go if port in go or not self._is_up(come[port])}
        for bridge, edits in by_bridge.items():
            try:
                self._bundle(bridge, edits, idle, deadline)
            except NetpluginError as error:
                self._fail(edits, error, failed)
                for change in edits:
                    if not change.ports:
                        of_networks.setdefault(change.physical_network, error)

    def _fail(self, group: Sequence[Change], error: NetpluginError, failed: _Failed) -> None:
        failed.update({p: error.for_port(p) for p in {*_ports(group)} if p not in failed})

    def _is_up(self, name: str) -> bool:
        """Whether frames may come: a row that somebody deleted has its VM again as soon as it is added."""
        port = self._ovs.view.port(name)
        return bool(port and port.interface and port.interface.link_state == "up")

    def _retags(self, wanted: VhostPort) -> bool:
        """Whether a port leaves a VLAN, in which the datapath may go on forwarding its frames."""
        port = self._ovs.view.port(wanted.name)
        return port is not None and port.tag != wanted.tag

    def _purge_if_due(self, changes: Sequence[Change], deadline: float, failed: _Failed) -> None:
        """``changes``: those that are not in effect before the purge."""
        if self._purge_due:
            try:
                self._purge(deadline)
            except NetpluginError as error:
                LOG.warning("datapath flows may go on by flows that were changed: %s", error)
                self._fail(changes, error, failed)

    def _purge(self, deadline: float) -> None:
        """Purge for all bridges of the host. A failure is planned again until it succeeds.

        A purge passes over a flow that a revalidator or a handler has locked (``revalidator_sweep__``,
        ofproto/ofproto-dpif-upcall.c), and a change of flows wakes the revalidators. On a busy machine 31 of
        400 purges left some of 100 flows, and one of 3,100 pairs of purges.

        OVS forgets the MACs of a port that leaves a VLAN, but a revalidator that is at work learns them
        again from the flow that it has (``revalidate_ukey`` in the same file), and ``NORMAL``
        sends to the port of a MAC whatever the VLAN of that port is. The purge ends the flows, so what is
        forgotten after it stays so.
        """
        sockets = self._ovs.settings.sockets
        if self._retagged or keeps_old_actions(self._ovs.view.root):
            self._ovs.purge_failed = True
            until = max(deadline, time.monotonic() + _PURGE_S)
            for _ in range(_PURGES):
                appctl(sockets, "revalidator/purge", deadline=until)
            for bridge in sorted(self._retagged):
                if self._ovs.view.bridge(bridge) is not None:
                    appctl(sockets, "fdb/flush", bridge, deadline=until)
        self._retagged.clear()
        self._ovs.purge_failed = self._purge_due = False

    def _bundle(
        self, bridge: str, group: Sequence[FlowChange], idle: Collection[str], deadline: float
    ) -> None:
        """Apply all flow changes of a bridge in one bundle, so no frame meets a partial set of flows.

        What they are depends on the ports and flows that there are, so no other backend edits meanwhile.
        """
        with self._ovs.flows.editing(bridge, deadline):
            self._edit(bridge, group, idle, deadline)

    def _edit(self, bridge: str, group: Sequence[FlowChange], idle: Collection[str], deadline: float) -> None:
        if self._ovs.view.bridge(bridge) is None:
            return  # the bridge was deleted, and its flows with it
        cookies: list[int] = []
        gone: list[Flow] = []
        flows: list[Flow] = []
        shut: list[int] = []
        opened: list[int] = []
        sealed: list[int] = []
        for change in group:
            edit = change.edit(self._ovs, deadline)
            self._purge_due |= may_be_used(change, edit, idle)
            if edit.match_fragments:
                self._ovs.flows.match_fragments(bridge, deadline)
            cookies += edit.cookies
            gone += edit.gone
            flows += edit.flows
            shut += edit.shut
            opened += edit.opened
            sealed += edit.sealed
        if opened:
            self._ovs.flows.forward(bridge, opened, True, deadline)
        if sealed:
            self._ovs.flows.forward(bridge, sealed, False, deadline)
        if cookies or gone or flows:
            read = {COOKIE_MARK, *cookies}
            found = self._ovs.flows.replace(bridge, cookies, flows, deadline, gone, sorted(read))
            by_cookie: dict[int, list[Flow]] = {cookie: [] for cookie in read}
            for flow in found:
                by_cookie[flow.cookie].append(flow)
            self.read[bridge] = by_cookie
        if shut:
            self._ovs.flows.forward(bridge, shut, False, deadline)
