"""What a physical network may not be on this host, and what cannot change under its ports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from agents.store.port_table import Record
from netplugin.api.errors import Conflict, InvalidRequest, Unsupported, some
from netplugin.api.physical_models import KEPT_PARTS, UPLINK_MTU, PhysicalNetworkSpec
from netplugin.api.problem import FieldError
from netplugin.backend import Observation
from netplugin.host.physical_networks import completed
from netplugin.optional import UsesPhysicalNetworks

#: The backends that use physical networks, by name.
Users: TypeAlias = Mapping[str, UsesPhysicalNetworks[Observation]]
#: What cannot change under the ports of a part: the field's name, and where it is in the spec.
_FIXED = {
    "ovs": ("bridge", "ovs.devices"),
    "linuxbridge": ("bridge", "linuxbridge.interface"),
    "sriov": ("sriov.devices",),
}


def refuse_unusable(name: str, spec: PhysicalNetworkSpec, users: Users, enabled: Collection[str]) -> None:
    """Raises: InvalidRequest for what no enabled backend uses, Unsupported for what none keeps; Conflict."""
    for part in sorted(spec.parts):
        if not any(part in uses.network_parts for uses in users.values()):
            message = f"no enabled backend uses it (enabled: {', '.join(sorted(enabled)) or 'none'})"
            raise InvalidRequest.of_field(part, message)
    if unused := spec.unused():
        detail = "; ".join(f"{error.field}: {error.message}" for error in unused)
        raise InvalidRequest(detail, step="validate", fix="leave it out", errors=unused)
    # Each part that can be kept.
    parts = sorted(spec.parts.intersection(KEPT_PARTS)) or sorted(spec.parts)
    lacks = [part for part in parts if not any(uses.network_parts.get(part) for uses in users.values())]
    if spec.keep and lacks:
        message = f"no enabled backend keeps {' or '.join(lacks)}"
        fix = "enable dpdkvhostuser (ovs) or linuxbridge, or leave keep out"
        raise Unsupported.of_field("keep", message, fix=fix)
    for uses in users.values():
        if spec.parts & uses.network_parts.keys():
            uses.check_network(name, spec)


def refuse_change(
    name: str,
    spec: PhysicalNetworkSpec,
    before: PhysicalNetworkSpec | None,
    ports: Sequence[Record],
    users: Users,
) -> None:
    """Refuse what would take the uplink from live ports, or is too small for them. Raises: Conflict."""
    for part, fields in _FIXED.items():
        own = [record for record in ports if _uses(users, record, part)]
        changed = [field for field in fields if _value(name, spec, field) != _value(name, before, field)]
        changed = changed if part in spec.parts else [part]
        if before is not None and own and part in before.parts and changed:
            raise _in_use(
                f"{', '.join(changed)} of physical network {name} cannot change under its ports",
                own,
                [FieldError(field=field, message="cannot change live") for field in changed],
            )
    # Without one, an uplink that OVS gets again has the default.
    mtu, shrinks = _mtu(spec), before is not None and _mtu(spec) < _mtu(before)
    checked = spec.mtu is not None or shrinks
    large = [r for r in ports if checked and _uses(users, r, "ovs") and r.spec.network.mtu > mtu]
    if large:
        message = f"{mtu} is below the network.mtu of ports"
        raise _in_use(f"mtu: {message}", large, [FieldError(field="mtu", message=message)])
    moves = any(_value(name, spec, field) != _value(name, before, field) for field in _FIXED["ovs"])
    if before is not None and (moves or shrinks or (before.keep and not spec.keep)):
        _refuse_shared(name, users)


def refuse_used(name: str, ports: Sequence[Record], users: Users) -> None:
    """Raises: Conflict while there are ports, or others use the bridge."""
    if ports:
        raise _in_use(f"physical network {name} has {len(ports)} ports here", ports, [])
    _refuse_shared(name, users)


def _refuse_shared(name: str, users: Users) -> None:
    """Refuse what would take the bridge from others: the tunnels of VXLAN networks, or the host."""
    for uses in users.values():
        if holders := uses.network_holders(name):
            raise Conflict(
                f"the bridge of physical network {name} is used by others: {some(sorted(holders))}",
                step="validate",
                fix="before that, delete the ports of VXLAN networks that it names or move "
                "[ovs] local_ip to another bridge, and take ports and addresses of others from it",
            )


def _mtu(spec: PhysicalNetworkSpec) -> int:
    return spec.mtu or UPLINK_MTU


def _uses(users: Users, record: Record, part: str) -> bool:
    """Whether the backend of a port uses this part; one that is not loaded may."""
    uses = users.get(record.spec.backend)
    return uses is None or part in uses.network_parts


def _value(name: str, spec: PhysicalNetworkSpec | None, field: str) -> object:
    """The value of a field by its path; the order of devices does not matter."""
    if spec is None:
        return None
    value: object = completed(name, spec)
    for step in field.split("."):
        value = getattr(value, step) if value is not None else None
    return frozenset(value) if isinstance(value, tuple) else value


def _in_use(detail: str, ports: Collection[Record], errors: list[FieldError]) -> Conflict:
    return Conflict(
        f"{detail}: {some(sorted(record.port_id for record in ports))}",
        step="validate",
        fix="delete these ports before, or move them to another network",
        errors=errors,
    )
