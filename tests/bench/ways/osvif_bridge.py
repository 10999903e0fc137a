"""os-vif's plug-in for Linux bridges: it sees to the bridge, and leaves the port itself to libvirt.

os-vif 5 has it no more; it is that of 4.
"""

from __future__ import annotations

import tempfile
import uuid


class OsVifBridge:
    def __init__(self, uplink: str, bridge: str) -> None:
        import os_vif  # type: ignore[import-not-found]
        from os_vif import objects
        from oslo_concurrency import lockutils  # type: ignore[import-not-found]
        from oslo_config import cfg

        with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
            cfg.CONF([], project="os_vif", default_config_files=[file.name])
        lockutils.set_defaults(tempfile.gettempdir())
        os_vif.initialize()
        from vif_plug_linux_bridge import privsep  # type: ignore[import-not-found]

        # We are root: no helper process, which would be slower.
        privsep.vif_plug.set_client_mode(False)
        self._os_vif, self._objects = os_vif, objects
        self._uplink, self._bridge = uplink, bridge
        self._instance = objects.instance_info.InstanceInfo(uuid=str(uuid.uuid4()), name="vm")

    def plug(self, number: int) -> None:
        objects = self._objects
        network = objects.network.Network(
            id=str(uuid.uuid4()),
            bridge=self._bridge,
            bridge_interface=self._uplink,
            should_provide_bridge=True,
            mtu=1500,
        )
        vif = objects.vif.VIFBridge(
            id=str(uuid.uuid4()),
            address=f"52:54:01:00:{number >> 8 & 255:02x}:{number & 255:02x}",
            network=network,
            bridge_name=self._bridge,
            vif_name=f"tapv{number}",
            has_traffic_filtering=True,  # by neutron: no rules of iptables
            plugin="linux_bridge",
        )
        self._os_vif.plug(vif, self._instance)

    def unplug(self, number: int) -> None:
        """It removes nothing."""


def make(address: str, bridge: str) -> OsVifBridge:
    return OsVifBridge(address, bridge)
