"""Ports made by ovsdbapp alone, one transaction each: the library below os-vif."""

from __future__ import annotations

from ovsdbapp.backend.ovs_idl import connection  # type: ignore[import-not-found]
from ovsdbapp.schema.open_vswitch.impl_idl import OvsdbIdl  # type: ignore[import-not-found]

_TIMEOUT_S = 120


class Ovsdbapp:
    prefix = "app"

    def __init__(self, address: str, bridge: str) -> None:
        idl = connection.OvsdbIdl.from_server(address, "Open_vSwitch")
        self._api = OvsdbIdl(connection.Connection(idl, _TIMEOUT_S))
        self._bridge = bridge

    def name(self, number: int) -> str:
        return f"{self.prefix}{number}"

    def plug(self, number: int) -> None:
        name = self.name(number)
        port = [("tag", 100), ("vlan_mode", "access")]
        interface = [
            ("type", "dpdkvhostuserclient"),
            ("options", {"vhost-server-path": f"/run/np/{name}"}),
            ("mtu_request", 1500),
            ("external_ids", {"iface-id": name}),
        ]
        # `may_exist=False`: with True the values of a port that is there would be left as they are.
        with self._api.transaction(check_error=True) as transaction:
            transaction.add(self._api.add_port(self._bridge, name, may_exist=False))
            transaction.add(self._api.db_set("Port", name, *port))
            transaction.add(self._api.db_set("Interface", name, *interface))

    def unplug(self, number: int) -> None:
        self._api.del_port(self.name(number), self._bridge).execute(check_error=True)


def make(address: str, bridge: str) -> Ovsdbapp:
    return Ovsdbapp(address, bridge)
