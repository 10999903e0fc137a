"""Makes changes: one OVSDB transaction for all, then the flows, in one bundle for each bridge."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from drivers.dpdkvhostuser import changes as c
from drivers.dpdkvhostuser import filters, policers, sockets, tunnels
from drivers.dpdkvhostuser.observe import Observer
from drivers.dpdkvhostuser.wanted import MERGED_OF_UPLINKS, TO_OVERLAY, is_ours, vxlan_name
from netplugin.backend import Applied, Change
from netplugin.errors import HostError, NetpluginError
from netplugin.host import ovs_commands as write
from netplugin.host.openflow import COOKIE_MARK, Flow
from netplugin.host.ovs import OvsHost
from netplugin.host.ovs_rows import BRIDGE_MARK, OvsInterface
from netplugin.host.ovsdb import CommandFactory
from netplugin.host.vswitchd import appctl

LOG = logging.getLogger(__name__)
_MTU_S = 2.0  # vswitchd sets an MTU after it has said that it is configured
_Failed = dict[str, NetpluginError]


class Applier:
    """See ``netplugin.backend.Backend.apply``."""

    def __init__(self, ovs: OvsHost, observer: Observer) -> None:
        self._ovs = ovs
        self._observer = observer

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        failed: _Failed = {}
        start = time.monotonic()
        self._write_rows(changes, deadline, failed)
        self._wait_for_mtu(changes, failed, deadline)
        self._require_policers(changes, deadline, failed)
        rows_done = time.monotonic()
        self._write_flows(changes, deadline, failed)
        for change in changes:
            if isinstance(change, c.RemoveSocket):
                try:
                    sockets.remove(change.path)
                except HostError as error:
                    failed.update({port: error.for_port(port) for port in change.ports})
        return Applied(
            failed,
            {
                "vswitchd": (rows_done - start) * 1e3,
                "openflow": (time.monotonic() - rows_done) * 1e3,
            },
        )

    # -- rows ------------------------------------------------------------------------------------

    def _write_rows(self, changes: Sequence[Change], deadline: float, failed: _Failed) -> None:
        """One transaction for all; if the database refuses it, one for each port, to find whose."""
        changes = [change for change in changes if _command(change) is not None]
        if not changes:
            return
        try:
            self._commit(changes, deadline)
        except NetpluginError as error:
            ports = sorted({port for change in changes for port in change.ports})
            LOG.warning("a transaction for %d ports failed: %s", len(ports), error)
            if error.code != "host_error" or len(ports) < 2:
                failed.update({port: error.for_port(port) for port in ports})
                return
            done: list[Change] = []  # what ports share is written for the first that goes through
            for port in ports:
                own = [change for change in changes if port in change.ports and change not in done]
                try:
                    self._commit(own, deadline)
                    done += own
                except NetpluginError as refused:
                    failed[port] = refused.for_port(port)

    def _commit(self, changes: Sequence[Change], deadline: float) -> None:
        commands = [_command(change) for change in changes]
        self._ovs.write([command for command in commands if command], deadline)

    def _wait_for_mtu(self, changes: Sequence[Change], failed: _Failed, deadline: float) -> None:
        """Until the MTUs asked for are there; one that does not come is found when read back."""
        wanted: list[tuple[str, int, bool]] = []
        for change in changes:
            if any(port in failed for port in change.ports):
                continue
            if isinstance(change, c.AddUplink | c.SetUplink):
                wanted.append((change.uplink.name, change.uplink.mtu, False))
            elif isinstance(change, c.SetPort):
                wanted.append((change.port.name, change.port.mtu, True))
        if wanted:
            until = min(deadline, time.monotonic() + _MTU_S)
            self._ovs.mirror.wait_for(lambda: all(self._has_mtu(*w) for w in wanted), until)

    def _has_mtu(self, name: str, mtu: int, may_wait_for_vm: bool) -> bool:
        port = self._ovs.mirror.port(name)
        return all(
            i.mtu == mtu or bool(i.error) or (may_wait_for_vm and not i.mtu)
            for i in (port.interfaces if port else ())
        )

    def _require_policers(
        self, changes: Sequence[Change], deadline: float, failed: _Failed
    ) -> None:
        """That vswitchd took the policers that were changed: the database does not tell."""
        for change in changes:
            if not isinstance(change, c.SetQos | c.AddPort) or change.port.port_id in failed:
                continue
            port = change.port
            if isinstance(change, c.AddPort) and port.receives is None:
                continue
            if self._interface(port.name) is None:
                continue  # vswitchd could not make it at all, and says so
            try:
                shown = appctl(self._ovs.settings.rundir, "qos/show", port.name, deadline=deadline)
                wrong = policers.refused(shown, port.receives)
                if wrong:
                    raise HostError(f"{port.name}: {wrong}", step="qos")
            except NetpluginError as error:
                failed[port.port_id] = error.for_port(port.port_id)

    def _interface(self, name: str) -> OvsInterface | None:
        """The interface of a port, if vswitchd could make it."""
        port = self._ovs.mirror.port(name)
        works = port is not None and port.interface is not None and port.interface.works_at
        return port.interface if port and works else None

    # -- flows -----------------------------------------------------------------------------------

    def _write_flows(self, changes: Sequence[Change], deadline: float, failed: _Failed) -> None:
        by_bridge: dict[str, list[Change]] = defaultdict(list)
        for change in changes:
            if isinstance(change, c.SetFilter | c.SetBridgeFlows | c.SetNetwork | c.DropFlows):
                if not any(port in failed for port in change.ports) or len(change.ports) > 1:
                    by_bridge[change.bridge].append(change)
        for bridge, group in by_bridge.items():
            try:
                self._bundle(bridge, group, deadline)
            except NetpluginError as error:
                ports = {port for change in group for port in change.ports}
                failed.update({p: error.for_port(p) for p in ports if p not in failed})

    def _bundle(self, bridge: str, group: Sequence[Change], deadline: float) -> None:
        """All flow changes of a bridge at once: no frame meets a half-made set."""
        row = self._ovs.mirror.bridge(bridge)
        if row is None:
            return  # the bridge has gone, and its flows with it
        cookies: list[int] = []
        gone: list[Flow] = []
        flows: list[Flow] = []
        for change in group:
            match change:
                case c.DropFlows():
                    cookies += change.cookies
                case c.SetBridgeFlows():
                    cookies.append(COOKIE_MARK)
                    flows += self._observer.wanted_bridge_flows(row)
                case c.SetFilter():
                    cookies.append(filters.port_cookie(change.port_id))
                    interface = self._interface(change.name)
                    if interface and interface.works_at:
                        flows += filters.port_flows(change.port_id, interface.works_at, change.spec)
                case c.SetNetwork():
                    old, new = self._network(change, deadline)
                    gone += old
                    flows += new
        if cookies or gone or flows:
            self._ovs.flows.replace(bridge, cookies, flows, deadline, gone)

    def _network(self, change: c.SetNetwork, deadline: float) -> tuple[list[Flow], list[Flow]]:
        """What must go and what must come, so that what is right is not touched: traffic is on it."""
        local_ip = self._ovs.settings.local_ip
        tunnel = self._interface(vxlan_name(change.overlay.spec.udp_port))
        patch = self._interface(TO_OVERLAY)
        if not (local_ip and tunnel and tunnel.works_at and patch and patch.works_at):
            return [], []
        own, learned = (
            [f for f in self._ovs.flows.dump(change.bridge, cookie, deadline) if f.cookie == cookie]
            for cookie in tunnels.with_learned(tunnels.network_cookie(change.overlay.network_id))
        )
        wanted = tunnels.network_flows(change.overlay, local_ip, tunnel.works_at, patch.works_at)
        stays = {flow.identity for flow in wanted}
        gone = [flow for flow in own if flow.identity not in stays]
        gone += tunnels.stale(learned, change.overlay, local_ip, tunnel.works_at)
        return gone, [flow for flow in wanted if flow not in own]


def _command(change: Change) -> CommandFactory | None:
    """The OVSDB write a change needs; None for a change of flows."""
    match change:
        case c.CreateBridge():
            return partial(
                write.AddBridge, name=change.name, datapath_type="netdev", fail_mode="secure",
                external_ids={BRIDGE_MARK: change.mark},
            )  # fmt: skip
        case c.SecureBridge():
            return partial(write.SetBridge, name=change.name, fail_mode=["secure"])
        case c.RemoveBridge():
            return partial(write.DeleteBridge, name=change.name)
        case c.AddPort(port=row):
            return partial(
                write.AddPort, bridge=row.bridge, name=row.name, port=row.port_columns(),
                interfaces=row.interfaces(), qos=row.qos_columns(),
            )  # fmt: skip
        case c.AddUplink(uplink=shared) | c.AddTunnelPort(port=shared):
            return partial(
                write.AddPort, bridge=shared.bridge, name=shared.name, port=shared.port_columns(),
                interfaces=shared.interfaces(),
            )  # fmt: skip
        case c.SetUplink(uplink=shared):
            return partial(
                write.SetPort, name=shared.name, port=shared.port_columns(),
                interfaces=shared.interfaces(), merged=MERGED_OF_UPLINKS,
            )  # fmt: skip
        case c.SetPort(port=wish) | c.SetTunnelPort(port=wish):
            return partial(
                write.SetPort,
                name=wish.name,
                port=wish.port_columns(),
                interfaces=wish.interfaces(),
            )
        case c.SetQos(port=row):
            return partial(write.SetQos, name=row.name, qos=row.qos_columns(), ours=is_ours)
        case c.DropQos():
            return partial(write.DeleteQos, row=change.row)
        case c.RemoveUplink() | c.RemovePort() | c.RemoveTunnelPort():
            return partial(write.DeletePort, bridge=change.bridge, name=change.name, ours=is_ours)
    return None
