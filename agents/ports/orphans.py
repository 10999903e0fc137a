"""Orphans: ports on the host with our mark but without a record. Decides which may be removed.

A missing record alone is no reason to remove the NIC of a VM: the store may be new, an older copy,
or another one. Each port therefore carries the stamp of its record (``Store.stamp``). The store
remembers the stamps of ports that it deleted after the host was clean. If such a port reappears (a
late write, a restored OVS database), it is removed. All other orphans stay until the platform PUTs
them or an operator permits their removal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.store.store import Store
from netplugin.api.models import Finding
from netplugin.backend import ObservedPort

_NAMED = 20  # ports listed by name; the others are counted


@dataclass(frozen=True)
class Orphans:
    """``forgotten`` may be removed; ``kept`` stay, with the reasons."""

    forgotten: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def among(cls, store: Store, backend: str, ports: Mapping[str, ObservedPort]) -> Orphans:
        """Select the orphans among the ports that the backend has on the host."""
        forgotten: list[str] = []
        kept: dict[str, str] = {}
        for port_id, port in sorted(ports.items()):
            record = store.get(port_id)
            if record is not None and record.spec.backend == backend:
                continue
            if store.has_forgotten(port_id, port.stamp):
                forgotten.append(port_id)
            else:
                kept[port_id] = _why(store, port_id, port.stamp)
        return cls(tuple(forgotten), kept)


def _why(store: Store, port_id: str, stamp: str) -> str:
    """Why the store has no record of a port that it did not delete."""
    made_by, _, _ = stamp.partition("/")
    if store.set_aside.get("ports", port_id) is not None:
        return "their records could not be read and are set aside"
    if not stamp:
        return "they carry no store's mark"
    if made_by != store.identity:
        return f"another store made them, {made_by}"
    return "this store made them and has no record of them: it is an older copy"


def sentences(kept: Mapping[str, str]) -> list[str]:
    """One sentence per reason, with the ports."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for port_id, why in sorted(kept.items()):
        by_reason[why].append(port_id)
    return [
        f"{len(ports)} ports are on the host and not in the store ({why}): "
        + ", ".join(ports[:_NAMED])
        + (" and others" if len(ports) > _NAMED else "")
        for why, ports in sorted(by_reason.items())
    ]


def findings(backend: str, kept: Mapping[str, str]) -> list[Finding]:
    """Findings about the orphans that are kept."""
    return [
        Finding(
            id=f"ports-not-in-store-{backend}",
            status="warn",
            found=sentence,
            expected="a record of every port with our mark",
            fix="PUT the ports again; remove what is then left with: netplugin reconcile --remove-orphans",
        )
        for sentence in sentences(kept)
    ]
