"""Plan the rate limits of ports (pure).

What a VM receives leaves the host through its tap, so a token bucket (``netplugin.host.tc.Tbf``) at
the root of the tap limits it. What a VM sends enters the tap, where the kernel has no queue. It is
redirected to an ifb of its own, which has such a bucket at its root, and then continues as if it came
from the tap. Queueing lets TCP come close to the limit; policing would drop the excess instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from drivers.linuxbridge.commands import (
    CreateDevice,
    RemoveDevice,
    RemoveRate,
    RemoveRedirect,
    SetDevice,
    SetRate,
    SetRedirect,
)
from drivers.linuxbridge.model import BridgeObservation, Tap
from drivers.linuxbridge.segments import port_of, shaper_of
from netplugin.backend import Change
from netplugin.host.link_values import Link
from netplugin.host.names import SHAPER, device_name
from netplugin.host.tc import Queueing


def set_rates(tap: Tap, link: Link | None, seen: BridgeObservation) -> list[Change]:
    """Plan the rate limits of a tap; ``link`` is None if the tap is yet to be created."""
    found = seen.queueing.get(tap.name, Queueing()) if link else Queueing()
    ports = (tap.port_id,)
    changes: list[Change] = []
    if tap.ingress is not None and found.root != tap.ingress:
        changes.append(SetRate(ports, tap.name, tap.ingress))
    elif tap.ingress is None and found.root is not None:
        changes.append(RemoveRate(ports, tap.name))
    return changes + (_shape(tap, found, seen) if tap.egress else _unshape(tap, found, seen))


def _shape(tap: Tap, found: Queueing, seen: BridgeObservation) -> list[Change]:
    ports = (tap.port_id,)
    device = shaper_of(tap.port_id, tap.mtu)
    link = seen.shapers.get(device.name)
    changes: list[Change] = []
    if link is not None and device.must_be_remade(link):
        changes.append(RemoveDevice(ports, device.name))
        link = None
    if link is None:
        changes.append(CreateDevice(ports, device))
    elif device.differs(link):
        changes.append(SetDevice(ports, device))
    rate = seen.queueing.get(device.name, Queueing()).root if link else None
    if tap.egress is not None and rate != tap.egress:
        changes.append(SetRate(ports, device.name, tap.egress))
    if link is None or found.redirect != link.index:
        changes.append(SetRedirect(ports, tap.name, device.name))
    return changes


def _unshape(tap: Tap, found: Queueing, seen: BridgeObservation) -> list[Change]:
    ports, name = (tap.port_id,), device_name(SHAPER, tap.port_id)
    changes: list[Change] = []
    if found.redirect is not None:
        changes.append(RemoveRedirect(ports, tap.name))
    if name in seen.shapers:
        changes.append(RemoveDevice(ports, name))
    return changes


def unneeded_shapers(desired: Iterable[str], leaving: Iterable[str], seen: BridgeObservation) -> list[Change]:
    """Remove shapers of ports that are being removed, and shapers that were created but never marked."""
    names = {device_name(SHAPER, port_id): (port_id,) for port_id in leaving}
    kept = {device_name(SHAPER, port_id) for port_id in desired}
    return [
        RemoveDevice(names.get(name, ()), name)
        for name, link in sorted(seen.shapers.items())
        if name in names or (port_of(link) is None and name not in kept)
    ]
