"""Ports made by os-vif's plug-in for Open vSwitch: what OpenStack Nova does on a hypervisor."""

from __future__ import annotations

import tempfile
import uuid
from typing import Any

#: Ids of ports that are there again are those they had.
_NAMES = uuid.UUID("6a1f4cf5-3c1b-4c43-9f39-1e0e7f0d5b11")


class OsVif:
    def __init__(self, address: str, bridge: str) -> None:
        import os_vif  # type: ignore[import-not-found]
        from os_vif import objects
        from oslo_config import cfg

        with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
            file.write(f"[os_vif_ovs]\novsdb_connection = {address}\n")
            file.flush()
            cfg.CONF([], project="os_vif", default_config_files=[file.name])
        os_vif.initialize()
        from vif_plug_ovs import privsep  # type: ignore[import-not-found]

        # We are root: no helper process, which would be slower.
        privsep.vif_plug.set_client_mode(False)
        self._os_vif, self._objects, self._bridge = os_vif, objects, bridge
        self._instance = objects.instance_info.InstanceInfo(uuid=str(uuid.uuid4()), name="vm")

    def plug(self, number: int) -> None:
        self._os_vif.plug(self._vif(number), self._instance)

    def unplug(self, number: int) -> None:
        self._os_vif.unplug(self._vif(number), self._instance)

    def _vif(self, number: int) -> Any:
        objects = self._objects
        identity = str(uuid.uuid5(_NAMES, str(number)))
        return objects.vif.VIFVHostUser(
            id=identity,
            address=f"52:54:01:00:{number >> 8 & 255:02x}:{number & 255:02x}",
            network=objects.network.Network(id=identity, bridge=self._bridge, mtu=1500),
            path=f"/run/np/vhost-{identity[:8]}",
            mode="server",  # of QEMU: OVS is the client
            vif_name=f"vhu{identity[:11]}",
            port_profile=objects.vif.VIFPortProfileOpenVSwitch(interface_id=identity, datapath_type="netdev"),
            plugin="ovs",
        )


def make(address: str, bridge: str) -> OsVif:
    return OsVif(address, bridge)
