"""Asks the daemons of this host side by side: one that hangs costs its own deadline and no more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from netplugin.tuning.live import Live
from netplugin.tuning.live_libvirt import read_libvirt
from netplugin.tuning.live_ovs import read_ovs


def read_live(ovs_rundir: Path, libvirt_uri: str) -> Live:
    """What OVS and libvirt say, within some seconds whatever they do; raises nothing."""
    with ThreadPoolExecutor(2) as asking:
        ovs = asking.submit(read_ovs, ovs_rundir)
        libvirt = asking.submit(read_libvirt, libvirt_uri)
        domains = libvirt.result()
        return Live(ovs.result(), domains.domains, domains.versions)
