"""The network between two VMs for the time of a measurement: a Linux bridge without an uplink."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from netplugin.api.errors import Conflict
from netplugin.host.link_values import Bridge
from netplugin.host.links import Links
from netplugin.tuning.verifying.guest.machine import BRIDGE, MTU, STEP

_ALIAS = "netplugin-verify"
_ADDRESS = "52:54:00:5a:fd:00"


def remove() -> None:
    """Remove the bridge, which a killed run may have left. Raises: HostError; Conflict if it is not ours."""
    links = Links()
    there = links.get(BRIDGE)
    # The alias is set after the device is made: until then its MAC address identifies it.
    if there is not None and there.alias != _ALIAS and (there.alias or there.address != _ADDRESS):
        raise Conflict(f"{BRIDGE} is a device of something else", step=STEP, fix="rename that device")
    if there is not None:
        links.delete(BRIDGE)


@contextmanager
def switch() -> Iterator[None]:
    """Make the bridge, and remove it at the end. Raises: HostError, Conflict."""
    remove()
    links = Links()
    try:
        links.create(BRIDGE, Bridge(), alias=_ALIAS, address=_ADDRESS, mtu=MTU)
        links.set(BRIDGE, up=True)
        yield
    finally:
        links.delete(BRIDGE)
