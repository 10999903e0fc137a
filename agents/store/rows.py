"""Rows of the store as values."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field

from agents.store.port_table import Record
from agents.store.set_aside import Row
from netplugin.api.errors import Problem
from netplugin.api.migration import Migration
from netplugin.api.models import NetworkSpec, PortSpec, PortState
from netplugin.backend import Claim, Overlay

#: The parts of a spec that most ports have alike.
_SHARED = ("network", "vf", "qos", "port_security")


@dataclass
class Parts:
    """What specs have in common, once each: 3 KB less for each port."""

    values: dict[object, object] = field(default_factory=dict)
    #: The names of the fields that are given, which are all of them in a stored spec.
    given: dict[frozenset[str], set[str]] = field(default_factory=dict)


def record_of(row: Row, claims: tuple[Claim, ...]) -> Record:
    """The record of a port. Raises: ValueError, TypeError, KeyError."""
    previous, error, migration = row["previous_spec"], row["error"], row["migration"]
    return Record(
        port_id=row["port_id"],
        spec=PortSpec.model_validate_json(row["spec"]),
        state=PortState(row["state"]),
        previous=PortSpec.model_validate_json(previous) if previous else None,
        error=Problem.model_validate_json(error) if error else None,
        claims=claims,
        timings_ms={sys.intern(part): ms for part, ms in json.loads(row["timings"]).items()},
        standby_of=row["standby_of"],
        migration=Migration.model_validate_json(migration) if migration else None,
    )


def sharing(spec: PortSpec, parts: Parts) -> PortSpec:
    """The same spec, with the parts that it has in common with others."""
    same = {name: parts.values.setdefault(part, part) for name in _SHARED if (part := getattr(spec, name))}
    given = parts.given.setdefault(frozenset(spec.model_fields_set), spec.model_fields_set)
    return PortSpec.model_construct(_fields_set=given, **{**dict(spec), **same})


def network_of(row: Row) -> Overlay:
    """A VXLAN network. Raises: ValueError, TypeError, KeyError."""
    spec = NetworkSpec.model_validate_json(row["spec"])
    return Overlay(row["network_id"], spec, int(row["local_vlan"]))


def quarantined(row: Row) -> tuple[Claim, str]:
    """A resource in quarantine, and why. Raises: KeyError."""
    return Claim(row["kind"], row["key"]), row["reason"]
