"""The view of an OVS database whose rows come in notices as those of ovsdb-server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from netplugin.host.ovs_rows import BACKEND_MARK, BRIDGE_MARK, PORT_MARK
from netplugin.host.ovs_view import Drift, OvsView, VmConnection
from netplugin.host.ovsdb_replica import Api, replica
from tests.lab.ovs_releases import OvsPrograms

_SCHEMA = OvsPrograms.in_path().schema.read_text()
Tables = dict[str, dict[str, Any]]


def text_map(values: Mapping[str, str]) -> list[Any]:
    return ["map", [[key, value] for key, value in values.items()]]


def references(*ids: str) -> list[Any]:
    return ["set", [["uuid", each] for each in ids]]


def identity(name: str) -> uuid.UUID:
    """The id of the row that a test calls so."""
    return uuid.uuid5(uuid.NAMESPACE_OID, name)


def _identified(value: Any) -> Any:
    if isinstance(value, list):
        is_id = len(value) == 2 and value[0] == "uuid"
        return ["uuid", str(identity(value[1]))] if is_id else [_identified(each) for each in value]
    return {n: _identified(each) for n, each in value.items()} if isinstance(value, dict) else value


@dataclass(frozen=True)
class Replica:
    """The replica of a database without a server, and its view."""

    api: Api
    view: OvsView

    def update(self, tables: Tables) -> tuple[Collection[Drift], Collection[VmConnection]]:
        """Take a notice, and return what the view tells of it."""
        rows = {
            t: {str(identity(i)): _identified(row) for i, row in rows.items()} for t, rows in tables.items()
        }
        self.api.idl._Idl__do_parse_update(rows, "update2", self.api.idl.tables)
        return self.view.settle()


def replica_of(tables: Tables, without: Mapping[str, Collection[str]] | None = None) -> Replica:
    """A replica that has read these rows; its transactions reach nobody.

    ``without``: columns that the schema does not have, by table.
    """
    schema = json.loads(_SCHEMA)
    for table, columns in (without or {}).items():
        for column in columns:
            del schema["tables"][table]["columns"][column]
    api = replica("unix:/nowhere", schema)
    api.idl.state = api.idl.IDL_S_MONITORING
    api.idl._session = SimpleNamespace(send=lambda message: 0)
    made = Replica(api, OvsView(api.idl))
    made.update({t: {i: {"initial": row} for i, row in rows.items()} for t, rows in tables.items()})
    return made


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
