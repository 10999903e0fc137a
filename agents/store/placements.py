"""The placements of VMs: the CPUs and memory reserved for a VM until its last port is deleted."""

from __future__ import annotations

from agents.store.database import Database
from netplugin.api.errors import NotFound
from netplugin.libvirt.pins import Placement


class Placements:
    """``Store.save`` deletes those of VMs without ports. Hold ``Database.lock`` while one is chosen."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> dict[str, Placement]:
        with self._database.lock:
            rows = self._database.sql.execute("SELECT vm_id, placement FROM placements ORDER BY vm_id")
            return {vm_id: Placement.model_validate_json(text) for vm_id, text in rows}

    def save(self, vm_id: str, placement: Placement) -> None:
        """Save the placement of a VM. Raises: NotFound if the VM has no ports any more."""
        with self._database.transaction():
            written = self._database.sql.execute(
                "INSERT OR REPLACE INTO placements SELECT ?, ? "
                "WHERE EXISTS (SELECT 1 FROM ports WHERE vm_id = ?)",
                (vm_id, placement.model_dump_json(), vm_id),
            )
            if written.rowcount != 1:
                raise NotFound(f"VM {vm_id} has no ports here any more", step="store")
