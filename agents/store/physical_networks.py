"""The physical networks that the API made, as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agents.store.database import Database
from agents.store.event_log import DELETED, EventLog, NewEvent
from agents.store.set_aside import SetAside
from netplugin.api.errors import Conflict
from netplugin.api.event_models import EventKind
from netplugin.api.models import PortSpec
from netplugin.api.physical_models import PhysicalNetworkSpec

_TABLE = "physical_networks"


class StoredPhysicalNetworks:
    """Any thread reads them from memory. Hold ``Database.lock`` while a change depends on ports."""

    def __init__(self, database: Database, set_aside: SetAside, events: EventLog) -> None:
        self._database = database
        self._events = events
        self._set_aside = set_aside
        read = PhysicalNetworkSpec.model_validate_json
        found = set_aside.sift(_TABLE, lambda row: (row["name"], read(row["spec"])))
        self._found: Mapping[str, PhysicalNetworkSpec] = dict(found)
        #: Those that were deleted since the start, for calls that have looked at them before.
        self._deleted: frozenset[str] = frozenset()

    def all(self) -> Mapping[str, PhysicalNetworkSpec]:
        return MappingProxyType(dict(self._found))

    def save(self, name: str, spec: PhysicalNetworkSpec) -> None:
        """Raises: HostError; then nothing is changed."""
        with self._database.lock:
            with self._database.transaction():
                self._events.write([_saved(name, self._found.get(name), spec)])
                self._database.sql.execute(
                    "INSERT OR REPLACE INTO physical_networks VALUES (?, ?)", (name, spec.model_dump_json())
                )
                self._set_aside.forget(_TABLE, name)
            self._set_aside.forgotten(_TABLE, [name])
            self._found = {**self._found, name: spec}
            self._deleted -= {name}
        self._events.announce()

    def forget(self, name: str, *, stays: bool = False) -> None:
        """``stays``: the configuration has the name too. Raises: HostError; then nothing is changed."""
        with self._database.lock:
            with self._database.transaction():
                self._events.write([NewEvent(EventKind.PHYSICAL_NETWORK, DELETED, subject=name)])
                self._database.sql.execute("DELETE FROM physical_networks WHERE name = ?", (name,))
                self._set_aside.forget(_TABLE, name)
            self._set_aside.forgotten(_TABLE, [name])
            self._found = {known: spec for known, spec in self._found.items() if known != name}
            self._deleted |= frozenset() if stays else {name}
        self._events.announce()

    def require(self, port_id: str, spec: PortSpec) -> None:
        """Refuse a port whose network was deleted while the call was on its way. Raises: Conflict."""
        name = spec.network.physical_network
        if spec.overlay_id is None and name in self._deleted:
            raise Conflict(
                f"physical network {name} was deleted meanwhile",
                step="store",
                port_id=port_id,
                fix=f"PUT /v1/physical-networks/{name} again",
            )


def _saved(name: str, before: PhysicalNetworkSpec | None, spec: PhysicalNetworkSpec) -> NewEvent:
    """The event of a network that is stored: with the fields that change, if there was one."""
    if before is None:
        return NewEvent(EventKind.PHYSICAL_NETWORK, "created", subject=name)
    fields = (field for field in type(spec).model_fields if getattr(spec, field) != getattr(before, field))
    return NewEvent(EventKind.PHYSICAL_NETWORK, "changed", ", ".join(fields), subject=name)
