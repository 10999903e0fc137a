"""Findings about the store itself."""

from __future__ import annotations

from agents.store import Store
from netplugin import store_file
from netplugin.models import Finding


def store_findings(store: Store) -> list[Finding]:
    """Findings about unreadable rows, and about damaged databases that were moved aside."""
    found = [
        Finding(
            id=f"store-row-{aside.table}-{aside.key}",
            status="warn",
            found=f"the row {aside.key} of {aside.table} could not be read and is set aside: "
            f"{aside.reason}",
            expected="a store whose rows can all be read",
            fix="ask for the same thing again (PUT), or restore a copy: netplugin store restore",
        )
        for aside in store.set_aside.all()
    ]
    found += [
        Finding(
            id=f"store-damaged-{path.name}",
            status="warn",
            found=f"the store was damaged; it is now {path}, and the agent began with an empty one",
            expected="a whole database",
            fix="look at the disk; let the platform PUT its ports again, or restore a copy: "
            f"netplugin store restore; then move {path.name} away",
        )
        for path in store_file.damaged(store.database.path.parent)
    ]
    return found
