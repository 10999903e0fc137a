"""The NICs of the pool: those of ``[sriov] devices``, and those of networks that the API made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivers.vf.kernel import VfKernel
from drivers.vf.options import GROUP, PoolDevice, parse_devices, read_devices
from netplugin.api.errors import Conflict, InvalidRequest
from netplugin.api.physical_models import PhysicalNetworkSpec, VfPoolSpec
from netplugin.host.physical_networks import Derived, Networks, PhysicalNetworks

_FIELD = "sriov.devices"


def pool_devices(conf: Any, networks: PhysicalNetworks) -> Callable[[], tuple[PoolDevice, ...]]:
    """Read the option, add its networks to ``networks``, and return what returns the devices of both.

    Raises: ValueError naming the entry that cannot be parsed.
    """
    configured = read_devices(conf)
    networks.configure(_networks(conf))
    derived = Derived(networks, lambda made: (*configured, *_made_devices(made)))
    return lambda: derived.value


def _networks(conf: Any) -> Networks:
    by_network: dict[str, list[str]] = {}
    for entry in conf[GROUP].devices:
        network, _, device = entry.strip().partition(":")
        by_network.setdefault(network, []).append(device)
    return {
        name: PhysicalNetworkSpec.model_construct(
            sriov=VfPoolSpec.model_construct(devices=tuple(dict.fromkeys(devices)))
        )
        for name, devices in by_network.items()
    }


def _made_devices(made: Networks) -> list[PoolDevice]:
    return [device for name, spec in sorted(made.items()) for device in devices_of(name, spec)]


def devices_of(name: str, spec: PhysicalNetworkSpec) -> tuple[PoolDevice, ...]:
    """The devices of a network. Raises: ValueError naming the one that cannot be parsed."""
    return parse_devices([f"{name}:{device}" for device in spec.sriov.devices]) if spec.sriov else ()


def check_devices(kernel: VfKernel, name: str, spec: PhysicalNetworkSpec) -> None:
    """See ``netplugin.optional.UsesPhysicalNetworks``: devices that cannot be parsed, or are another's."""
    try:
        new = devices_of(name, spec)
    except ValueError as wrong:
        message = str(wrong).removeprefix("[sriov] devices: ")
        raise InvalidRequest.of_field(_FIELD, message) from None
    others = [device for device in kernel.devices if device.network != name]
    for address, networks in sorted(kernel.ambiguous((*new, *others)).items()):
        if name in networks:
            other = next(network for network in networks if network != name)
            message = f"NIC {address} is that of physical network {other}"
            raise Conflict.of_field(_FIELD, message, fix="name another NIC")
