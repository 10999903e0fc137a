"""Ports made by libvirt's own ``<interface type='bridge'>``, plugged into a domain that runs.

The domain is paused: what is measured is libvirt and QEMU, not a guest. A paused guest lets no device go,
so that ports stay until the domain is destroyed and another one is started in its place.
"""

from __future__ import annotations

import time
from typing import Any, Self

import libvirt  # type: ignore[import-untyped]

from tests.bench.ways import Plugged, Way
from tests.lab.guest import Guest, domain_xml
from tests.lab.libvirtd import PrivateLibvirt

SLOTS = 24
_NAME = "bench-bridge"


class ByLibvirt(Way):
    """``virDomainAttachDevice``: tap made, enslaved, brought up, and given to QEMU as a virtio NIC."""

    name = "libvirt <interface type='bridge'>"

    def __init__(self, daemons: PrivateLibvirt, bridge: str) -> None:
        self._connection = daemons.connect()
        self._bridge = bridge
        self._guest = Guest(_NAME)
        self._domain: Any = None
        self._attached = 0

    def __enter__(self) -> Self:
        self._guest.prepare()
        self._again()
        return self

    def __exit__(self, *_: object) -> None:
        self._domain.destroy()

    def plug(self, number: int) -> Plugged:
        if self._attached == SLOTS:
            self._domain.destroy()
            self._again()
        interface = f"""<interface type='bridge'>
          <mac address='52:54:02:00:{number >> 8 & 255:02x}:{number & 255:02x}'/>
          <source bridge='{self._bridge}'/><target dev='lv{number}'/><model type='virtio'/><mtu size='1500'/>
        </interface>"""
        start = time.perf_counter()
        self._domain.attachDeviceFlags(interface, libvirt.VIR_DOMAIN_AFFECT_LIVE)
        ms = (time.perf_counter() - start) * 1e3
        self._attached += 1
        return Plugged(ms)

    def unplug(self, number: int) -> None:
        return None

    def _again(self) -> None:
        xml = domain_xml(_NAME, spare_slots=SLOTS)
        self._domain = self._connection.createXML(xml, libvirt.VIR_DOMAIN_START_PAUSED)
        self._attached = 0
