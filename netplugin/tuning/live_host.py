"""Query the daemons of this host in parallel, so that a hanging one costs only its own timeout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from netplugin.tuning.live import Live
from netplugin.tuning.live_libvirt import read_libvirt
from netplugin.tuning.live_ovs import read_ovs


def read_live(ovs_rundir: Path, libvirt_uri: str) -> Live:
    """Query OVS and libvirt. Returns within a few seconds and raises nothing."""
    with ThreadPoolExecutor(2) as asking:
        ovs = asking.submit(read_ovs, ovs_rundir)
        libvirt = asking.submit(read_libvirt, libvirt_uri)
        domains = libvirt.result()
        return Live(ovs.result(), domains.domains, domains.versions)
