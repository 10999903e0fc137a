"""A mirror of an OVS database that is told its rows as ovsdb-server does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from netplugin.host.ovs_mirror import Mirror
from netplugin.host.ovs_rows import BACKEND_MARK, BRIDGE_MARK, COLUMNS, KEYS, PORT_MARK
from netplugin.host.ovsdb_rows import Rows
from tests.lab.ovs_releases import OvsPrograms

_SCHEMA = json.loads(OvsPrograms.in_path().schema.read_text())
Tables = dict[str, dict[str, Any]]


def text_map(values: Mapping[str, str]) -> list[Any]:
    return ["map", [[key, value] for key, value in values.items()]]


def references(*ids: str) -> list[Any]:
    return ["set", [["uuid", each] for each in ids]]


def mirror_of(tables: Tables) -> Mirror:
    """A mirror that has read these rows."""
    mirror = Mirror(lambda _: None)
    first = {t: {i: {"initial": row} for i, row in rows.items()} for t, rows in tables.items()}
    mirror.reset(Rows(COLUMNS, _SCHEMA, KEYS), first)
    return mirror


def inserted(tables: Tables) -> dict[str, dict[str, Any]]:
    """The notice of new rows."""
    return {t: {i: {"insert": row} for i, row in rows.items()} for t, rows in tables.items()}


def marks(backend: str, port_id: str) -> dict[str, str]:
    return {PORT_MARK: port_id, BACKEND_MARK: backend}


def vhost_rows(port_id: str, number: int, backend: str = "dpdkvhostuser") -> Tables:
    """The rows of a VM's port that works, without its bridge; their ids are ``p-`` and ``i-`` port_id."""
    name, ids = f"npv{port_id}", marks(backend, port_id)
    interface = {
        "name": name,
        "type": "dpdkvhostuserclient",
        "options": text_map({"vhost-server-path": f"/run/np/{port_id}"}),
        "external_ids": text_map({"iface-id": port_id, PORT_MARK: port_id}),
        "mtu_request": 1500,
        "mtu": 1500,
        "ofport": number,
        "link_state": "down",
        "status": text_map({"status": "disconnected", "mode": "client", "numa": "0"}),
    }
    port = {
        "name": name,
        "interfaces": ["uuid", f"i-{port_id}"],
        "tag": 100,
        "vlan_mode": "access",
        "external_ids": text_map(ids),
    }
    return {"Port": {f"p-{port_id}": port}, "Interface": {f"i-{port_id}": interface}}


def bridge_row(name: str, *ports: str, network: str = "") -> dict[str, Any]:
    mark = {BRIDGE_MARK: network} if network else {}
    return {
        "name": name,
        "datapath_type": "netdev",
        "fail_mode": "secure",
        "external_ids": text_map(mark),
        "ports": references(*ports),
    }
