"""The dpdkvhostuser backend: reads OVS into values, lets ``plan`` think, and writes what it says."""

from __future__ import annotations

import contextlib
import grp
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from drivers.dpdkvhostuser import changes as c
from drivers.dpdkvhostuser import filters
from drivers.dpdkvhostuser.options import GROUP, OPTIONS
from drivers.dpdkvhostuser.plan import Seen, SeenBridge, make_plan, wanted_port
from netplugin.backend import (
    Applied,
    Backend,
    Change,
    Intent,
    ObservedPort,
    Plan,
    Usability,
    Wake,
    unknown_network,
)
from netplugin.errors import (
    HostError,
    NetpluginError,
    OperationTimeout,
)
from netplugin.host import ovs_commands as write
from netplugin.host.names import VHOST, device_name
from netplugin.host.openflow import COOKIE_MARK, Flow
from netplugin.host.ovs_rows import (
    BRIDGE_MARK,
    UPLINK_MARK,
    OvsBridge,
    OvsPort,
)
from netplugin.host.ovsdb import CommandFactory
from netplugin.host.shared import Host
from netplugin.host.vswitchd import appctl, parse_pmd
from netplugin.libvirt_xml import vhostuser_interface
from netplugin.models import Binding, DomainRequirements, Features, PortSpec

_READ_S = 2.0  # seconds one read of the flows may take
_MANY = 8  # with more ports than this, one dump of all flows is quicker than one for each


class DpdkVhostUser(Backend[Seen]):
    """See ``netplugin.backend.Backend``."""

    name: ClassVar[str] = c.BACKEND
    features: ClassVar[Features] = Features(
        networks=("flat", "vlan"),
        live_migration=False,
        qos=False,
        port_security=("mac", "ip"),
        max_queues=128,
        needs_shared_memory=True,
    )
    # The guest holds the rings and the number of queues: both are the domain's, not the port's.
    fixed_fields: ClassVar[frozenset[str]] = frozenset(
        {"vm_id", "mac", "backend", "queues", "rx_queue_size", "tx_queue_size", "numa_node"}
    )

    def __init__(self, conf: Any, host: Host) -> None:
        conf.register_opts(OPTIONS, group=GROUP)
        self._guest_hugepages: bool = conf[GROUP].guest_hugepages
        self._ovs = host.ovs
        self._settings = host.ovs.settings
        _make_socket_directory(self._settings.vhost_socket_dir, self._settings.vhost_socket_group)

    # -- what can be said without touching the host ---------------------------------------------

    def probe(self) -> Usability:
        state = self._ovs.usable()
        if not state.usable:
            return state
        root = self._ovs.mirror.root
        built_with = root.dpdk_version not in (None, "none")
        if built_with and not root.dpdk_initialized:
            return Usability(
                False, "OVS runs without DPDK (dpdk_initialized is false)",
                "ovs-vsctl set Open_vSwitch . other_config:dpdk-init=true, restart ovs-vswitchd and "
                "read its log", "dpdk-init",
            )  # fmt: skip
        if c.PORT_TYPE not in root.iface_types:
            return Usability(
                False, f"this OVS has no interface type {c.PORT_TYPE}: it is built without DPDK",
                "install an OVS with DPDK (Debian: openvswitch-switch-dpdk)", "iface-types",
            )  # fmt: skip
        several = sorted(n for n, devices in self._settings.uplinks.items() if len(devices) > 1)
        if several:
            return Usability(
                False, f"[ovs] uplinks has several devices for {', '.join(several)}: bonds are not "
                "available yet", "keep one device for each physical network", "uplink",
            )  # fmt: skip
        return _socket_directory(self._settings.vhost_socket_dir, self._settings.vhost_socket_group)

    def validate(self, spec: PortSpec) -> None:
        super().validate(spec)
        known, name = self._settings.bridge_mappings, spec.network.physical_network
        if name not in known:
            raise unknown_network(name, "[ovs] bridge_mappings", known)

    def binding(self, intent: Intent) -> Binding:
        assert intent.spec is not None
        port = wanted_port(self._settings, intent.port_id, intent.spec)
        return Binding.model_validate(
            {
                "vif_type": "vhostuser",
                "interface_xml": vhostuser_interface(intent.spec, port.socket),
                "domain_requirements": DomainRequirements(
                    shared_memory=True,
                    hugepages=self._guest_hugepages,
                    numa_node=intent.spec.numa_node,
                ),
                "socket_path": port.socket,
                "bridge": port.bridge,
                "device": port.name,
            }
        )

    def plan(self, intents: Sequence[Intent], observed: Seen) -> Plan:
        return make_plan(self._settings, intents, observed)

    # -- reading ---------------------------------------------------------------------------------

    def observe(self, ports: Collection[str] | None, deadline: float) -> Seen:
        self._ovs.db.require_certain()
        mirror = self._ovs.mirror
        if ports is None:
            rows = mirror.all_owned(self.name)
        else:
            found = {port_id: mirror.owned(self.name, port_id) for port_id in ports}
            rows = {port_id: row for port_id, row in found.items() if row is not None}
        bridges = self._bridges()
        start = time.monotonic()
        flows = self._flows(rows, bridges, deadline, whole=ports is None)
        flows_ms = (time.monotonic() - start) * 1e3
        seen = {
            name: self._seen_bridge(b, rows, flows, whole=ports is None)
            for name, b in bridges.items()
        }
        starved = self._starved(rows.values(), deadline)
        return Seen(
            ports={
                i: _observed_port(row, seen.get(str(row.bridge)), starved)
                for i, row in rows.items()
            },
            rows=rows,
            flows=_by_port(rows, flows),
            bridges=seen,
            taken_names=self._taken_names(ports),
            vhost_sockets=mirror.count_interfaces("dpdkvhostuser", "dpdkvhostuserclient"),
            socket_files=self._socket_files(rows if ports is None else ports),
            timings_ms={"openflow": flows_ms},
        )

    def _starved(self, rows: Iterable[OvsPort], deadline: float) -> frozenset[str]:
        """Ports that look starved in the database and are in truth: no PMD thread polls them.

        After a restart with the VM on the socket, vswitchd 3.1 may set a device up and leave the
        row as it was (``mtu`` 0, link down) for good.
        """
        suspects = {row.name for row in rows if row.interface and row.interface.starved}
        if not suspects:
            return frozenset()
        until = min(deadline, time.monotonic() + _READ_S)
        shown = appctl(self._settings.rundir, "dpif-netdev/pmd-rxq-show", deadline=until)
        return frozenset(suspects - {q.port for core in parse_pmd(shown, "") for q in core.queues})

    def _bridges(self) -> dict[str, OvsBridge]:
        """The bridges we may have to do with: those the operator mapped, and those we made."""
        mapped = set(self._settings.bridge_mappings.values())
        return {
            b.name: b
            for b in self._ovs.mirror.bridges()
            if b.name in mapped or BRIDGE_MARK in b.external_ids
        }

    def _flows(
        self,
        rows: Mapping[str, OvsPort],
        bridges: Mapping[str, OvsBridge],
        deadline: float,
        *,
        whole: bool,
    ) -> dict[str, list[Flow]]:
        """Our flows by bridge, read only from bridges that the ports in question are on.

        A bridge that does not tell in time is left out when only some ports are in question: then
        their flows are unknown, which ``plan`` takes as not there, and a port can still be removed
        from under a vswitchd that hangs.
        """
        by_bridge: dict[str, list[str]] = defaultdict(list)
        for port_id, row in rows.items():
            by_bridge[str(row.bridge)].append(port_id)
        wanted = set(bridges) if whole else set(by_bridge) & set(bridges)
        flows: dict[str, list[Flow]] = {}
        for bridge in sorted(wanted):
            ids = by_bridge[bridge]
            owners: list[int | None] = [None]
            if not whole and len(ids) <= _MANY:
                owners = [filters.port_cookie(i) for i in ids]
            until = min(deadline, time.monotonic() + _READ_S)
            try:
                found = [f for o in owners for f in self._ovs.flows.dump(bridge, o, until)]
            except OperationTimeout:
                if whole:
                    raise
                continue
            flows[bridge] = list(dict.fromkeys(found))
        return flows

    def _seen_bridge(
        self,
        bridge: OvsBridge,
        rows: Mapping[str, OvsPort],
        flows: Mapping[str, list[Flow]],
        *,
        whole: bool,
    ) -> SeenBridge:
        mirror = self._ovs.mirror
        strangers = [p for p in mirror.strangers_on(bridge) if p.name != bridge.name]
        uplinks = {p.name: p for p in strangers if UPLINK_MARK in p.external_ids}
        read = flows.get(bridge.name)
        strays: frozenset[int] = frozenset()
        if whole and read is not None:
            known = {filters.port_cookie(p.owner[1]) for p in mirror.owned_on(bridge) if p.owner}
            strays = frozenset(f.cookie for f in read) - known - {COOKIE_MARK}
        here = {port_id for port_id, row in rows.items() if row.bridge == bridge.name}
        neighbours = mirror.count_owned_on(bridge) - len(here)
        ours = BRIDGE_MARK in bridge.external_ids
        return SeenBridge(
            name=bridge.name,
            ours=ours,
            datapath_type=bridge.datapath_type,
            fail_mode=bridge.fail_mode,
            neighbours=neighbours,
            neighbours_mtu=self._largest_mtu(bridge, here) if uplinks and neighbours else 0,
            uplinks=uplinks,
            has_strangers=len(strangers) > len(uplinks),
            wanted_flows=self._wanted_bridge_flows(bridge) if ours else frozenset(),
            flows=None if read is None else frozenset(f for f in read if f.cookie == COOKIE_MARK),
            stray_cookies=strays,
        )

    def _largest_mtu(self, bridge: OvsBridge, without: Collection[str]) -> int:
        ports = [
            p for p in self._ovs.mirror.owned_on(bridge) if p.owner and p.owner[1] not in without
        ]
        return max(((p.interface and p.interface.mtu_request) or 0 for p in ports), default=0)

    def _wanted_bridge_flows(self, bridge: OvsBridge) -> frozenset[Flow]:
        ofports = (p.interface.ofport for p in self._ovs.mirror.strangers_on(bridge) if p.interface)
        return filters.bridge_flows(o for o in ofports if o and o > 0)

    def _taken_names(self, ports: Collection[str] | None) -> frozenset[str]:
        """Names of the kind we give that another's port has: of these ports, or all there are."""
        mirror = self._ovs.mirror
        if ports is None:
            found = mirror.names_of_others(self.name)
            return frozenset(name for name in found if name.startswith(VHOST))
        rows = {port_id: mirror.port(device_name(VHOST, port_id)) for port_id in ports}
        return frozenset(r.name for i, r in rows.items() if r and r.owner != (self.name, i))

    def _socket_files(self, ports: Collection[str]) -> dict[str, str]:
        directory = self._settings.vhost_socket_dir
        paths = {port_id: directory / device_name(VHOST, port_id) for port_id in ports}
        return {port_id: str(path) for port_id, path in paths.items() if path.exists()}

    # -- writing ---------------------------------------------------------------------------------

    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        failed: dict[str, NetpluginError] = {}
        start = time.monotonic()
        self._write_rows(changes, deadline, failed)
        rows_done = time.monotonic()
        self._write_flows(changes, deadline, failed)
        for change in changes:
            if isinstance(change, c.RemoveSocket):
                _remove_socket(change, failed)
        return Applied(
            failed,
            {
                "vswitchd": (rows_done - start) * 1e3,
                "openflow": (time.monotonic() - rows_done) * 1e3,
            },
        )

    def _write_rows(
        self, changes: Sequence[Change], deadline: float, failed: dict[str, NetpluginError]
    ) -> None:
        """One transaction for all; if the database refuses it, one for each port, to find whose."""
        changes = [change for change in changes if _command(change) is not None]
        if not changes:
            return
        try:
            self._commit(changes, deadline)
        except NetpluginError as error:
            ports = sorted({port for change in changes for port in change.ports})
            if error.code != "host_error" or len(ports) < 2:
                failed.update({port: error.for_port(port) for port in ports})
                return
            for port in ports:
                try:
                    self._commit([ch for ch in changes if port in ch.ports], deadline)
                except NetpluginError as own:
                    failed[port] = own.for_port(port)

    def _commit(self, changes: Sequence[Change], deadline: float) -> None:
        commands = [_command(change) for change in changes]
        self._ovs.write([command for command in commands if command], deadline)

    def _write_flows(
        self, changes: Sequence[Change], deadline: float, failed: dict[str, NetpluginError]
    ) -> None:
        by_bridge: dict[str, list[Change]] = defaultdict(list)
        for change in changes:
            if isinstance(change, c.SetFilter | c.SetBridgeFlows | c.DropFlows):
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
        flows: list[Flow] = []
        for change in group:
            if isinstance(change, c.DropFlows):
                cookies += change.cookies
            elif isinstance(change, c.SetBridgeFlows):
                cookies.append(COOKIE_MARK)
                flows += self._wanted_bridge_flows(row)
            elif isinstance(change, c.SetFilter):
                cookies.append(filters.port_cookie(change.port_id))
                port = self._ovs.mirror.port(change.name)
                ofport = port.interface.ofport if port and port.interface else None
                if ofport and ofport > 0:
                    flows += filters.port_flows(change.port_id, ofport, change.spec)
        self._ovs.flows.replace(bridge, cookies, flows, deadline)

    # -- news and the end ------------------------------------------------------------------------

    def watch(self, wake: Callable[[Wake], None]) -> None:
        self._ovs.subscribe(self.name, wake)


def _command(change: Change) -> CommandFactory | None:
    """The OVSDB write a change needs; None for a change of flows."""
    match change:
        case c.CreateBridge():
            marks = {BRIDGE_MARK: change.physical_network}
            return partial(
                write.AddBridge, name=change.name, datapath_type="netdev", fail_mode="secure",
                external_ids=marks,
            )  # fmt: skip
        case c.SecureBridge():
            return partial(write.SetBridge, name=change.name, fail_mode=["secure"])
        case c.RemoveBridge():
            return partial(write.DeleteBridge, name=change.name)
        case c.AddUplink(uplink=row) | c.AddPort(port=row):
            return partial(
                write.AddPort, bridge=row.bridge, name=row.name, port=row.port_columns(),
                interface=row.interface_columns(),
            )  # fmt: skip
        case c.SetUplink(uplink=row) | c.SetPort(port=row):
            return partial(
                write.SetPort, name=row.name, port=row.port_columns(),
                interface=row.interface_columns(),
            )  # fmt: skip
        case c.RemoveUplink() | c.RemovePort():
            return partial(write.DeletePort, bridge=change.bridge, name=change.name)
    return None


def _by_port(
    rows: Mapping[str, OvsPort], flows: Mapping[str, list[Flow]]
) -> dict[str, frozenset[Flow]]:
    by_cookie: dict[int, set[Flow]] = defaultdict(set)
    for found in flows.values():
        for flow in found:
            by_cookie[flow.cookie].add(flow)
    return {i: frozenset(by_cookie.get(filters.port_cookie(i), ())) for i in rows}


def _observed_port(
    row: OvsPort, bridge: SeenBridge | None, starved: Collection[str]
) -> ObservedPort:
    interface = row.interface
    details = {
        "device": row.name,
        "bridge": row.bridge,
        "tag": row.tag,
        "ofport": interface.ofport if interface else None,
        "mtu": interface.mtu if interface else None,
        "link_state": interface.link_state if interface else None,
        "connected": interface.connected if interface else False,
    }
    return ObservedPort(_fault(row, starved) or _uplink_fault(bridge), details)


def _fault(row: OvsPort, starved: Collection[str] = ()) -> str | None:
    interface = row.interface
    if interface is None:
        return "the port has no interface"
    if interface.error:
        return f"OVS says of {row.name}: {interface.error}"
    if not interface.ofport or interface.ofport < 0:
        return f"OVS could not make {row.name} (ofport {interface.ofport})"
    if row.name in starved:
        return (
            f"the VM is connected and OVS has not set up {row.name}: it found no memory for its "
            "buffers (look for 'memory pool' in ovs-vswitchd.log; more dpdk-socket-mem, or "
            "per-port-memory)"
        )
    return None


def _uplink_fault(bridge: SeenBridge | None) -> str | None:
    for name, row in sorted(bridge.uplinks.items()) if bridge else ():
        fault = _fault(row)
        if fault:
            return f"uplink of {bridge.name if bridge else name}: {fault}"
    return None


def _remove_socket(change: c.RemoveSocket, failed: dict[str, NetpluginError]) -> None:
    try:
        Path(change.path).unlink(missing_ok=True)
    except OSError as refused:
        error = HostError(f"{change.path}: {refused.strerror}", step="socket-directory")
        failed.update({port: error.for_port(port) for port in change.ports})


def _make_socket_directory(directory: Path, group: str) -> None:
    """At the agent's start only: /run is empty after a boot. What fails here, ``probe`` tells."""
    with contextlib.suppress(OSError, LookupError):
        directory.mkdir(parents=True, exist_ok=True)
        shutil.chown(directory, group=group)
        directory.chmod(0o2770)


def _socket_directory(directory: Path, group: str) -> Usability:
    """OVS takes a port with any path and fails later, in its log: look at the directory before."""
    step = "socket-directory"
    fix = f"install -d -m 2770 -g {group} {directory}"
    try:
        found = directory.stat()
    except OSError as missing:
        return Usability(False, f"{directory}: {missing.strerror}", fix, step)
    try:
        wanted = grp.getgrnam(group).gr_gid
    except KeyError:
        return Usability(
            False,
            f"there is no group {group!r}",
            "set [ovs] vhost_socket_group to QEMU's group",
            step,
        )
    if not stat.S_ISDIR(found.st_mode):
        return Usability(False, f"{directory} is not a directory", fix, step)
    if found.st_gid != wanted or stat.S_IMODE(found.st_mode) & 0o777 != 0o770:
        return Usability(
            False, f"{directory} is not for group {group} alone "
            f"(mode {stat.S_IMODE(found.st_mode):o}, group {found.st_gid})", fix, step,
        )  # fmt: skip
    return Usability(True)
