"""Ports that carry our mark and are in no record: which may go, and what is said of the others.

That a record is missing is no reason to take a NIC from a VM: the store may be new, an older copy or
another one. Each port therefore carries the stamp of its record (``Store.stamp``). A port that this
store has forgotten, which it does once the host has let go of it, is known by its stamp: if it is
there again (a write that landed late, a database that was put back), it is removed. All others stay
until the platform PUTs them or somebody says that they may go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.store import Store
from netplugin.backend import ObservedPort
from netplugin.models import Finding

_NAMED = 20  # ports that one sentence names; the others are counted


@dataclass(frozen=True)
class Orphans:
    """``forgotten`` may go; ``kept`` stay, each for the reason given."""

    forgotten: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def among(cls, store: Store, backend: str, ports: Mapping[str, ObservedPort]) -> Orphans:
        """Those of the ports that the backend has on the host of which no record is."""
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
    """Why the store has no record of a port that it has not forgotten."""
    made_by, _, _ = stamp.partition("/")
    if store.set_aside.get("ports", port_id) is not None:
        return "their records could not be read and are set aside"
    if not stamp:
        return "they carry no store's mark"
    if made_by != store.identity:
        return f"another store made them, {made_by}"
    return "this store made them and has no record of them: it is an older copy"


def sentences(kept: Mapping[str, str]) -> list[str]:
    """One for each reason, with the ports."""
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
    """What an operator should know of the ports that are kept."""
    return [
        Finding(
            id=f"ports-not-in-store-{backend}",
            status="warn",
            found=sentence,
            expected="a record of every port with our mark",
            fix="PUT the ports again; remove what is then left with: "
            "netplugin reconcile --remove-orphans",
        )
        for sentence in sentences(kept)
    ]
