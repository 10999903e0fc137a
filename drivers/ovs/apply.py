"""Apply changes to OVS: OVSDB transactions of a bounded time, then one flow bundle per bridge."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from drivers.ovs.flow_changes import FlowChange, FlowEdit, PurgeDatapath
from drivers.ovs.pace import Pace
from drivers.ovs.ports import VhostPort, policer_refused
from drivers.ovs.row_changes import AddPort, PortChange, RemovePort, RowChange, SetPort, SetQos
from drivers.ovs.service_ports import index_of
from drivers.ovs.socket_directories import SocketChange
from netplugin.api.errors import Conflict, HostError, NetpluginError, OperationTimeout, TryAgain
from netplugin.backend import Applied, Change, chosen_name
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_versions import keeps_old_actions
from netplugin.host.vswitchd import appctl, appctl_each

LOG = logging.getLogger(__name__)
_MTU_S = 5.0  # vswitchd may set an MTU after cur_cfg has caught up
_PURGE_S = 2.0  # past the deadline: the filter is not in force until the purge
_PURGES = 2


@dataclass(frozen=True)
class Failures:
    """The errors of ports, and those of networks for changes that are for no port."""

    of_ports: dict[str, NetpluginError] = field(default_factory=dict)
    of_networks: dict[str, NetpluginError] = field(default_factory=dict)

    def add(self, changes: Sequence[Change], error: NetpluginError) -> None:
        """The first error of a port or network stays."""
        for change in changes:
            for port in change.ports:
                self.of_ports.setdefault(port, error.for_port(port))
            if not change.ports:
                self.of_networks.setdefault(change.physical_network, error)

    def join(self, failed: Mapping[str, NetpluginError]) -> None:
        """Add errors of ports."""
        for port, error in failed.items():
            self.of_ports.setdefault(port, error)

    def has(self, change: Change) -> bool:
        """Whether all the ports that the change is for have failed."""
        return bool(change.ports) and all(port in self.of_ports for port in change.ports)


def may_be_used(change: FlowChange, edit: FlowEdit, idle: Collection[str]) -> bool:
    """Whether frames may have used flows that the edit deletes.

    The ports ``idle`` have sent no frames yet, or no longer exist.
    """
    of_others = not change.ports or not set(change.ports) <= set(idle)
    return bool(edit.gone) or (bool(edit.cookies) and of_others)


def _refuse_devices(changes: Sequence[Change], failures: Failures) -> None:
    """Add no port with the chosen name of a device of the kernel: OVS opens devices by name."""
    for change in changes:
        port = _added_port(change)
        name = chosen_name(port.spec) if port is not None and not port.opened else None
        if name is not None and index_of(name):
            conflict = Conflict(
                f"a device named {name} exists and is not ours",
                step="plan",
                fix=f"choose another name; or look who has it: ip -d link show {name}",
            )
            failures.add([change], conflict)


def _added_port(change: Change) -> VhostPort | None:
    """The port of a VM that the change adds."""
    return change.port if isinstance(change, AddPort) and isinstance(change.port, VhostPort) else None


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
        failures = Failures()
        start = time.monotonic()
        self._write_files(changes, failures, before_rows=True)
        _refuse_devices(changes, failures)
        of_purge = [each for each in changes if isinstance(each, PurgeDatapath) or self._retags(each)]
        self._purge_due |= bool(of_purge)
        self._write_rows(changes, deadline, failures)
        self._wait_for_mtu(changes, failures, deadline)
        self._require_policers(changes, deadline, failures)
        rows_done = time.monotonic()
        self._write_flows(changes, deadline, failures)
        of_purge += [each for each in changes if isinstance(each, FlowChange)]
        self._purge_if_due(of_purge, deadline, failures)
        self._write_files(changes, failures, before_rows=False)
        timings = {
            "vswitchd": (rows_done - start) * 1e3,
            "openflow": (time.monotonic() - rows_done) * 1e3,
        }
        return Applied(failures.of_ports, timings, of_networks=failures.of_networks)

    @staticmethod
    def _write_files(changes: Sequence[Change], failures: Failures, *, before_rows: bool) -> None:
        for change in changes:
            if isinstance(change, SocketChange) and change.before_rows is before_rows:
                try:
                    change.apply()
                except HostError as error:
                    failures.add([change], error)

    # -- rows ------------------------------------------------------------------------------------

    def _write_rows(self, changes: Sequence[Change], deadline: float, failures: Failures) -> None:
        """Commit the changes in transactions, each of which vswitchd carries out in a bounded time.

        After one that was not carried out in time none is begun.
        """
        rows = [each for each in changes if isinstance(each, RowChange) and not failures.has(each)]
        remaining = deque(self._pace.parts(rows))
        while remaining:
            # Without those that share a change which was refused.
            if not (part := [change for change in remaining[0] if not failures.has(change)]):
                remaining.popleft()
                continue
            try:
                self._write_part(part, deadline, failures)
                remaining.popleft()
                if remaining and time.monotonic() >= deadline:
                    raise OperationTimeout("other ports of the batch took all of the time", step="vswitchd")
            except NetpluginError as error:
                rest = [change for part in remaining for change in part]
                LOG.warning("%d changes are not made: %s", len(rest), error)
                failures.add(rest, error)
                return

    def _write_part(self, rows: Sequence[RowChange], deadline: float, failures: Failures) -> None:
        """Commit one transaction.

        If the database or a change refuses it, commit one per port, so that the error is attributed to the
        right port, and one per physical network for the changes that are for no port.

        Raises: NetpluginError if OVS does not answer in time, or not at all.
        """
        try:
            self._commit(rows, deadline)
            return
        except (HostError, TryAgain) as error:
            ports = sorted({port for change in rows for port in change.ports})
            networks = sorted({change.physical_network for change in rows if not change.ports})
            LOG.warning("a transaction for %d ports was refused: %s", len(ports), error)
            if len(ports) + len(networks) < 2:
                failures.add(rows, error)
                return
        # Changes that several ports share are written with the first port that succeeds.
        done: list[RowChange] = []
        for port in ports:
            own = [change for change in rows if port in change.ports and change not in done]
            try:
                self._commit(own, deadline)
                done += own
            except NetpluginError as refused:
                failures.of_ports[port] = refused.for_port(port)
        for network in networks:
            own = [each for each in rows if not each.ports and each.physical_network == network]
            try:
                self._commit(own, deadline)
            except NetpluginError as refused:
                failures.of_networks[network] = refused

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

    def _wait_for_mtu(self, changes: Sequence[Change], failures: Failures, deadline: float) -> None:
        """Wait for the requested MTUs. A missing one is reported when the port is read back."""
        awaited = [
            (change.port.name, mtu, isinstance(change.port, VhostPort))
            for change in changes
            if isinstance(change, PortChange) and not failures.has(change)
            if (mtu := change.port.awaited_mtu(is_new=isinstance(change, AddPort)))
        ]
        if awaited:
            until = min(deadline, time.monotonic() + _MTU_S)
            self._ovs.db.wait_for(lambda: all(self._has_mtu(*each) for each in awaited), until)

    def _has_mtu(self, name: str, mtu: int, may_wait_for_vm: bool) -> bool:
        port = self._ovs.view.port(name)
        return all(
            i.mtu == mtu or bool(i.error) or (may_wait_for_vm and not i.mtu)
            for i in (port.interfaces if port else ())
        )

    def _require_policers(self, changes: Sequence[Change], deadline: float, failures: Failures) -> None:
        """Check that vswitchd has applied the changed policers, which the database does not show."""
        limited = []
        for change in changes:
            port = change.port if isinstance(change, SetQos) else _added_port(change)
            if port is None or not (port.receives or isinstance(change, SetQos)) or failures.has(change):
                continue
            if (row := self._ovs.view.port(port.name)) and row.works_at:  # the others are reported as such
                limited.append((change, port))
        if not limited:
            return
        try:
            asked = [("qos/show", port.name) for _, port in limited]
            answers = appctl_each(self._ovs.settings.sockets, asked, deadline)
        except NetpluginError as error:
            failures.add([change for change, _ in limited], error)
            return
        for (change, port), shown in zip(limited, answers, strict=True):
            if isinstance(shown, HostError):
                failures.add([change], shown)
            elif wrong := policer_refused(shown, port.receives):
                failures.add([change], HostError(f"{port.name}: {wrong}", step="qos"))

    # -- flows -----------------------------------------------------------------------------------

    def _write_flows(self, changes: Sequence[Change], deadline: float, failures: Failures) -> None:
        by_bridge: dict[str, list[FlowChange]] = defaultdict(list)
        for change in changes:
            if isinstance(change, FlowChange) and (len(change.ports) > 1 or not failures.has(change)):
                by_bridge[change.bridge].append(change)
        added = {port.port_id: port.name for port in map(_added_port, changes) if port is not None}
        gone = [change for change in changes if isinstance(change, RemovePort) and change.backend]
        removed = {port for change in gone for port in change.ports}
        idle = {port for port in added.keys() ^ removed if port in removed or not self._is_up(added[port])}
        for bridge, edits in by_bridge.items():
            try:
                # What the flows are depends on the ports and flows that there are, so no other backend edits
                # meanwhile.
                with self._ovs.flows.editing(bridge, deadline):
                    self._edit(bridge, edits, idle, deadline)
            except NetpluginError as error:
                failures.add(edits, error)

    def _is_up(self, name: str) -> bool:
        """Whether frames may come: a row that somebody deleted has its VM again as soon as it is added."""
        port = self._ovs.view.port(name)
        return bool(port and port.interface and port.interface.link_state == "up")

    def _retags(self, change: Change) -> bool:
        """Whether a port leaves a VLAN, in which the datapath may go on forwarding its frames."""
        port = change.port if isinstance(change, SetPort) else None
        if not isinstance(port, VhostPort):
            return False
        row = self._ovs.view.port(port.name)
        if row is None or row.tag == port.tag:
            return False
        self._retagged.add(port.bridge)
        return True

    def _purge_if_due(self, changes: Sequence[Change], deadline: float, failures: Failures) -> None:
        """``changes``: those that are not in effect before the purge."""
        if self._purge_due:
            try:
                self._purge(deadline)
            except NetpluginError as error:
                LOG.warning("datapath flows may go on by flows that were changed: %s", error)
                failures.add([change for change in changes if change.ports], error)

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
        if self._retagged or keeps_old_actions(self._ovs.view.root.version):
            self._ovs.purge_failed = True
            until = max(deadline, time.monotonic() + _PURGE_S)
            for _ in range(_PURGES):
                appctl(sockets, "revalidator/purge", deadline=until)
            for bridge in sorted(self._retagged):
                if self._ovs.view.bridge(bridge) is not None:
                    appctl(sockets, "fdb/flush", bridge, deadline=until)
        self._retagged.clear()
        self._ovs.purge_failed = self._purge_due = False

    def _edit(self, bridge: str, group: Sequence[FlowChange], idle: Collection[str], deadline: float) -> None:
        """Apply all flow changes of a bridge in one bundle, so no frame meets a partial set of flows."""
        if self._ovs.view.bridge(bridge) is None:
            return  # the bridge was deleted, and its flows with it
        edits = [change.edit(self._ovs, deadline) for change in group]
        self._purge_due |= any(
            may_be_used(change, edit, idle) for change, edit in zip(group, edits, strict=True)
        )
        flows, edit = self._ovs.flows, FlowEdit.joined(edits)
        if edit.match_fragments:
            flows.match_fragments(bridge, deadline)
        if edit.opened:
            flows.forward(bridge, edit.opened, True, deadline)
        if edit.sealed:
            flows.forward(bridge, edit.sealed, False, deadline)
        if edit.cookies or edit.gone or edit.flows:
            read = {COOKIE_MARK, *edit.cookies}
            found = flows.replace(bridge, edit.cookies, edit.flows, deadline, edit.gone, sorted(read))
            by_cookie: dict[int, list[Flow]] = {cookie: [] for cookie in read}
            for flow in found:
                by_cookie[flow.cookie].append(flow)
            self.read[bridge] = by_cookie
        if edit.shut:
            flows.forward(bridge, edit.shut, False, deadline)
