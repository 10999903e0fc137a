"""The physical networks of this host: those of the configuration, and those that the API made.

Any thread may read them. A change replaces the whole snapshot, so whoever reads it once has networks
that fit together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar

from netplugin.api.errors import Conflict
from netplugin.api.physical_models import PhysicalNetworkSpec, identity_of
from netplugin.host.names import OVS_BRIDGE, device_name

T = TypeVar("T")
#: By name.
Networks = Mapping[str, PhysicalNetworkSpec]
_LONGEST_BRIDGE = 15  # IFNAMSIZ without its NUL: the bridge has an internal port of this name


def bridge_of(name: str, spec: PhysicalNetworkSpec) -> str | None:
    """The OVS bridge of a network; None if the network is not on OVS.

    Without a name of the caller's it is ``br-<network>``, or a digest if that is too long.
    """
    if spec.ovs is None or spec.bridge is not None:
        return spec.bridge if spec.ovs else None
    plain = f"br-{name}"
    return plain if len(plain) <= _LONGEST_BRIDGE else device_name(OVS_BRIDGE, name)


def linux_bridge_of(spec: PhysicalNetworkSpec) -> str | None:
    """The name that the Linux bridge of the flat network should have; None if none was chosen."""
    return spec.bridge if spec.linuxbridge is not None and spec.ovs is None else None


def completed(name: str, spec: PhysicalNetworkSpec) -> PhysicalNetworkSpec:
    """The spec with the name of its bridge."""
    return spec.model_copy(update={"bridge": bridge_of(name, spec) or spec.bridge})


def _uses(name: str, spec: PhysicalNetworkSpec) -> Iterator[tuple[str, str]]:
    """The bridge and the devices, which one network can have, each after the field of the spec that names it.

    A NIC is the same one whether OVS, a Linux bridge or its VFs use it.
    """
    if (bridge := bridge_of(name, spec) or linux_bridge_of(spec)) is not None:
        yield "bridge", bridge
    if spec.ovs is not None:
        for device in spec.ovs.devices:
            yield "ovs.devices", identity_of(device)
    if spec.linuxbridge is not None and spec.linuxbridge.interface:
        yield "linuxbridge.interface", spec.linuxbridge.interface
    if spec.sriov is not None:
        for device in spec.sriov.devices:
            yield "sriov.devices", identity_of(device.partition("#")[0])


def clash(name: str, spec: PhysicalNetworkSpec, others: Networks) -> Conflict | None:
    """Why the network cannot be with the others: one of them has its bridge or device."""
    desired = list(_uses(name, spec))
    for other, there in sorted(others.items()):
        taken = {device for _, device in _uses(other, there)} if other != name else set()
        for where, device in desired:
            if device in taken:
                message = f"{device} is that of physical network {other}"
                fix = f"name another, or DELETE /v1/physical-networks/{other}"
                return Conflict.of_field(where, message, fix=fix)
    return None


@dataclass(frozen=True)
class Snapshot:
    """The networks at one moment. The configuration wins over a stored network: see ``set_aside``."""

    configured: Networks = field(default_factory=dict)
    #: Stored networks that are in force.
    made: Networks = field(default_factory=dict)
    #: Stored networks that are not, each with the reason: the configuration has the name, or the bridge
    #: or a device of the network.
    set_aside: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> Networks:
        """The networks in force, by name."""
        return {**self.configured, **self.made}


def _snapshot(configured: Networks, stored: Networks) -> Snapshot:
    made: dict[str, PhysicalNetworkSpec] = {}
    aside: dict[str, str] = {}
    for name, spec in sorted(stored.items()):
        if name in configured:
            aside[name] = "the agent's configuration has a physical network of this name"
        elif (taken := clash(name, spec, configured)) is not None:
            aside[name] = taken.detail
        else:
            made[name] = spec
    return Snapshot(MappingProxyType(dict(configured)), MappingProxyType(made), aside)


class PhysicalNetworks:
    """The registry: drivers add what their options have, the agent what its store has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._configured: dict[str, PhysicalNetworkSpec] = {}
        self._stored: Networks = {}
        self._now = Snapshot()

    @property
    def now(self) -> Snapshot:
        return self._now

    def configure(self, networks: Networks) -> None:
        """Add networks of the configuration; those of one name are parts of one network."""
        with self._lock:
            for name, spec in networks.items():
                more = {key: value for key in type(spec).model_fields if (value := getattr(spec, key))}
                there = self._configured.get(name, spec)
                self._configured[name] = there.model_copy(update=more)
            self._now = _snapshot(self._configured, self._stored)

    def replace_stored(self, stored: Networks) -> None:
        """Set the networks that the API made, all at once."""
        with self._lock:
            self._stored = dict(stored)
            self._now = _snapshot(self._configured, self._stored)


class Derived(Generic[T]):
    """A value that follows from the networks that the API made; computed when they have changed."""

    def __init__(self, networks: PhysicalNetworks, derive: Callable[[Networks], T]) -> None:
        self._networks = networks
        self._derive = derive
        made = networks.now.made
        self._last = made, derive(made)

    @property
    def value(self) -> T:
        made = self._networks.now.made
        of, value = self._last
        if of is not made:
            value = self._derive(made)
            self._last = made, value
        return value
