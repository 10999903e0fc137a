"""A model of OVS that carries out changes in memory: enough to plan against what was applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drivers.dpdkvhostuser import changes as c
from drivers.dpdkvhostuser import filters, plan
from netplugin.backend import Change, ObservedPort
from netplugin.host.names import VHOST
from netplugin.host.openflow import COOKIE_MARK, Flow
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsInterface, OvsPort

SETTINGS = OvsSettings(
    connection="unix:/nowhere",
    rundir=Path("/nowhere"),
    vhost_socket_dir=Path("/run/vhost"),
    vhost_socket_group="qemu",
    bridge_mappings={"net1": "br1", "net2": "br2"},
    uplinks={"net2": ("0000:03:00.0",)},
)


@dataclass
class Bridge:
    """``ours`` is its mark; ``flows`` has everybody's."""

    ours: bool = True
    datapath_type: str = "netdev"
    fail_mode: str | None = "secure"
    ports: dict[str, OvsPort] = field(default_factory=dict)
    flows: set[Flow] = field(default_factory=set)


class Model:
    """What OVS holds. Foreign things are ports without a mark and flows without our cookie."""

    def __init__(self) -> None:
        self.bridges: dict[str, Bridge] = {}
        self._next_ofport = 1

    def add_row(
        self, bridge: str, name: str, port: Mapping[str, Any], interface: Mapping[str, Any]
    ) -> None:
        assert all(name not in b.ports for b in self.bridges.values()), "a name is taken once"
        row = OvsInterface(
            name=name, type="", options={}, external_ids={}, mtu_request=None, mtu=None,
            ofport=self._next_ofport, error=None, link_state=None,
        )  # fmt: skip
        self._next_ofport += 1
        empty = OvsPort(name, bridge, None, None, {}, row)
        self.bridges[bridge].ports[name] = _set(empty, port, interface)

    def apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._apply(change)

    def _apply(self, change: Change) -> None:
        match change:
            case c.CreateBridge():
                self.bridges.setdefault(change.name, Bridge())
            case c.SecureBridge():
                self.bridges[change.name].fail_mode = "secure"
            case c.RemoveBridge():
                del self.bridges[change.name]
            case c.AddPort(port=row) | c.AddUplink(uplink=row):
                self.add_row(row.bridge, row.name, row.port_columns(), row.interface_columns())
            case c.SetPort(port=row) | c.SetUplink(uplink=row):
                ports = self.bridges[row.bridge].ports
                ports[row.name] = _set(ports[row.name], row.port_columns(), row.interface_columns())
            case c.RemovePort() | c.RemoveUplink():
                del self.bridges[change.bridge].ports[change.name]
            case c.SetFilter():
                port = self.bridges[change.bridge].ports[change.name]
                assert port.interface and port.interface.ofport
                self._drop(change.bridge, filters.port_cookie(change.port_id))
                self.bridges[change.bridge].flows |= filters.port_flows(
                    change.port_id, port.interface.ofport, change.spec
                )
            case c.SetBridgeFlows():
                self._drop(change.bridge, COOKIE_MARK)
                self.bridges[change.bridge].flows |= self._wanted_flows(change.bridge)
            case c.DropFlows():
                for cookie in change.cookies:
                    self._drop(change.bridge, cookie)
            case _:
                raise AssertionError(f"a change the model does not know: {change}")

    def observe(self, ports: Sequence[str] | None = None) -> plan.Seen:
        rows = {
            p.owner[1]: p
            for b in self.bridges.values()
            for p in b.ports.values()
            if p.owner and (ports is None or p.owner[1] in ports)
        }
        ours = {name: b for name, b in self.bridges.items() if b.ours or name in ("br1", "br2")}
        return plan.Seen(
            ports={i: ObservedPort() for i in rows},
            rows=rows,
            flows={
                i: frozenset(
                    f
                    for f in self.bridges[str(r.bridge)].flows
                    if f.cookie == filters.port_cookie(i)
                )
                for i, r in rows.items()
            },
            bridges={name: self._seen_bridge(name, b, rows) for name, b in ours.items()},
            taken_names=frozenset(
                name
                for b in self.bridges.values()
                for name, p in b.ports.items()
                if name.startswith(VHOST) and not p.owner
            ),
            vhost_sockets=len(rows),
        )

    def foreign(self) -> dict[str, Any]:
        """All that is not ours, to compare before and after."""
        return {
            name: (
                bridge.ours or (bridge.datapath_type, bridge.fail_mode),
                {n: p for n, p in bridge.ports.items() if not p.owner and not _is_uplink(p)},
                {f for f in bridge.flows if f.cookie >> 48 != COOKIE_MARK >> 48},
            )
            for name, bridge in self.bridges.items()
            if not bridge.ours
            or any(not p.owner and not _is_uplink(p) for p in bridge.ports.values())
        }

    def _seen_bridge(
        self, name: str, bridge: Bridge, rows: Mapping[str, OvsPort]
    ) -> plan.SeenBridge:
        strangers = {n: p for n, p in bridge.ports.items() if not p.owner}
        uplinks = {n: p for n, p in strangers.items() if _is_uplink(p)}
        owned = {
            p.owner[1]: (p.interface and p.interface.mtu_request) or 0
            for p in bridge.ports.values()
            if p.owner
        }
        marked = {f.cookie for f in bridge.flows if f.cookie >> 48 == COOKIE_MARK >> 48}
        return plan.SeenBridge(
            name=name,
            ours=bridge.ours,
            datapath_type=bridge.datapath_type,
            fail_mode=bridge.fail_mode,
            neighbours=len([i for i in owned if i not in rows]),
            neighbours_mtu=max((m for i, m in owned.items() if i not in rows), default=0),
            uplinks=uplinks,
            has_strangers=len(strangers) > len(uplinks),
            wanted_flows=self._wanted_flows(name) if bridge.ours else frozenset(),
            flows=frozenset(f for f in bridge.flows if f.cookie == COOKIE_MARK),
            stray_cookies=frozenset(
                marked - {COOKIE_MARK} - {filters.port_cookie(i) for i in owned}
            ),
        )

    def _wanted_flows(self, name: str) -> frozenset[Flow]:
        strangers = [p for p in self.bridges[name].ports.values() if not p.owner]
        return filters.bridge_flows(p.interface.ofport or 0 for p in strangers if p.interface)

    def _drop(self, bridge: str, cookie: int) -> None:
        self.bridges[bridge].flows = {f for f in self.bridges[bridge].flows if f.cookie != cookie}


def _is_uplink(port: OvsPort) -> bool:
    return "netplugin-uplink" in port.external_ids


def _set(row: OvsPort, port: Mapping[str, Any], interface: Mapping[str, Any]) -> OvsPort:
    assert row.interface is not None
    new = replace(row.interface, **_columns(interface, row.interface.external_ids))
    return replace(row, interface=new, **_columns(port, row.external_ids))


def _columns(columns: Mapping[str, Any], ids: Mapping[str, str]) -> dict[str, Any]:
    """As the database takes them: an optional column is a list, external_ids are merged."""
    plain = {k: v[0] if isinstance(v, list) else v for k, v in columns.items()}
    return plain | {"external_ids": {**ids, **plain.get("external_ids", {})}}
